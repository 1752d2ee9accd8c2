// SPDX-License-Identifier: BSD-3-Clause
// references.h: what one update keeps alive from collect() to release(), and how
// it is to be left afterwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/memory.h"
#include "memory/proxies.h"
#include "optfuse.h"

namespace optfuse {

struct Program;
struct Slot;

enum { FACTOR = 3 }; // of OnGpu::scalars

// Storages of the parts of an update. Most have few: other places are neither made nor destroyed.
class Storages : Pinned {
  public:
    using Pointer = c10::intrusive_ptr<c10::StorageImpl>;
    Storages() { new (&at[0]) Pointer(); }
    ~Storages() {
        for (; n != 0; n--)
            at[n - 1].~Pointer();
    }
    // i: 0, or of one that has been put there.
    Pointer &operator[](size_t i) { return at[i]; }
    const Pointer &operator[](size_t i) const { return at[i]; }
    // The first ones, before any other: make(i) for each.
    template <class Make> void begin_with(size_t count, Make make) {
        for (size_t i = 0; i < count; i++)
            new (&at[i]) Pointer(make(i));
        n = count;
    }
    // Puts one behind the others, or into the place of one.
    void put(size_t i, Pointer storage) {
        if (i < n)
            at[i] = std::move(storage);
        else
            new (&at[n++]) Pointer(std::move(storage));
    }

  private:
    union {
        Pointer at[OF_MAX_KEYS];
    };
    size_t n = 1;
};

// Few updates keep any of this.
struct Special {
    // A gradient whose memory other tensors use, who are known to come by the mark on this very
    // tensor before they change it: it is no part of the update, but its memory stands for it.
    at::Tensor shared_grad;
    at::Tensor copy; // a gradient in the parameter's strides
    // Not dense: {tensor, dense copy to compute with}. The first n_written are
    // written back after the update.
    std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins;
    size_t n_written = 0;
    at::Tensor held_grad; // of an update by the host
    Proxies proxies; // a deferred update's
};

// An average that is made behind the update: what is kept until it is.
struct Behind {
    at::Tensor average;
    std::shared_ptr<const Program> program;
};

// of_average.host.
struct DeferredAverage {
    const at::Tensor &average;
    const std::shared_ptr<const Program> &program;
};

struct OnGpu {
    of_stream stream;      // where the update runs if it was deferred,
    of_stream ready;       // and if not
    at::Tensor scalars[4]; // device scalars that it reads: copies, and the factor
    c10::Storage old_counted = {}; // as References::old_grad
};

struct References {
    Slot *slot = nullptr;
    // The update runs inside backward, and the gradient is replaced after it. What
    // step() updates keeps its gradient, as in stock.
    bool consumes = false;
    bool committed = false; // an update that is not is only released
    size_t n = 0; // tensors that take part: parameter, gradient, state
    c10::TensorImpl *tensors[OF_MAX_KEYS]; // marked by defer(), valid until then only
    Storages storages;
    // A deferred scaling: the gradient's memory, which may be freed meanwhile.
    c10::weak_intrusive_ptr<c10::StorageImpl> gradient{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::TensorImpl *grad = nullptr; // the gradient to be replaced
    at::Tensor param;                // if it consumes or is alone
    at::Tensor old_grad, old_consumed;  // replaced by settle(), dropped by release()
    std::unique_ptr<Special> special;   // or null
    std::shared_ptr<const Program> program; // of a rule that runs programs
    std::optional<Behind> behind;
    std::optional<OnGpu> on_gpu;

    Special &make_special() {
        if (!special)
            special = std::make_unique<Special>();
        return *special;
    }
};

[[gnu::always_inline]] inline void take_part(References *refs, of_inputs *in,
                                             c10::TensorImpl *impl) {
    c10::StorageImpl *storage = storage_of(impl);
    refs->tensors[refs->n] = impl;
    refs->storages.put(refs->n, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
    in->keys[refs->n] = storage;
    in->n_keys = ++refs->n;
}

inline at::Tensor reference_to(c10::TensorImpl *impl) {
    return at::Tensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

} // namespace optfuse
