// SPDX-License-Identifier: BSD-3-Clause
// tap.cpp: aten::linear and aten::conv2d of known weights. Both are composite, so that nobody
// has kernels of theirs for autograd; ours are there as long as a layer is known.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/conv2d_native.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "base/clock.h"
#include "base/device.h"
#include "base/error.h"
#include "layers/layer.h"
#include "layers/rehearsal.h"
#include "layers/tasks.h"

namespace optfuse {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using Sizes = c10::SymIntArrayRef;

// By weight, which the loader keeps alive.
struct Registry {
    std::shared_mutex lock;
    std::unordered_map<const c10::TensorImpl *, Known> layers;
    std::vector<std::unique_ptr<torch::Library>> kernels; // while there are layers
    // An optimizer may die while other threads call these operators, and PyTorch's dispatcher can't
    // lose kernels then: once gradients may be promised they stay. Other layers go by an explicit
    // remove(), which docs/reordering.md asks to call alone.
    bool stays = false;
};

Registry &registry() {
    static auto *one = new Registry; // never destroyed: graphs may outlive statics
    return *one;
}

bool has_forward_gradient(const at::Tensor &t) {
    return t.defined() && t._fw_grad(0).defined();
}

// An update inside backward may change a parameter that a dW of ours still has to read.
bool is_updated_in_backward(const at::Tensor &x) {
    const at::Tensor root = x.is_view() ? at::Tensor(x._base()) : x;
    return root.requires_grad() && root.is_leaf() &&
           torch::autograd::impl::post_acc_grad_hooks(root) != nullptr;
}

// As torch.export and torch.compile trace with; whoever asks for its sizes as numbers gets an error.
bool has_symbols(const at::Tensor &t) {
    return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_plain(const at::Tensor &t) {
    return !t.defined() ||
           (t.layout() == c10::kStrided && !has_symbols(t) &&
            (t.unsafeGetTensorImpl()->key_set() & at::kTensorSubclassLike).empty());
}

// Whether one of PyTorch's own modes traces operators: their outputs are no tensors. Other modes,
// such as those that count operators or choose what a checkpoint keeps, look at them.
bool is_traced() {
    using Modes = c10::impl::TorchDispatchModeTLS;
    using c10::impl::TorchDispatchModeKey;
    return Modes::any_modes_set() && (Modes::get_mode(TorchDispatchModeKey::FAKE) ||
                                      Modes::get_mode(TorchDispatchModeKey::PROXY) ||
                                      Modes::get_mode(TorchDispatchModeKey::FUNCTIONAL));
}

Known known_by(const at::Tensor &weight);

// The layer whose tasks are to stand behind y = f(x), if it is known; else stock's node does.
Known tapped(const at::Tensor &x, const at::Tensor &w, const at::Tensor &bias) {
    if (!at::GradMode::is_enabled() || !w.requires_grad() || is_traced())
        return {};
    for (const at::Tensor &t : {x, w, bias})
        if (!is_plain(t) || has_forward_gradient(t))
            return {};
    Known known = known_by(w);
    if (is_updated_in_backward(x)) // stock's node computes dW with dX, before the update
        return {nullptr, nullptr, nullptr, std::move(known.promising)};
    return known;
}

// Asks those who know the layer; none may be left. y has so many elements.
LayerUse begin_use(Known known, const at::Tensor &x, const at::Tensor &w, const at::Tensor &bias,
                   int64_t outputs) {
    of_layer_use use = {};
    use.input_bytes = x.nbytes();
    use.output_bytes = static_cast<uint64_t>(outputs) * x.element_size();
    use.weight_bytes = w.nbytes() + (bias.defined() ? bias.nbytes() : 0);
    use.has_input_gradient = x.requires_grad();
    use.frees_gradient = w.is_leaf() && (w.grad().defined() || is_updated_in_backward(w));
    use.recomputed = torch::autograd::get_current_graph_task_id() != -1;
    const uint64_t collection = known.watched ? known.watched->by->collection() : 0;
    if (collection == 0)
        known.watched.reset();
    if (known.promising && (w.dim() != 2 || !known.promising->takes(x.numel() / w.size(1), w)))
        known.promising.reset();
    const Layer *layer = known.layer.get();
    if (layer != nullptr && !layer->user.use(layer->user.ctx, layer->number, &use))
        known.layer.reset();
    return {std::move(known), collection, use.recomputed};
}

// Computes the output of a use, below autograd, and puts the two nodes behind it.
template <class Forward>
at::Tensor with_tasks(const LayerUse &use, const at::Tensor &x, const at::Tensor &w,
                      const at::Tensor &bias, const ConvOptions *conv, const Forward &forward) {
    const bool rehearses = is_rehearsed(use);
    const double began = rehearses ? seconds_now() : 0;
    const at::Tensor y = [&] {
        const at::AutoDispatchBelowADInplaceOrView below;
        return forward();
    }();
    if (rehearses)
        rehearse(use, began, y, x, w, bias, conv);
    make_tasks(use, y, x, w, bias, conv);
    return y;
}

// x and y of two dimensions.
at::Tensor linear_2d(const LayerUse &use, const at::Tensor &x, const at::Tensor &w,
                     const at::Tensor &bias) {
    return with_tasks(use, x, w, bias, nullptr, [&] {
        return bias.defined() ? at::addmm(bias, x, w.t()) : at::mm(x, w.t());
    });
}

// As at::linear reshapes; reshape() and view() record themselves.
at::Tensor linear_nd(const LayerUse &use, const at::Tensor &x, const at::Tensor &w,
                     const at::Tensor &bias) {
    if (x.dim() == 2)
        return linear_2d(use, x, w, bias);
    const bool flattens = bias.defined() && x.is_contiguous();
    if (x.dim() == 1 && !flattens) {
        at::Tensor y = linear_2d(use, x.unsqueeze(0), w, at::Tensor()).squeeze_(0);
        return bias.defined() ? y.add_(bias) : y;
    }
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = w.size(0);
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    if (flattens)
        return linear_2d(use, rows, w, bias).view(sizes);
    at::Tensor y = at::_unsafe_view(linear_2d(use, rows, w, at::Tensor()), sizes);
    return bias.defined() ? y.add_(bias) : y;
}

// PyTorch then flattens what is not contiguous, too.
bool always_flattens() {
    static const bool is_set = std::getenv("TORCH_LINEAR_FLATTEN_3D") != nullptr;
    return is_set;
}

at::Tensor linear(const at::Tensor &x, const at::Tensor &w, const MaybeTensor &b) {
    const at::Tensor bias = b.value_or(at::Tensor());
    const bool fits = !has_symbols(x) && !has_symbols(w) && x.dim() >= 1 && w.dim() == 2 &&
                      x.size(-1) == w.size(1) && x.numel() != 0 &&
                      (!bias.defined() || bias.dim() == 1) && !always_flattens();
    const Known known = fits ? tapped(x, w, bias) : Known();
    if (!known)
        return at::native::linear(x, w, b);
    const LayerUse use = begin_use(known, x, w, bias, x.numel() / x.size(-1) * w.size(0));
    if (use.known.has_tasks())
        return linear_nd(use, x, w, bias);
    const uint64_t first_node = at::sequence_number::peek();
    at::Tensor y = at::native::linear(x, w, b);
    if (use.known.promising)
        use.known.promising->ask_behind_linear(y, w, first_node);
    return y;
}

// One number stands for both dimensions.
std::vector<int64_t> pair_of(Sizes sizes) {
    std::vector<int64_t> found;
    for (const c10::SymInt &size : sizes)
        found.push_back(size.expect_int());
    if (found.size() == 1)
        found.push_back(found[0]);
    return found;
}

at::Tensor conv2d(const at::Tensor &x, const at::Tensor &w, const MaybeTensor &b, Sizes stride,
                  Sizes padding, Sizes dilation, c10::SymInt groups) {
    if (x.dim() == 3) // one image, as at::conv2d takes it
        return conv2d(x.unsqueeze(0), w, b, stride, padding, dilation, groups).squeeze(0);
    const at::Tensor bias = b.value_or(at::Tensor());
    const bool fits = !has_symbols(x) && x.dim() == 4 && w.dim() == 4 && !x.is_complex() &&
                      x.numel() != 0;
    const Known known = fits ? tapped(x, w, bias) : Known();
    const auto stock = [&] {
        return at::native::conv2d_symint(x, w, b, stride, padding, dilation, groups);
    };
    if (!known)
        return stock();
    const ConvOptions options{pair_of(stride), pair_of(padding), pair_of(dilation),
                              groups.expect_int()};
    const int64_t outputs =
        x.size(0) * w.size(0) * options.positions(x.sizes(), w.sizes().slice(2));
    const LayerUse use = begin_use(known, x, w, bias, outputs);
    if (!use.known.has_tasks())
        return stock();
    return with_tasks(use, x, w, bias, &options, stock);
}

const torch::autograd::Node *cast_of(const at::Tensor &w) {
    const auto *fn = torch::autograd::impl::grad_fn_unsafe(w);
    return dynamic_cast<const torch::autograd::generated::ToCopyBackward0 *>(fn);
}

// Autocast hands over a copy in a lower precision.
const c10::TensorImpl *leaf_of(const at::Tensor &w) {
    const torch::autograd::Node *cast = w.is_leaf() ? nullptr : cast_of(w);
    if (cast == nullptr)
        return w.unsafeGetTensorImpl();
    const auto *end =
        dynamic_cast<const torch::autograd::AccumulateGrad *>(cast->next_edge(0).function.get());
    return end == nullptr ? nullptr : end->variable.unsafeGetTensorImpl();
}

void put_kernels(Registry &known) {
    const auto gpu = gpu_type() == c10::DeviceType::CUDA ? c10::DispatchKey::AutogradCUDA
                                                         : c10::DispatchKey::AutogradPrivateUse1;
    for (const auto key : {c10::DispatchKey::AutogradCPU, gpu}) {
        auto library =
            std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
        library->impl("linear", linear);
        library->impl("conv2d", conv2d);
        known.kernels.push_back(std::move(library));
    }
}

Known known_by(const at::Tensor &weight) {
    Registry &known = registry();
    const std::shared_lock<std::shared_mutex> lock(known.lock);
    const auto found = known.layers.find(leaf_of(weight));
    return found == known.layers.end() ? Known() : found->second;
}

// Under the lock.
template <class T>
void add(Registry &known, const std::vector<at::Tensor> &weights, std::shared_ptr<T> Known::*user,
         const std::vector<std::shared_ptr<T>> &layers, const char *what) {
    for (size_t i = 0; i < weights.size(); i++) {
        const auto found = known.layers.find(weights[i].unsafeGetTensorImpl());
        if (found != known.layers.end() && found->second.*user)
            fail("optfuse: the weight of layer '" + layers[i]->name + "' " + what);
    }
    for (size_t i = 0; i < weights.size(); i++)
        known.layers[weights[i].unsafeGetTensorImpl()].*user = layers[i];
    if (known.kernels.empty() && !known.layers.empty())
        put_kernels(known);
}

template <class T, class IsTheirs>
void drop(std::shared_ptr<T> Known::*user, const IsTheirs &is_theirs) {
    Registry &known = registry();
    std::vector<std::shared_ptr<T>> gone; // destroyed without the lock
    const std::unique_lock<std::shared_mutex> lock(known.lock);
    for (auto it = known.layers.begin(); it != known.layers.end();) {
        std::shared_ptr<T> &layer = it->second.*user;
        if (layer && is_theirs(*layer))
            gone.push_back(std::move(layer));
        it = it->second ? std::next(it) : known.layers.erase(it);
    }
    if (known.layers.empty() && !known.stays)
        known.kernels.clear();
}

} // namespace

void know_layers(const of_layer_user &user, const std::vector<at::Tensor> &weights,
                 const std::vector<std::string> &names, const std::vector<bool> &beside) {
    std::vector<std::shared_ptr<Layer>> layers;
    for (size_t i = 0; i < weights.size(); i++)
        layers.push_back(std::make_shared<Layer>(i, names[i], user, beside[i]));
    Registry &known = registry();
    const std::unique_lock<std::shared_mutex> lock(known.lock);
    add(known, weights, &Known::layer, layers,
        "is reordered already; call remove() of that Reordering first");
}

std::vector<size_t> layers_beside(const void *ctx) {
    Registry &known = registry();
    const std::shared_lock<std::shared_mutex> lock(known.lock);
    std::vector<size_t> found;
    for (const auto &[weight, by] : known.layers)
        if (by.layer && by.layer->user.ctx == ctx && by.layer->is_beside)
            found.push_back(by.layer->number);
    return found;
}

void forget_layers(const void *ctx) {
    drop(&Known::layer, [ctx](const Layer &layer) { return layer.user.ctx == ctx; });
}

void watch_layers(const std::shared_ptr<LayerWatcher> &watcher,
                  const std::vector<at::Tensor> &weights, const std::vector<std::string> &names) {
    std::vector<std::shared_ptr<Watched>> layers;
    for (size_t i = 0; i < weights.size(); i++)
        layers.push_back(std::make_shared<Watched>(Watched{i, names[i], watcher}));
    Registry &known = registry();
    const std::unique_lock<std::shared_mutex> lock(known.lock);
    add(known, weights, &Known::watched, layers,
        "is another KFAC's already; call remove() of that one first");
}

void unwatch_layers(const LayerWatcher *watcher) {
    drop(&Known::watched, [watcher](const Watched &layer) { return layer.by.get() == watcher; });
}

void set_input_weights(int64_t owner, const std::vector<at::Tensor> &weights,
                       const std::vector<at::Tensor> &instead,
                       const std::vector<std::string> &names) {
    Registry &known = registry();
    const std::unique_lock<std::shared_mutex> lock(known.lock);
    for (size_t i = 0; i < weights.size(); i++) {
        const auto found = known.layers.find(weights[i].unsafeGetTensorImpl());
        if (found != known.layers.end() && found->second.input_weight &&
            found->second.input_weight->owner != owner)
            fail("optfuse: " + names[i] + " is delayed by another optimizer already");
    }
    for (size_t i = 0; i < weights.size(); i++) {
        auto &weight = known.layers[weights[i].unsafeGetTensorImpl()].input_weight;
        if (!weight)
            weight = std::make_shared<InputWeight>(owner, names[i]);
        weight->set(instead[i]);
    }
    if (known.kernels.empty() && !known.layers.empty())
        put_kernels(known);
}

void know_promising(const c10::TensorImpl *weight, const std::shared_ptr<Promiser> &layer) {
    Registry &known = registry();
    const std::unique_lock<std::shared_mutex> lock(known.lock);
    std::shared_ptr<Promiser> &of = known.layers[weight].promising;
    if (!of)
        of = layer;
    known.stays = true;
    if (known.kernels.empty())
        put_kernels(known);
}

std::shared_ptr<Promiser> promising_layer(const at::Tensor &weight) {
    return known_by(weight).promising;
}

void forget_promising(const c10::TensorImpl *weight, const Promiser *layer) {
    Registry &known = registry();
    const std::unique_lock<std::shared_mutex> lock(known.lock);
    const auto found = known.layers.find(weight);
    if (found == known.layers.end() || found->second.promising.get() != layer)
        return;
    found->second.promising.reset();
    if (!found->second)
        known.layers.erase(found);
}

void forget_input_weights(int64_t owner) {
    drop(&Known::input_weight,
         [owner](const InputWeight &weight) { return weight.owner == owner; });
}

} // namespace optfuse
