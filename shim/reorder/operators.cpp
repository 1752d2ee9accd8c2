// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators through which Python reorders layers. `reordering` is the address
// of an of_reordering, of which reorder() gives the caller a reference.
#include <torch/library.h>

#include "base/error.h"
#include "layers/layer.h"
#include "layers/tasks.h"
#include "planners/reorder/reordering.h"

namespace optfuse {
namespace {

of_reordering *at_address(int64_t address) {
    return reinterpret_cast<of_reordering *>(address);
}

std::unique_ptr<bool[]> flags(const std::vector<int64_t> &numbers, size_t n) {
    auto found = std::make_unique<bool[]>(n + 1);
    for (const int64_t number : numbers)
        found[static_cast<size_t>(number)] = true;
    return found;
}

// One weight and name a layer. schedule: of_reorder_schedule. held: layers, for
// OF_REORDER_CHOSEN; fixed: those that never wait; beside: those whose dW has a stream of its own.
int64_t reorder(const std::vector<at::Tensor> &weights, const std::vector<std::string> &names,
                int64_t schedule, int64_t k, int64_t budget, const std::vector<int64_t> &held,
                const std::vector<int64_t> &fixed, const std::vector<int64_t> &beside) {
    const size_t n = weights.size();
    const auto chosen = flags(held, n), never = flags(fixed, n), aside = flags(beside, n);
    of_reorder_choice choice = {};
    choice.schedule = static_cast<of_reorder_schedule>(schedule);
    choice.k = static_cast<size_t>(k);
    choice.budget_bytes = static_cast<uint64_t>(budget);
    choice.held = chosen.get();
    of_reordering *made = nullptr;
    leave_room_for_waiting(); // below the nodes of what runs before the first layer, too
    check(of_reordering_create(&choice, never.get(), n, &made));
    try {
        know_layers(of_reordering_user(made), weights, names,
                    std::vector<bool>(aside.get(), aside.get() + n));
    } catch (...) {
        of_reordering_release(made);
        throw;
    }
    return reinterpret_cast<int64_t>(made);
}

// Drops the caller's reference.
void stop_reordering(int64_t reordering) {
    forget_layers(at_address(reordering));
    of_reordering_stop(at_address(reordering));
    of_reordering_release(at_address(reordering));
}

// Each layer that the last forward pass used, in that order: its number, its place (-1: at
// once), the bytes of x, of y and of its weight, whether it is fixed, and whether only backward
// used it. Then the plan's extra bytes.
std::vector<int64_t> plan_of_reordering(int64_t reordering) {
    size_t n = 0;
    uint64_t extra = 0;
    check(of_reordering_plan(at_address(reordering), nullptr, 0, &n, &extra));
    std::vector<of_reordered> rows(n);
    check(of_reordering_plan(at_address(reordering), rows.data(), rows.size(), &n, &extra));
    std::vector<int64_t> found;
    for (const of_reordered &row : rows) {
        found.push_back(static_cast<int64_t>(row.layer));
        found.push_back(row.place == OF_REORDER_AT_ONCE ? -1 : static_cast<int64_t>(row.place));
        found.push_back(static_cast<int64_t>(row.work.input_bytes));
        found.push_back(static_cast<int64_t>(row.work.output_bytes));
        found.push_back(static_cast<int64_t>(row.work.weight_bytes));
        found.push_back(row.fixed);
        found.push_back(row.recomputed);
    }
    found.push_back(static_cast<int64_t>(extra));
    return found;
}

// Numbers of layers whose dW ran on a stream of its own, or will, after the last forward pass.
std::vector<int64_t> beside_in_reordering(int64_t reordering) {
    const std::vector<size_t> found = layers_beside(at_address(reordering));
    return {found.begin(), found.end()};
}

// Bytes that dW keep that wait: now, and the most since reorder().
std::vector<int64_t> held_by_reordering(int64_t reordering) {
    uint64_t now = 0, most = 0;
    of_reordering_held(at_address(reordering), &now, &most);
    return {static_cast<int64_t>(now), static_cast<int64_t>(most)};
}

// In forward passes from here on tasks are run for the sake of their time, or no more.
void rehearse_reordering(int64_t reordering, bool on) {
    of_reordering_rehearse(at_address(reordering), on);
}

// The k of "reverse_first" that is worth it, and the seconds that an iteration then takes,
// computes and waits for messages; and takes in stock's order. bytes_before: of parameters whose
// gradients come with the last dX; extra: bytes allowed; below 0: any.
std::tuple<int64_t, double, double, double, double>
best_k(int64_t reordering, double latency, double seconds_per_byte, int64_t bucket_bytes,
       int64_t first_bucket_bytes, bool await_first_use, int64_t bytes_before, int64_t extra) {
    of_network network = {};
    network.link = {latency, seconds_per_byte};
    network.bucket_bytes = static_cast<uint64_t>(bucket_bytes);
    network.first_bucket_bytes = static_cast<uint64_t>(first_bucket_bytes);
    of_reordering_best best = {};
    check(of_reordering_best_k(at_address(reordering), &network, await_first_use,
                               static_cast<uint64_t>(bytes_before),
                               extra < 0 ? UINT64_MAX : static_cast<uint64_t>(extra), &best));
    return {static_cast<int64_t>(best.k), best.times.iteration, best.times.compute,
            best.times.exposed, best.stock.iteration};
}

void choose_k(int64_t reordering, int64_t k) {
    of_reorder_choice choice = {};
    choice.schedule = OF_REORDER_REVERSE_FIRST;
    choice.k = static_cast<size_t>(k);
    of_reordering_choose(at_address(reordering), &choice);
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("reorder(Tensor[] weights, str[] names, int schedule, int k, int budget, int[] held, "
          "int[] fixed, int[] beside) -> int",
          optfuse::reorder);
    m.def("stop_reordering(int reordering) -> ()", optfuse::stop_reordering);
    m.def("plan_of_reordering(int reordering) -> int[]", optfuse::plan_of_reordering);
    m.def("beside_in_reordering(int reordering) -> int[]", optfuse::beside_in_reordering);
    m.def("rehearse_reordering(int reordering, bool on) -> ()", optfuse::rehearse_reordering);
    m.def("best_k(int reordering, float latency, float seconds_per_byte, int bucket_bytes, "
          "int first_bucket_bytes, bool await_first_use, int bytes_before, int extra) -> "
          "(int, float, float, float, float)",
          optfuse::best_k);
    m.def("choose_k(int reordering, int k) -> ()", optfuse::choose_k);
    m.def("held_by_reordering(int reordering) -> int[]", optfuse::held_by_reordering);
}
