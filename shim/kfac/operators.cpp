// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators through which Python collects Kronecker factors. `collector` is
// the address of a shared_ptr<Collector>, which stop_collecting() deletes.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "base/error.h"
#include "kfac/collector.h"
#include "kfac/packed.h"
#include "planners/kfac/messages.h"

namespace optfuse {
namespace {

using Shared = std::shared_ptr<Collector>;

Collector &collector_at(int64_t address) {
    return **reinterpret_cast<Shared *>(address);
}

// One weight and name a layer, with a bias that is trained, too, or without. sums: a tensor of
// the device and type of the sums.
int64_t collect_factors(const std::vector<at::Tensor> &weights,
                        const std::vector<std::string> &names, const std::vector<int64_t> &biased,
                        const at::Tensor &sums, const std::string &group) {
    std::vector<CollectedLayer> layers;
    for (size_t i = 0; i < weights.size(); i++) {
        const at::Tensor &w = weights[i];
        layers.push_back({w.numel() / w.size(0), w.size(0), biased[i] != 0});
    }
    auto made = std::make_unique<Shared>(
        std::make_shared<Collector>(std::move(layers), sums.options(), group));
    watch_layers(*made, weights, names);
    return reinterpret_cast<int64_t>(made.release());
}

// together: all processes come here, so that messages that have begun end.
void stop_collecting(int64_t collector, bool together) {
    const std::unique_ptr<Shared> gone(reinterpret_cast<Shared *>(collector));
    unwatch_layers(gone->get());
    if (together) {
        (*gone)->end();
        (*gone)->wait();
    }
}

void arrange_factors(int64_t collector, const std::vector<int64_t> &order,
                     const std::vector<int64_t> &group) {
    collector_at(collector).arrange(order, group);
}

void begin_factors(int64_t collector, double weight) {
    collector_at(collector).begin(weight);
}

// For each slot: uses, rows, when it was complete in seconds, whether a part came late. The
// messages may still be on their way.
at::Tensor end_factors(int64_t collector) {
    Collector &of = collector_at(collector);
    of.end();
    const std::vector<of_factor_slot> slots = of.slots();
    const at::Tensor told = at::empty({static_cast<int64_t>(slots.size()), 4}, at::kDouble);
    auto *row = told.mutable_data_ptr<double>();
    for (const of_factor_slot &slot : slots) {
        *row++ = static_cast<double>(slot.uses);
        *row++ = slot.rows;
        *row++ = slot.seconds;
        *row++ = slot.late;
    }
    return told;
}

void wait_for_factors(int64_t collector) {
    collector_at(collector).wait();
}

// The sums of all slots, in the order in which they are sent.
at::Tensor sums_of_factors(int64_t collector) {
    return collector_at(collector).sums();
}

at::Tensor late_factors(int64_t collector) {
    return collector_at(collector).late();
}

int64_t sent_factors(int64_t collector) {
    return static_cast<int64_t>(collector_at(collector).sent());
}

// running = decay * running + weight * the sums of the slot, all packed.
void merge_factor(int64_t collector, int64_t slot, const at::Tensor &running, double decay,
                  double weight, bool late) {
    Collector &of = collector_at(collector);
    const auto number = static_cast<size_t>(slot);
    const of_factor_slot found = of.slots()[number];
    merge_packed(running, of.sums(found, number, false), decay, weight);
    if (late)
        merge_packed(running, of.sums(found, number, true), 1, weight);
}

at::Tensor unpack_factor(const at::Tensor &packed, int64_t d, double damping) {
    return unpacked(packed, d, damping);
}

at::Tensor pack_factor(const at::Tensor &matrix) {
    const at::Tensor packed = at::zeros({packed_size(matrix.size(0))}, matrix.options());
    add_packed(packed, matrix.contiguous(), 1);
    return packed;
}

// Latency, and seconds a byte, of the link that fits these messages best.
std::tuple<double, double> fit_network_link(const std::vector<int64_t> &bytes,
                                            const std::vector<double> &seconds) {
    const std::vector<uint64_t> sizes(bytes.begin(), bytes.end());
    of_network_link link = {};
    check(of_fit_network_link(sizes.data(), seconds.data(), sizes.size(), &link));
    return {link.latency, link.seconds_per_byte};
}

// The number of the group of each message. how: of_fusion.
std::vector<int64_t> fuse_messages(int64_t how, const std::vector<double> &ready,
                                   const std::vector<int64_t> &bytes, double latency,
                                   double seconds_per_byte, double processor, int64_t threshold) {
    const std::vector<uint64_t> sizes(bytes.begin(), bytes.end());
    const of_network_link link = {latency, seconds_per_byte};
    std::vector<uint32_t> group(sizes.size());
    size_t n = 0;
    check(of_fuse_messages(static_cast<of_fusion>(how), ready.data(), sizes.data(), sizes.size(),
                           &link, processor, static_cast<uint64_t>(threshold), group.data(), &n));
    return {group.begin(), group.end()};
}

// The process that inverts each factor, or -1: all do. how: of_placement.
std::vector<int64_t> place_inverses(int64_t how, const std::vector<int64_t> &sizes,
                                    int64_t processes, int64_t everywhere_below) {
    const std::vector<uint32_t> d(sizes.begin(), sizes.end());
    std::vector<int32_t> owner(d.size());
    check(of_place_inverses(static_cast<of_placement>(how), d.data(), d.size(),
                            static_cast<size_t>(processes), static_cast<uint32_t>(everywhere_below),
                            owner.data(), nullptr));
    return {owner.begin(), owner.end()};
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("collect_factors(Tensor[] weights, str[] names, int[] biased, Tensor sums, str group) "
          "-> int",
          optfuse::collect_factors);
    m.def("stop_collecting(int collector, bool together) -> ()", optfuse::stop_collecting);
    m.def("arrange_factors(int collector, int[] order, int[] group) -> ()",
          optfuse::arrange_factors);
    m.def("begin_factors(int collector, float weight) -> ()", optfuse::begin_factors);
    m.def("end_factors(int collector) -> Tensor", optfuse::end_factors);
    m.def("wait_for_factors(int collector) -> ()", optfuse::wait_for_factors);
    m.def("sums_of_factors(int collector) -> Tensor", optfuse::sums_of_factors);
    m.def("late_factors(int collector) -> Tensor", optfuse::late_factors);
    m.def("sent_factors(int collector) -> int", optfuse::sent_factors);
    m.def("merge_factor(int collector, int slot, Tensor(a!) running, float decay, float weight, "
          "bool late) -> ()",
          optfuse::merge_factor);
    m.def("unpack_factor(Tensor packed, int d, float damping) -> Tensor", optfuse::unpack_factor);
    m.def("pack_factor(Tensor matrix) -> Tensor", optfuse::pack_factor);
    m.def("fit_network_link(int[] bytes, float[] seconds) -> (float, float)",
          optfuse::fit_network_link);
    m.def("fuse_messages(int how, float[] ready, int[] bytes, float latency, "
          "float seconds_per_byte, float processor, int threshold) -> int[]",
          optfuse::fuse_messages);
    m.def("place_inverses(int how, int[] sizes, int processes, int everywhere_below) -> int[]",
          optfuse::place_inverses);
}
