// SPDX-License-Identifier: BSD-3-Clause
// layer.h: layers that are known by their weights, and what becomes of one use of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "layer_user.h"

namespace optfuse {

struct Layer {
    Layer(size_t n, std::string called, const of_layer_user &by)
        : number(n), name(std::move(called)), user(by) {
        user.retain(user.ctx);
    }
    ~Layer() { user.release(user.ctx); }
    Layer(const Layer &) = delete;
    Layer &operator=(const Layer &) = delete;

    // Runs a task of the layer, and tells how long it took if somebody wants to know.
    template <class Work> auto timed(of_layer_task task, const Work &work) const {
        const Clock clock(*this, task);
        return work();
    }

    size_t number;
    std::string name; // of the module, as errors and profilers name it
    of_layer_user user;

  private:
    struct Clock {
        Clock(const Layer &of, of_layer_task is)
            : layer(of), task(is), runs(of.user.is_timed(of.user.ctx)), began(runs ? now() : 0) {}
        ~Clock() {
            if (runs)
                layer.user.took(layer.user.ctx, layer.number, task, began, now());
        }
        Clock(const Clock &) = delete;
        Clock &operator=(const Clock &) = delete;
        static double now() {
            const auto since = std::chrono::steady_clock::now().time_since_epoch();
            return std::chrono::duration<double>(since).count();
        }
        const Layer &layer;
        of_layer_task task;
        bool runs;
        double began;
    };
};

// From here on the uses of these weights, by aten::linear and aten::conv2d, are the user's: the
// weights' places in the list are the numbers of their layers. The caller keeps the weights
// alive until forget_layers(). Throws Error, with nothing changed, if one is known already.
void know_layers(const of_layer_user &user, const std::vector<at::Tensor> &weights,
                 const std::vector<std::string> &names);
// Those of the user with this ctx. Graphs that exist keep what they need.
void forget_layers(const void *ctx);

// The layer that this weight, or the tensor that autocast made of it, belongs to, if a use of
// it is to be recorded now; or nullptr.
std::shared_ptr<Layer> layer_of(const at::Tensor &weight);

} // namespace optfuse
