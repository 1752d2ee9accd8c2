// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/schedule.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "gpu/programs.h"
#include "guard.h"
#include "plan/programs.h"
#include "plan/references.h"
#include "recorded/compile.h"
#include "recorded/numbered.h"
#include "recorded/products.h"
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

// Likewise the memory of a part of what several lines have made.
void give_part(const at::Tensor &to, const at::Tensor &made, bool is_needed) {
    if (is_needed || !equal(made.strides(), to.strides()) || made.nbytes() % OF_CACHE_LINE != 0)
        return give_memory(to, at::Tensor(made));
    unmark(to.unsafeGetTensorImpl());
    c10::StorageImpl *storage = storage_of(to.unsafeGetTensorImpl());
    const auto drop = [](void *whole) { delete static_cast<c10::Storage *>(whole); };
    storage->set_data_ptr_noswap({data_of(made.unsafeGetTensorImpl()),
                                  new c10::Storage(made.storage()), drop, storage->device()});
    unseal(storage);
}

// The versions of what a line writes were raised when it was recorded. Some kernels raise them
// themselves, as PyTorch's for lists on GPUs do.
class KeptVersions : Pinned {
  public:
    KeptVersions(const Line &line, const std::vector<c10::IValue> &values) {
        for (size_t i = 0; i < line.known->n; i++)
            if (line.known->writes[i])
                each_tensor(values[line.first + i], [this](const at::Tensor &tensor) {
                    if (!tensor.is_inference())
                        kept.emplace_back(tensor, tensor._version());
                    return true;
                });
    }
    ~KeptVersions() {
        for (const auto &[tensor, version] : kept) {
            c10::VariableVersion counter = torch::autograd::impl::version_counter(tensor);
            counter.set_version(version);
        }
    }

  private:
    std::vector<std::pair<at::Tensor, int64_t>> kept;
};

void run_operator(const Line &line, const std::vector<c10::IValue> &values) {
    torch::jit::Stack stack = arguments_of(line, values);
    {
        const KeptVersions as_recorded(line, values);
        line.op.callBoxed(stack);
    }
    for (uint32_t i = line.results, j = 0; i < line.end; i++, j++) {
        if (values[i].isTensor()) {
            give_memory(values[i].toTensor(), std::move(stack[j]).toTensor());
            continue;
        }
        auto made = std::move(stack[j]).toTensorList();
        const auto targets = values[i].toTensorList();
        for (size_t e = 0; e < made.size(); e++)
            give_memory(targets.get(e), made.extract(e));
    }
}

struct KnownSchedules {
    std::unordered_map<uint64_t, std::unique_ptr<Schedule>> made;
    std::unordered_set<uint64_t> seen; // once, and not made yet
    size_t words = 0;
};

constexpr size_t kMostWords = 4u << 20; // 32 MB

uint64_t hash_of(at::ArrayRef<uint64_t> words) {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    for (const uint64_t word : words) {
        h = (h ^ word) * 0xD6E8FEB86659FD93ull;
        h ^= h >> 32;
    }
    return h;
}

// Bytes that lines make: with more, programs, which need no memory for most of them, are made at once.
constexpr size_t kMostUnplanned = 16u << 20;

bool makes_much(const Numbered &numbered) {
    size_t bytes = 0;
    for (const Entry &e : numbered.entries)
        bytes += e.is_absent ? e.storage->nbytes() : 0;
    return bytes > kMostUnplanned;
}

// Lines that come for the first time may never come again. Null: they have no schedule.
const Schedule *schedule_of(const std::vector<Line> &lines, const std::vector<c10::IValue> &values,
                            const Numbered &numbered) {
    static thread_local KnownSchedules known;
    const at::ArrayRef<uint64_t> words = numbered.words();
    const uint64_t hash = hash_of(words);
    const auto found = known.made.find(hash);
    if (found != known.made.end())
        return words == found->second->words ? found->second.get() : nullptr;
    if (known.words > kMostWords) {
        known.made.clear();
        known.seen.clear();
        known.words = 0;
    }
    if (known.seen.insert(hash).second && !makes_much(numbered)) {
        known.words++;
        return nullptr;
    }
    known.words += words.size();
    auto made = std::make_unique<Schedule>(compile(lines, values, numbered));
    return (known.made[hash] = std::move(made)).get();
}

// More elements fill the threads by themselves, and what they need is not made at the same time.
constexpr int64_t kMostInBatch = 1 << 20;
constexpr size_t kMostGarbage = 4u << 20; // bytes

// The vectors that stay allocated from tape to tape.
struct Room {
    Numbered numbered;
    std::vector<of_instruction> code;
    std::vector<of_program> programs;
    std::vector<of_part> batch;
};

// For each thread.
Room &room_here() {
    static thread_local Room room;
    return room;
}

// A group's code with the numbers that there are now, before of_program_fuse().
void put_numbers(const Group &group, const std::vector<c10::IValue> &values,
                 of_instruction *code) {
    for (const Group::Patch &patch : group.patches) {
        of_instruction &q = code[patch.instruction];
        (patch.is_second ? q.t : q.s) = patch.number.in(values);
    }
}

struct Launch {
    const of_program *program;
    c10::Device device;
    of_dtype dtype;
    std::vector<of_gpu_entry> entries;
};

bool is_same(const of_program &a, const of_program &b) {
    const auto is_same_one = [](const of_instruction &x, const of_instruction &y) {
        return x.operation == y.operation && x.to == y.to && x.a == y.a && x.b == y.b &&
               x.c == y.c && std::memcmp(&x.s, &y.s, sizeof x.s) == 0 &&
               std::memcmp(&x.t, &y.t, sizeof x.t) == 0;
    };
    return a.code == b.code || std::equal(a.code, a.code + a.n, b.code, b.code + b.n, is_same_one);
}

class Execution {
  public:
    Execution(const Schedule &the_schedule, const std::vector<Line> &the_lines,
        std::vector<c10::IValue> &its, Room *room, Tape *its_tape)
        : schedule(the_schedule), lines(the_lines), values(its), numbered(room->numbered),
          entries(room->numbered.entries), tape(its_tape), code(room->code), programs(room->programs), batch(room->batch) {
        code.clear();
        programs.clear();
        batch.clear();
        code.reserve(schedule.instructions);
        programs.reserve(schedule.groups.size()); // parts refer to them
    }

    void run() {
        for (const Step &step : schedule.steps) {
            if (step.is_group) {
                put(schedule.groups[step.number]);
                tape->counts.groups++;
            } else {
                run_batch();
                run_operators(step);
            }
            end(step);
        }
        run_batch();
    }

  private:
    void run_operators(const Step &step) {
        const std::vector<uint32_t> &products = step.products;
        const std::vector<at::Tensor> made =
            products.empty() ? std::vector<at::Tensor>() : batched_product(products, lines, values);
        for (size_t i = 0; i < made.size(); i++) {
            const at::Tensor &to = values[lines[products[i]].results].toTensor();
            give_part(to, made[i], entries[numbered.of(to)].is_needed);
        }
        if (products.empty())
            run_operator(lines[step.number], values);
        else if (made.empty())
            for (const uint32_t line : products)
                run_operator(lines[line], values);
        tape->counts.calls += static_cast<int64_t>(std::max<size_t>(1, products.size()));
    }

    void put(const Group &group) {
        if ((group.waits && OF_GUARD(recorded_launch)) || elements + group.numel > kMostInBatch)
            run_batch();
        for (const uint32_t number : group.makes) {
            const Entry &e = entries[number];
            allocate(e.storage);
            unmark(e.impl);
        }
        if (!group.is_as_before)
            put_program(group);
        of_part part = {{}, group.numel, group.dtype, &programs.back()};
        for (size_t i = 0; i < group.memory.size(); i++)
            part.memory[i] = entries[group.memory[i]].memory();
        if (!group.device.is_cpu()) {
            if (group.writes != 0)
                put_on_gpu(part, group.device);
            return;
        }
        batch.push_back(part);
        elements += group.numel;
    }

    // Groups of one program go in one launch, among which the last ones are looked at.
    void put_on_gpu(const of_part &part, const c10::Device &device) {
        constexpr std::ptrdiff_t kLast = 8;
        const auto n = static_cast<std::ptrdiff_t>(launches.size());
        auto found = std::find_if(launches.end() - std::min(n, kLast), launches.end(), [&](const Launch &one) {
            return one.device == device && one.dtype == part.dtype && is_same(*one.program, *part.program);
        });
        if (found == launches.end())
            found = launches.insert(found, {part.program, device, part.dtype, {}});
        found->entries.push_back(entry_of(part));
    }

    void put_program(const Group &group) {
        const size_t first = code.size();
        code.insert(code.end(), group.code.begin(), group.code.end());
        put_numbers(group, values, &code[first]);
        const size_t n = of_program_fuse(&code[first], group.code.size());
        code.resize(first + n);
        programs.push_back({&code[first], n, group.reads, group.writes, false});
    }

    void run_batch() {
        if (!batch.empty())
            run_programs(batch);
        batch.clear();
        elements = 0;
        for (const Launch &one : launches)
            run_on_gpu(*one.program, one.device, one.dtype, one.entries);
        launches.clear();
    }

    // Lines that are done need nothing any more.
    void end(const Step &step) {
        for (const uint32_t done : step.done)
            for (uint32_t i = lines[done].first; i < lines[done].end; i++)
                tape->drop_later(std::move(values[i]));
        tape->garbage_bytes += step.frees;
        if (tape->garbage_bytes < kMostGarbage)
            return;
        run_batch();
        tape->drop_garbage();
    }

    const Schedule &schedule;
    const std::vector<Line> &lines;
    std::vector<c10::IValue> &values;
    const Numbered &numbered;
    const std::vector<Entry> &entries;
    Tape *const tape;
    std::vector<of_instruction> &code;
    std::vector<of_program> &programs;
    std::vector<of_part> &batch;  // on the CPU
    std::vector<Launch> launches; // on GPUs
    int64_t elements = 0; // of the batch
};

bool is_same_place(const Entry &e, const c10::TensorImpl *impl) {
    return e.storage == storage_of(impl) && e.offset == impl->storage_offset() &&
           equal(e.impl->sizes(), impl->sizes()) && equal(e.impl->strides(), impl->strides());
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

std::shared_ptr<const Program> program_of(const std::vector<Line> &lines,
                                          const std::vector<c10::IValue> &values,
                                          const c10::TensorImpl *param,
                                          const c10::TensorImpl *gradient,
                                          std::vector<std::shared_ptr<const Program>> *known,
                                          std::vector<at::Tensor> *state) {
    Numbered &numbered = room_here().numbered;
    numbered.read(lines, values);
    const Schedule *schedule = schedule_of(lines, values, numbered);
    if (schedule == nullptr || schedule->steps.size() != 1 || !schedule->steps[0].is_group)
        return nullptr;
    const Group &group = schedule->groups[0];
    if (!group.makes.empty() || group.numel != param->numel() ||
        dtype_of(param->dtype().toScalarType()) != group.dtype)
        return nullptr;
    unsigned char places[OF_REGISTERS];
    for (unsigned char i = 0; i < OF_REGISTERS; i++)
        places[i] = i;
    for (size_t i = 0; i < group.memory.size(); i++) {
        const Entry &e = numbered.entries[group.memory[i]];
        if (is_same_place(e, param)) {
            places[i] = OF_REGISTER_PARAM;
        } else if (is_same_place(e, gradient)) {
            places[i] = OF_REGISTER_GRAD;
        } else if (e.is_absent || state->size() == OF_MAX_STATE ||
                   e.impl->dtype() != param->dtype() ||
                   !equal(e.impl->sizes(), param->sizes()) ||
                   !equal(e.impl->strides(), param->strides())) {
            return nullptr;
        } else {
            places[i] = static_cast<unsigned char>(OF_REGISTER_STATE + state->size());
            state->push_back(reference_to(e.impl));
        }
    }
    std::vector<of_instruction> code = group.code;
    put_numbers(group, values, code.data());
    for (of_instruction &q : code)
        for (unsigned char *const at : {&q.to, &q.a, &q.b, &q.c})
            *at = places[*at];
    if (!group.device.is_cpu() && !fits_on_gpu(code, OF_REGISTER_STATE + state->size()))
        return nullptr;
    const std::shared_ptr<const Program> made = make_program(std::move(code));
    if (!made)
        return nullptr;
    constexpr std::ptrdiff_t kLast = 8;
    const auto n = static_cast<std::ptrdiff_t>(known->size());
    for (auto one = known->end() - std::min(n, kLast); one != known->end(); ++one)
        if (is_same((*one)->core, made->core))
            return *one;
    known->push_back(made);
    return made;
}

void run_lines(const std::vector<Line> &lines, std::vector<c10::IValue> &values, Tape *tape) {
    try {
        Room &room = room_here();
        room.numbered.read(lines, values);
        if (const Schedule *schedule = schedule_of(lines, values, room.numbered)) {
            Execution(*schedule, lines, values, &room, tape).run();
            return;
        }
        for (const Line &line : lines) {
            run_operator(line, values);
            std::fill(values.begin() + line.first, values.begin() + line.end, c10::IValue());
        }
        tape->counts.calls += static_cast<int64_t>(lines.size());
    } catch (...) {
        give_up(values);
        throw;
    }
}

} // namespace optfuse::recorded
