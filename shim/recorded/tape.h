// SPDX-License-Identifier: BSD-3-Clause
// tape.h: the lines of a step() that is recorded, in their order. A line is an operator with its
// arguments; what it makes are real tensors whose numbers are absent: their storages have no memory
// until the line runs. A storage that a line writes is sealed until then, and one that a line reads
// against writing, so that nobody comes between past the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "base/compat.h"
#include "memory/memory.h"
#include "recorded/known.h"
#include "recorded/operator_settings.h"

namespace optfuse::absent {
extern const Absent recorded; // record.cpp: what a line will make
}

namespace optfuse::recorded {

struct Line {
    c10::OperatorHandle op;
    const Known *known;
    uint32_t first, results, end; // among the tape's values: its arguments, what it makes
};

// Lines, and how they ran, in one step().
struct Counts {
    int64_t lines, plays, at_once, groups, calls;
};

// A small tensor that an operator has written at once, as it was before.
struct Undo {
    c10::Storage storage;
    std::array<char, 8> before;
    std::array<char, 8> bytes = before; // then, or what it was given

    void exchange() {
        std::array<char, 8> now = bytes;
        void *const memory = address(storage.unsafeGetStorageImpl());
        std::memcpy(now.data(), memory, storage.nbytes());
        std::memcpy(memory, bytes.data(), storage.nbytes());
        bytes = now;
    }
};

class Tape {
  public:
    // WATCHED: it is found out whether this step() could run before its gradients are there (ahead.h).
    // AHEAD: it does. Then no line runs, and none touches a tensor: those that there are have
    // neither seal nor another version.
    enum class Kind { PLAIN, WATCHED, AHEAD };

    void begin(Kind what = Kind::PLAIN); // one more step() of this thread
    bool is_ahead() const { return kind == Kind::AHEAD; }
    bool is_watched() const { return kind != Kind::PLAIN; }
    // step() does what can't be done before its gradients are there. Raises where they are not.
    void meets(const std::string &what);
    // The first of these, or nothing.
    const std::string &met() const { return first_met; }
    bool is_empty() const { return lines.empty(); }
    // Takes n arguments from the end of the stack, and the results' place there. The values that a
    // line writes count as changed from here on, and have other versions where stock counts them.
    void write(const c10::OperatorHandle &op, const Known &k, torch::jit::Stack *stack,
               bool is_counted);
    void make(const c10::OperatorHandle &op, const Known &k, torch::jit::Stack *stack,
              std::vector<c10::IValue> &&results);
    // A line that comes now has the present settings; stream: of one on a GPU.
    void begin_line(const std::optional<of_stream> &stream);
    // Whether a line reads or writes this storage.
    bool touches(const c10::StorageImpl *storage);
    // Whether it has to run before somebody reads the storage, or writes to it.
    bool has_line_before_read(const c10::TensorImpl *impl);
    bool has_line_before_write(const c10::TensorImpl *impl);
    // Parameters that wait for their gradients, whatever their size.
    ska::flat_hash_set<const c10::StorageImpl *> params;
    Streams own_streams; // the current ones of their GPUs where step() is called
    bool is_param(const c10::StorageImpl *storage) const {
        return params.find(storage) != params.end();
    }
    // Gradients of a step() that is watched: ahead, stand-ins are in their place.
    ska::flat_hash_set<const c10::StorageImpl *> gradients;
    bool is_gradient(const at::Tensor &tensor) const {
        return tensor.has_storage() &&
               gradients.find(storage_of(tensor.unsafeGetTensorImpl())) != gradients.end();
    }
    // An operator that runs at once is about to write to this tensor.
    void is_written_at_once(const at::Tensor &tensor, const std::string &op);
    // Runs the lines. An exception leaves the rest undone, as it would have in step().
    void play();
    // A tensor without numbers; contiguous, if no strides are given.
    at::Tensor absent(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      c10::Device device);
    // The context of the deleter of memory that its lines make: no other tape ever has the same.
    void *context() const { return reinterpret_cast<void *>(id); }
    // Gives them away: the tape is empty.
    void take_lines(std::vector<Line> *its_lines, std::vector<c10::IValue> *its_values,
                    Settings *its_settings);
    const std::vector<Line> &lines_now() const { return lines; }
    const std::vector<c10::IValue> &values_now() const { return values; }
    bool is_written_by_line(const c10::StorageImpl *storage) const {
        return written.find(storage) != written.end();
    }
    // Lines that read it have a copy of what is in it now.
    void copy_where_read(c10::StorageImpl *storage);
    std::vector<Undo> undo; // AHEAD
    Counts counts = {};
    // Tensors that lines have made and nobody needs. A tensor that Python has had takes the GIL when it dies:
    // whoever has that clears them.
    std::vector<c10::IValue> garbage;
    void drop_later(c10::IValue &&value) {
        if (value.isTensor() || value.isList())
            garbage.push_back(std::move(value));
    }
    void drop_garbage(); // takes it
    size_t garbage_bytes = 0; // of their memory
    // Whether operators are those of a backward pass that step() has begun.
    bool is_in_backward() const;

  private:
    void seal_written(const at::Tensor &tensor, bool is_counted);
    void seal_read(const at::Tensor &tensor);
    uint32_t take_arguments(const Known &k, torch::jit::Stack *stack);

    Settings settings; // of all lines
    Streams streams;
    std::vector<Line> lines;
    std::vector<c10::IValue> values;
    std::vector<c10::Storage> sealed, write_sealed;
    ska::flat_hash_set<const c10::StorageImpl *> touched; // of the first n_touched values
    size_t n_touched = 0;
    ska::flat_hash_set<const c10::StorageImpl *> written; // AHEAD: by lines
    Kind kind = Kind::PLAIN;
    int64_t graph_task = -1; // in which step() was called
    std::string first_met;
    const uintptr_t id = next_id();

    static uintptr_t next_id();
};

// Somebody may have this storage's address: no line refers to it from here on, on any thread.
void show(c10::StorageImpl *storage);
bool is_shown(const c10::StorageImpl *storage);

// That of this thread's step(), or null.
Tape *open_tape();

// The deleter of memory that a line will make; its context is the tape's.
void forget_absent(void *);

inline bool is_absent(const c10::StorageImpl *storage) {
    return data_ptr_of(storage).get_deleter() == forget_absent;
}

// Calls work(tensor) for each defined tensor among the values, until it returns false.
template <typename Work> bool each_tensor(const c10::IValue &value, const Work &work) {
    if (value.isTensor())
        return !value.toTensor().defined() || work(value.toTensor());
    if (value.isList())
        for (const c10::IValue &element : value.toListRef()) {
            if (!element.isTensor() && !element.isList() && !element.isNone())
                return true; // numbers
            if (!each_tensor(element, work))
                return false;
        }
    return true;
}
// A value of the tape as the operator takes it: numbers that PyTorch has made tensors are tensors.
torch::jit::Stack arguments_of(const Line &line, const std::vector<c10::IValue> &values);

// A counter or the like, which scripts may look at between lines at no cost.
inline bool is_small(const c10::StorageImpl *storage) {
    return storage->nbytes() <= 8 && storage->device_type() == c10::kCPU;
}

template <typename Work>
bool each_tensor(const c10::IValue *values, size_t n, const Work &work) {
    for (size_t i = 0; i < n; i++)
        if (!each_tensor(values[i], work))
            return false;
    return true;
}

} // namespace optfuse::recorded
