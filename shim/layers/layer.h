// SPDX-License-Identifier: BSD-3-Clause
// layer.h: layers that are known by their weights, and what becomes of one use of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/pinned.h"
#include "planners/layer_user.h"

namespace optfuse {

struct Layer : Pinned {
    Layer(size_t n, std::string called, const of_layer_user &by, bool wants_side)
        : number(n), name(std::move(called)), user(by), beside(wants_side) {
        user.retain(user.ctx);
    }
    ~Layer() { user.release(user.ctx); }

    size_t number;
    std::string name; // of the module, as errors and profilers name it
    of_layer_user user;
    const bool beside;                  // dW is wanted on the side stream
    std::atomic<bool> is_beside{false}; // in the last forward pass dW got there
};

// A convolution's options, each of two dimensions.
struct ConvOptions {
    std::vector<int64_t> stride, padding, dilation;
    int64_t groups = 1;

    // Positions of an output, for images of four dimensions and a kernel of two.
    int64_t positions(at::IntArrayRef images, at::IntArrayRef kernel) const {
        int64_t n = 1;
        for (size_t i = 0; i < 2; i++) {
            const int64_t covered = dilation[i] * (kernel[i] - 1) + 1;
            n *= (images[i + 2] + 2 * padding[i] - covered) / stride[i] + 1;
        }
        return n;
    }
};

// Who looks at the inputs of layers and the gradients of their outputs. Any thread calls.
class LayerWatcher {
  public:
    virtual ~LayerWatcher() = default;
    // The collection that a use that begins now belongs to; 0: none.
    virtual uint64_t collection() const = 0;
    // conv: null for a Linear, whose x and g have two dimensions; else x and g are batches of
    // images, and kernel the weight's last two sizes. Both come once for each use that backward
    // comes through: x in forward, or, if that was recomputed, right before g. An undefined g
    // stands for zeros.
    virtual void input(size_t layer, uint64_t collection, const at::Tensor &x,
                       const ConvOptions *conv, at::IntArrayRef kernel) = 0;
    virtual void output_gradient(size_t layer, uint64_t collection, const at::Tensor &g,
                                 const ConvOptions *conv) = 0;
};

struct Watched {
    size_t number;
    std::string name; // of the module
    std::shared_ptr<LayerWatcher> by;
};

// The weight that dX is computed with in place of the one that the forward pass saw. Any thread
// calls.
class InputWeight {
  public:
    InputWeight(int64_t by, std::string called) : owner(by), name(std::move(called)) {}
    // weight: of the layer's sizes; undefined: the one that the forward pass saw.
    void set(at::Tensor weight) {
        const std::lock_guard<std::mutex> lock(lock_);
        weight_ = std::move(weight);
    }
    at::Tensor get() const {
        const std::lock_guard<std::mutex> lock(lock_);
        return weight_;
    }
    const int64_t owner;
    const std::string name; // of the parameter

  private:
    mutable std::mutex lock_;
    at::Tensor weight_;
};

// Who may promise the gradient of a weight (promises/layer.h). Any thread calls.
class Promiser {
  public:
    virtual ~Promiser() = default;
    // Whether it is worth asking for the gradient of a use with so many rows.
    virtual bool takes(int64_t rows, const at::Tensor &weight) const = 0;
    // Behind at::linear() of this weight, which has recorded nodes with this number and above: has
    // autograd's node ask for a promise.
    virtual void ask_behind_linear(const at::Tensor &output, const at::Tensor &weight,
                                   uint64_t first_node) = 0;
};

// The users of a weight; each may be null.
struct Known {
    std::shared_ptr<Layer> layer;              // when its tasks run
    std::shared_ptr<Watched> watched;          // who looks at them
    std::shared_ptr<InputWeight> input_weight; // what dX reads
    std::shared_ptr<Promiser> promising;       // whose dW may be promised

    explicit operator bool() const { return has_tasks() || promising; }
    // Whether nodes of ours stand behind a use (tasks.h). Where a gradient may be promised, and no
    // more, stock's own do (promises/operators.h).
    bool has_tasks() const { return layer || watched || input_weight; }
};

// One use of a layer in a forward pass that is recorded. Its name: where it has tasks.
struct LayerUse {
    Known known; // with those that take an interest in this use
    uint64_t collection = 0;
    bool recomputed = false; // inside backward: its own backward may never come

    const std::string &name() const {
        return known.layer     ? known.layer->name
               : known.watched ? known.watched->name
                               : known.input_weight->name;
    }
};

// From here on the uses of these weights, by aten::linear and aten::conv2d, are the user's: the
// weights' places in the list are the numbers of their layers. The caller keeps the weights
// alive until forget_layers(). beside: those whose dW is to run on the side stream (beside.h).
// Throws Error, with nothing changed, if one is known already.
void know_layers(const of_layer_user &user, const std::vector<at::Tensor> &weights,
                 const std::vector<std::string> &names, const std::vector<bool> &beside);
// Numbers of the user's layers whose dW ran on the side stream, or will, after the last forward
// pass.
std::vector<size_t> layers_beside(const void *ctx);
// Those of the user with this ctx. Graphs that exist keep what they need.
void forget_layers(const void *ctx);

// The same for a watcher, which the loader keeps no longer than the weights.
void watch_layers(const std::shared_ptr<LayerWatcher> &watcher,
                  const std::vector<at::Tensor> &weights, const std::vector<std::string> &names);
void unwatch_layers(const LayerWatcher *watcher);

// From here on dX of these layers reads instead[i], or, where that is undefined, the weight that
// the forward pass saw. Called again for the same weights it changes what later dX read. The
// owner, a number of the caller's, keeps the weights alive until forget_input_weights(). Throws
// Error, with nothing changed, if one is another owner's.
void set_input_weights(int64_t owner, const std::vector<at::Tensor> &weights,
                       const std::vector<at::Tensor> &instead,
                       const std::vector<std::string> &names);
void forget_input_weights(int64_t owner);

// From here on the gradient of this weight may be promised, if no other layer's is already. The
// caller keeps the weight alive until it is forgotten.
void know_promising(const c10::TensorImpl *weight, const std::shared_ptr<Promiser> &layer);
void forget_promising(const c10::TensorImpl *weight, const Promiser *layer);
// Null: it may not.
std::shared_ptr<Promiser> promising_layer(const at::Tensor &weight);

} // namespace optfuse
