// SPDX-License-Identifier: BSD-3-Clause
// collector.h: watches the layers of a model and sums up their Kronecker factors, of which
// plugin/planners/kfac/factors.h decides when they are sent. Slot 2 l is A of layer l, slot 2 l + 1
// is G.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layers/layer.h"
#include "planners/kfac/factors.h"

namespace optfuse {

struct CollectedLayer {
    int64_t inputs, outputs; // of the weight, as a matrix
    bool ones;               // a bias is one more input, which is 1
};

class Collector final : public LayerWatcher {
  public:
    // group: the name of a process group of its own; "": one process. options: of the sums.
    Collector(std::vector<CollectedLayer> layers, const at::TensorOptions &options,
              const std::string &group);

    int64_t size_of(size_t slot) const; // d of its d x d matrix
    void arrange(const std::vector<int64_t> &order, const std::vector<int64_t> &group);
    // weight: of this process's g among those of all, times their number.
    void begin(double weight);
    // Sends what is left. Then slots() and failures are of this collection.
    void end();
    // Until the messages have come.
    void wait();
    std::vector<of_factor_slot> slots() const;
    size_t sent() const { return of_factors_sent(core_.get()); }
    at::Tensor sums() const { return sums_; }
    at::Tensor sums(const of_factor_slot &slot, size_t number, bool late) const;
    // The contributions of all slots that came late, zeros if none did here.
    at::Tensor late();

    uint64_t collection() const override { return of_factors_collection(core_.get()); }
    void input(size_t layer, uint64_t collection, const at::Tensor &x, const ConvOptions *conv,
               at::IntArrayRef kernel) override;
    void output_gradient(size_t layer, uint64_t collection, const at::Tensor &g,
                         const ConvOptions *conv) override;

  private:
    struct Contribution;
    struct Destroy {
        void operator()(of_factors *factors) const { of_factors_destroy(factors); }
    };
    void add(size_t slot, uint64_t collection, double rows, const at::Tensor &matrix, double scale);
    void check(of_status status);
    // Functions that the core calls, under its lock.
    static bool add_to_sums(void *ctx, const void *contribution, size_t offset, bool late);
    static bool reduce(void *ctx, size_t offset, size_t n);

    std::vector<CollectedLayer> layers_;
    c10::intrusive_ptr<c10d::ProcessGroup> group_;
    std::unique_ptr<of_factors, Destroy> core_;
    at::Tensor sums_;
    // Under the core's lock, or between collections.
    at::Tensor late_;
    double weight_ = 1;
    std::vector<c10::intrusive_ptr<c10d::Work>> sent_;
    std::exception_ptr failure_;
};

} // namespace optfuse
