// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/schedule.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "error.h"
#include "gpu/programs.h"
#include "recorded/compile.h"
#include "recorded/numbered.h"
#include "recorded/programs.h"

namespace optfuse::recorded {
namespace {

void allocate(c10::StorageImpl *storage) {
    const c10::OptionalDeviceGuard there(
        is_gpu(storage->device()) ? std::optional<c10::Device>(storage->device()) : std::nullopt);
    storage->set_data_ptr_noswap(storage->allocator()->allocate(storage->nbytes()));
    unseal(storage);
}

// The storage of a result that a line has promised gets the memory of what its operator has made.
void give_memory(const at::Tensor &to, at::Tensor &&made) {
    c10::StorageImpl *storage = storage_of(to.unsafeGetTensorImpl());
    c10::StorageImpl *its = storage_of(made.unsafeGetTensorImpl());
    if (made.sizes() != to.sizes() || made.dtype() != to.dtype())
        fail("optfuse: an operator's result has another form than it had before, which is an "
             "error of optfuse");
    unmark(to.unsafeGetTensorImpl());
    if (made.use_count() == 1 && made.storage().use_count() == 1 && made.storage_offset() == 0 &&
        equal(made.strides(), to.strides()) && its->nbytes() == storage->nbytes()) {
        storage->set_data_ptr_noswap(std::move(its->_mutable_data_ptr_no_checks()));
        unseal(storage);
        return;
    }
    allocate(storage);
    to.copy_(made);
}

void run_operator(const Line &line, std::vector<c10::IValue> &values) {
    torch::jit::Stack stack;
    for (uint32_t i = line.first; i < line.results; i++)
        stack.push_back(std::move(values[i]));
    line.op.callBoxed(stack);
    for (uint32_t i = line.results, j = 0; i < line.end; i++, j++) {
        const c10::IValue to = std::move(values[i]);
        if (to.isTensor()) {
            give_memory(to.toTensor(), std::move(stack[j]).toTensor());
            continue;
        }
        auto made = std::move(stack[j]).toTensorList();
        const auto targets = to.toTensorList();
        for (size_t e = 0; e < made.size(); e++)
            give_memory(targets.get(e), made.extract(e));
    }
}

// A program over the memory of one group, or of several on a GPU, which run at the same time.
class Launch {
  public:
    // code: of a group, in which it gets its numbers.
    static void put_numbers(const Group &group, const std::vector<c10::IValue> &values,
                            std::vector<of_instruction> *code) {
        *code = group.code;
        for (const Group::Patch &patch : group.patches) {
            of_instruction &q = (*code)[patch.instruction];
            (patch.is_second ? q.t : q.s) = patch.number.in(values);
        }
        code->resize(of_program_fuse(code->data(), code->size()));
    }

    // The group's program is the one whose run is to come, or the last one.
    bool takes(const Group &group, const std::vector<c10::IValue> &values) {
        if (group.is_as_before)
            return group.joins;
        put_numbers(group, values, &next);
        const bool are_same =
            group.joins && std::equal(code.begin(), code.end(), next.begin(), next.end(),
                                      [](const of_instruction &x, const of_instruction &y) {
                                          return x.operation == y.operation && x.to == y.to &&
                                                 x.a == y.a && x.b == y.b && x.c == y.c &&
                                                 has_bits_of(x.s, y.s) && has_bits_of(x.t, y.t);
                                      });
        has_next = !are_same;
        return are_same;
    }

    void put(const Group &group, const std::vector<Entry> &entries) {
        if (std::exchange(has_next, false))
            code.swap(next);
        for (const uint32_t number : group.makes) {
            allocate(entries[number].storage);
            unmark(entries[number].impl);
        }
        Memory memory = {};
        for (size_t i = 0; i < group.memory.size(); i++)
            memory[i] = entries[group.memory[i]].memory();
        last = &group;
        of_program program = program_of(group);
        if (group.device.is_cpu())
            run_program(&program, memory, group.numel, group.dtype);
        else if (group.writes != 0)
            waiting.push_back(entry_of(memory, group.numel));
    }

    bool is_waiting() const { return !waiting.empty(); }
    void run() {
        if (is_waiting())
            run_on_gpu(program_of(*last), last->device, last->dtype, std::exchange(waiting, {}));
    }

  private:
    static bool has_bits_of(double x, double y) { return std::memcmp(&x, &y, sizeof x) == 0; }
    of_program program_of(const Group &group) const {
        return {code.data(), code.size(), group.reads, group.writes, false};
    }

    std::vector<of_instruction> code, next;
    bool has_next = false;
    const Group *last = nullptr;
    std::vector<of_cuda_entry> waiting;
};

struct KnownSchedules {
    std::unordered_map<uint64_t, std::unique_ptr<Schedule>> made;
    std::unordered_set<uint64_t> seen; // once, and not made yet
    size_t words = 0;
};

constexpr size_t kMostWords = 4u << 20; // 32 MB

uint64_t hash_of(const std::vector<uint64_t> &words) {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (const uint64_t word : words) {
        h = (h ^ word) * 0xD6E8FEB86659FD93ull;
        h ^= h >> 32;
    }
    return h;
}

// Lines that come for the first time may never come again. Null: they have no schedule.
const Schedule *schedule_of(const std::vector<Line> &lines, const std::vector<c10::IValue> &values,
                            const Numbered &numbered) {
    static thread_local KnownSchedules known;
    const uint64_t hash = hash_of(numbered.words);
    const auto found = known.made.find(hash);
    if (found != known.made.end())
        return found->second->words == numbered.words ? found->second.get() : nullptr;
    if (known.words > kMostWords) {
        known.made.clear();
        known.seen.clear();
        known.words = 0;
    }
    if (known.seen.insert(hash).second) {
        known.words++;
        return nullptr;
    }
    known.words += numbered.words.size();
    auto &made = known.made[hash];
    made = std::make_unique<Schedule>(compile(lines, values, numbered));
    return made.get();
}

bool is_absent(const c10::IValue &value) {
    return !each_tensor(value, [](const at::Tensor &tensor) {
        return !is_absent(storage_of(tensor.unsafeGetTensorImpl()));
    });
}

void run(const Schedule &schedule, const std::vector<Line> &lines, std::vector<c10::IValue> &values,
         const Numbered &numbered, Counts *counts) {
    Launch launch;
    std::vector<uint32_t> done;
    const auto finish = [&] {
        launch.run();
        for (const uint32_t line : done)
            for (uint32_t i = lines[line].first; i < lines[line].end; i++)
                if (!is_absent(values[i]))
                    values[i] = c10::IValue();
        done.clear();
    };
    for (const Step &step : schedule.steps) {
        const Group *group = step.is_group ? &schedule.groups[step.number] : nullptr;
        if (group == nullptr || !launch.takes(*group, values))
            finish();
        if (group != nullptr) {
            launch.put(*group, numbered.entries);
            counts->groups++;
        } else {
            run_operator(lines[step.number], values);
            counts->calls++;
        }
        done.insert(done.end(), step.done.begin(), step.done.end());
        if (!launch.is_waiting())
            finish();
    }
    finish();
}

// Results that will never be made are no part of the tape any more, and have no address.
void give_up(const std::vector<c10::IValue> &values) {
    each_tensor(values.data(), values.size(), [](const at::Tensor &tensor) {
        c10::StorageImpl *storage =
            tensor.has_storage() ? storage_of(tensor.unsafeGetTensorImpl()) : nullptr;
        if (storage != nullptr && is_absent(storage))
            storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
        return true;
    });
}

} // namespace

void run_lines(const std::vector<Line> &lines, std::vector<c10::IValue> &values,
               Counts *counts) {
    try {
        static thread_local Numbered numbered; // its room
        numbered.read(lines, values);
        if (const Schedule *schedule = schedule_of(lines, values, numbered)) {
            run(*schedule, lines, values, numbered, counts);
            return;
        }
        for (const Line &line : lines)
            run_operator(line, values);
        counts->calls += static_cast<int64_t>(lines.size());
    } catch (...) {
        give_up(values);
        throw;
    }
}

} // namespace optfuse::recorded
