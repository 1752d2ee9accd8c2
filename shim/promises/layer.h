// SPDX-License-Identifier: BSD-3-Clause
// layer.h: a linear layer whose weight's gradient may be promised, and what became of its promises.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "layers/layer.h"
#include "plan/plan.h"
#include "promises/product.h"
#include "promises/trials.h"

namespace optfuse {

// Any thread calls.
class PromisingLayer final : public Promiser,
                             public std::enable_shared_from_this<PromisingLayer> {
  public:
    PromisingLayer(std::string label, bool forced) : label_(std::move(label)), forced_(forced) {}

    // Gradients, by what became of them.
    struct Counts {
        uint64_t promised = 0;    // sums of promises count once; of these:
        uint64_t panels = 0;      // the update computed it panel by panel
        uint64_t made = 0;        // somebody looked at it, and it was computed into memory
        uint64_t whole = 0;       // contributions that were not promised
        const char *because = ""; // the last one that was not
    };
    Counts counts() const;
    const std::string &label() const { return label_; }

    bool takes(int64_t rows, const at::Tensor &weight) const override;
    void ask_behind_linear(const at::Tensor &output, const at::Tensor &weight,
                           uint64_t first_node) override; // operators.cpp
    // Whether this dY may be a factor of a promise, as far as dY alone tells; by_rows: of an
    // embedding's. If not, the gradient counts as computed.
    bool may_promise(const at::Tensor &dy, bool by_rows);
    // The gradient dY' X of such a use as a promise (promise.h); undefined: compute it, if no trial
    // has called `whole`.
    at::Tensor promise(const at::Tensor &dy, const at::Tensor &x, const Whole &whole);
    // The same of a use of an embedding, for so many of its rows and columns, whose tokens have
    // these indices (embedding.h).
    at::Tensor promise_rows(const at::Tensor &dy, const at::Tensor &indices, int64_t rows,
                            int64_t padding);
    // Whether a sum of promises is still small beside the gradient.
    bool takes(const WeightProduct &sum) const;
    void note_added(); // a promise is a part of another one now
    void note_panels();
    void note_made();

  private:
    bool is_quiet();
    const char *why_not_now(bool dy_fits);
    const char *why_not(const at::Tensor &dy, const at::Tensor &x, const Whole &whole);
    const char *why_not_rows(const at::Tensor &dy, const at::Tensor &indices, int64_t rows);
    void note_use(const char *why_not);
    void note(bool was_looked_at);

    const std::string label_;
    const bool forced_;
    // The rest is guarded by layers_lock().
    Counts counts_;
    unsigned looked_at_ = 0; // a bit for each of the last promises
    uint64_t quiet_ = 0;     // uses for which none is made
    uint64_t next_quiet_ = 64;
};

// One for all layers, so that a fork has one to take; nothing waits while it is held.
std::mutex &layers_lock();

// Lets the gradient of a new slot be promised, if the plan wants that and the parameter's can be.
void let_promise(Plan &plan, Slot *slot);

} // namespace optfuse
