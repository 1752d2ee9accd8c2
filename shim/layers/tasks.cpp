// SPDX-License-Identifier: BSD-3-Clause
// tasks.cpp: grad_fn of y is InputTask, which computes dX. It has edges to where x came from
// and to WeightTask, to which it hands dY. So dW, and the update behind it, never come before
// dX. The engine runs what is ready by sequence number, the highest first; a WeightTask that
// waits gets a number below those of all other nodes. On a GPU WeightTask may have a stream of
// its own (beside.h).
#include "layers/tasks.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>

#include "base/compat.h"
#include "base/error.h"
#include "gpu/beside.h"
#include "guard.h"

namespace optfuse {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Lock = std::lock_guard<std::mutex>;

// A tensor that was there when dX ran and must be the same when dW does.
struct Kept {
    at::Tensor tensor;
    const void *impl = nullptr;
    int64_t version = 0;

    void note(const at::Tensor &t) {
        impl = t.unsafeGetTensorImpl();
        version = version_of(t);
    }
    bool has_changed(const at::Tensor &t) const {
        return OF_GUARD(task_version) && t.unsafeGetTensorImpl() == impl &&
               version_of(t) != version;
    }
    // Tensors made in inference mode count none.
    static int64_t version_of(const at::Tensor &t) { return t.is_inference() ? 0 : t._version(); }
    void keep(const at::Tensor &t) {
        note(t);
        tensor = t;
    }
};

// Passed on by dX to its dW in one pass. A graph that is kept may have several under way: of other
// threads, or one inside of another.
struct HandedOn {
    int64_t pass = -1;
    bool waits = false;
    Kept dy, x;
    at::Tensor w; // of a convolution, as x.tensor
};

[[noreturn]] void refuse_compiled_autograd() {
    fail("optfuse: layers of reorder(), KFAC and delayed updates do not work under compiled "
         "autograd; call remove() of the Reordering or KFAC first, or unfuse() the delayed optimizer");
}

// Releases differ in how nodes are counted.
template <class T>
using NodeOf = std::conditional_t<std::is_base_of_v<c10::intrusive_ptr_target, Node>,
                                  c10::intrusive_ptr<T>, std::shared_ptr<T>>;

// The common part of both kinds of tasks.
struct Task : Node {
    explicit Task(LayerUse of) : use(std::move(of)) {}
    LayerUse use;
    std::optional<ConvOptions> conv;
    std::vector<int64_t> bias_sizes; // of a convolution that has one

    [[noreturn]] void changed(const char *what) const {
        fail("optfuse: " + std::string(what) + " of layer '" + use.name() +
             "' was changed in place after its dX was computed and before its dW, which "
             "waits (optfuse.reorder); change a copy, or skip the layer with skip=[\"" +
             use.name() + "\"]");
    }
    std::tuple<at::Tensor, at::Tensor, at::Tensor>
    convolution_backward(const at::Tensor &dy, const at::Tensor &x, const at::Tensor &w,
                         std::array<bool, 3> mask) const {
        const at::OptionalIntArrayRef sizes =
            bias_sizes.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(bias_sizes);
        static constexpr int64_t no_padding[] = {0, 0};
        return at::convolution_backward(dy, x, w, sizes, conv->stride, conv->padding,
                                        conv->dilation, false, no_padding, conv->groups, mask);
    }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        refuse_compiled_autograd();
    }
    variable_list apply_with_saved(const variable_list &,
                                   torch::dynamo::autograd::SwapSavedVariables &) override {
        refuse_compiled_autograd();
    }
};

struct WeightTask final : Task {
    SavedVariable x;      // of a Linear
    bool by_rows = false; // the weight lies so, and then stock's gradient does
    uint64_t at_once = 0; // its own number
    bool has_bias = false;
    std::vector<HandedOn> handed_on; // mutex_
    // dW goes to the node of the transposed weight that dX of a Linear saves: backward has recorded
    // dX. Gradients of dX go there, and stock's node hands dW there, too: so each use has its sum
    // before the uses are added up. That node has an edge from the beginning, and gets nothing
    // before: another pass, of another thread or around this one, may have counted the edges. A pass
    // that finds this set by another one has the same numbers, turned round twice.
    std::atomic<bool> joins{false};
    std::optional<Streams> streams; // if it has one of its own
    using Task::Task;

    std::string name() const override { return "optfuse dW of " + use.name(); }
    ~WeightTask() override {
        forget();
        if (const Layer *layer = use.known.layer.get())
            layer->user.forget(layer->user.ctx, layer->number);
    }
    // As stock's nodes have them: of a Linear the bias comes first, and its gradient is complete
    // first.
    size_t weight_output() const { return conv || !has_bias ? 0 : 1; }
    size_t bias_output() const { return conv ? 1 : 0; }
    size_t transposed_output() const { return has_bias ? 2 : 1; }
    // It waits no more.
    void end(const HandedOn &by) const {
        if (by.waits)
            use.known.layer->user.done(use.known.layer->user.ctx, use.known.layer->number);
    }
    struct Ending { // also where its product raises
        const WeightTask &task;
        const HandedOn &by;
        ~Ending() { task.end(by); }
    };
    void forget() {
        for (const HandedOn &by : std::exchange(handed_on, {}))
            end(by);
    }
    // The engine takes this node up after dX has returned, so the number may be chosen now.
    void wait_for_turn(HandedOn by, uint64_t bytes) {
        const Lock lock(mutex_);
        uint64_t turn = 0;
        const Layer *layer = use.known.layer.get();
        if (layer != nullptr &&
            !at::GradMode::is_enabled()) // else a graph is made, in stock's order
            turn = layer->user.wait(layer->user.ctx, layer->number, bytes);
        by.pass = torch::autograd::get_current_graph_task_id();
        by.waits = turn != 0;
        set_sequence_nr(by.waits ? turn : at_once);
        handed_on.push_back(std::move(by));
    }
    variable_list apply(variable_list &&grads) override {
        const Lock lock(mutex_);
        variable_list out(num_outputs());
        const int64_t pass = torch::autograd::get_current_graph_task_id();
        const auto is_its = [pass](const HandedOn &by) { return by.pass == pass; };
        const auto found = std::find_if(handed_on.begin(), handed_on.end(), is_its);
        HandedOn by; // nothing, where somebody has called this node itself
        if (found != handed_on.end()) {
            by = std::move(*found);
            handed_on.erase(found);
        }
        const Ending ending{*this, by};
        run(grads[0], by, out);
        return out;
    }
    void run(const at::Tensor &g, const HandedOn &by, variable_list &out) {
        if (!g.defined())
            return;
        if (by.dy.has_changed(g))
            changed("the gradient of the output");
        const bool beside = streams && is_on_side(*streams);
        if (beside)
            borrow(by);
        compute(g, by, out);
        if (beside)
            return_at_end(next_edges(), *streams);
    }
    // dY comes from autograd, which tells the allocator itself.
    void borrow(const HandedOn &by) const {
        begin_on_side(*streams);
        lend_to_side(by.x.tensor, *streams);
        lend_to_side(by.w, *streams);
    }
    // Unpacking may compute a forward pass once more (checkpointing), which is the layer's
    // stream's to do; so dX unpacks for a dW on another one.
    at::Tensor input(const HandedOn &by) const {
        return by.x.tensor.defined() ? by.x.tensor : x.unpack();
    }
    void compute(const at::Tensor &g, const HandedOn &by, variable_list &out) {
        const bool weight = task_should_compute_output(weight_output());
        const bool bias = has_bias && task_should_compute_output(bias_output());
        if (by.x.tensor.defined() && by.x.has_changed(by.x.tensor))
            changed("the input");
        if (conv) {
            const auto found = convolution_backward(g, by.x.tensor, by.w, {false, weight, bias});
            if (weight)
                out[weight_output()] = std::get<1>(found);
            if (bias)
                out[bias_output()] = std::get<2>(found);
            return;
        }
        if (weight) {
            const at::Tensor rows = input(by);
            at::Tensor dw = by_rows ? g.t().mm(rows.conj()) : rows.t().conj().mm(g).t();
            if (joins)
                out[transposed_output()] = dw.t();
            else
                out[weight_output()] = std::move(dw);
        }
        if (bias)
            out[bias_output()] = g; // the engine adds up its rows, as it does for stock's node
    }
    void release_variables() override {
        const Lock lock(mutex_);
        x.reset_data();
        forget();
    }
};

struct InputTask final : Task {
    SavedVariable x; // a convolution's
    // A linear layer's is transposed, and saved behind its x with a bias and before it without one,
    // as stock's nodes have it: a checkpoint gives back by position what the nodes of the
    // recomputation save, and these may be stock's, or the other way round, where a user of the
    // layer came or went between forward and backward.
    SavedVariable w;
    bool by_columns = false; // x lies so
    uint64_t input_bytes = 0;
    std::vector<int64_t> kernel; // of a convolution
    NodeOf<WeightTask> weight;
    using Task::Task;

    std::string name() const override { return "optfuse dX of " + use.name(); }
    variable_list apply(variable_list &&grads) override {
        const Lock lock(mutex_);
        variable_list out(2);
        const at::Tensor &g = grads[0];
        if (use.known.watched)
            show(g);
        if (!g.defined())
            return out;
        HandedOn on;
        compute(g, out, &on);
        if (task_should_compute_output(1) && OF_GUARD(hand_on)) {
            out[1] = g;
            on.dy.note(g);
            weight->wait_for_turn(std::move(on), g.nbytes() + input_bytes);
        }
        return out;
    }
    void show(const at::Tensor &g) {
        const Watched &watched = *use.known.watched;
        const ConvOptions *options = conv ? &*conv : nullptr;
        if (std::exchange(use.recomputed, false))
            watched.by->input(watched.number, use.collection,
                              conv ? x.unpack() : weight->x.unpack(), options, kernel);
        watched.by->output_gradient(watched.number, use.collection, g, options);
    }
    // The one that the forward pass saw, or what is set in its place.
    at::Tensor weight_for(const at::Tensor &g) const {
        const InputWeight *other = use.known.input_weight.get();
        const at::Tensor instead = other == nullptr ? at::Tensor() : other->get();
        if (!instead.defined())
            return conv ? w.unpack() : w.unpack().t();
        if (at::GradMode::is_enabled())
            fail("optfuse: backward(create_graph=True) through " + use.name() +
                 ", whose dX is computed with other weights than its forward pass used "
                 "(optfuse.fuse with weights=), has no meaning; use weights=\"stash\"");
        return instead.to(g.scalar_type()); // autocast had given the weight this type
    }
    void compute(const at::Tensor &g, variable_list &out, HandedOn *on) {
        const bool input = task_should_compute_output(0), later = task_should_compute_output(1);
        if (conv) {
            const at::Tensor saved_x = x.unpack(), saved_w = weight_for(g);
            if (input)
                out[0] =
                    std::get<0>(convolution_backward(g, saved_x, saved_w, {true, false, false}));
            if (later) {
                on->x.keep(saved_x);
                on->w = saved_w;
            }
        } else if (input) {
            const at::Tensor saved_w = weight_for(g);
            if (at::GradMode::is_enabled())
                weight->joins = true;
            out[0] = by_columns ? saved_w.t().conj().mm(g.t()).t() : g.mm(saved_w.conj());
        }
        if (later && !conv && weight->streams && OF_GUARD(dw_unpack))
            on->x.keep(weight->x.unpack());
    }
    void release_variables() override {
        const Lock lock(mutex_);
        x.reset_data();
        w.reset_data();
    }
};

Edge edge_of(const at::Tensor &t) {
    return t.defined() && t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : Edge();
}

// As stock's formulas ask.
bool is_by_rows(const at::Tensor &t) {
    return t.stride(1) == 1 && t.stride(0) == t.size(1);
}

template <class T> NodeOf<T> new_node(const LayerUse &use) {
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>)
        return c10::make_intrusive<T>(use);
    else
        return std::shared_ptr<T>(new T(use), [](auto *node) { deleteNode(node); });
}

// Where dW runs, and the nodes behind it.
void place(WeightTask *task, const at::Tensor &y, const at::Tensor &w, const at::Tensor &bias) {
    Layer *layer = task->use.known.layer.get();
    if (layer != nullptr && layer->beside) {
        task->streams = streams_beside(w, bias);
        layer->is_beside = task->streams.has_value();
    }
    c10::OptionalStreamGuard guard;
    if (task->streams) {
        guard.reset_stream(task->streams->side);
        return_outputs(task, *task->streams);
    }
    edge_list edges;
    const bool bias_first = !task->conv;
    for (const at::Tensor &t : {bias_first ? bias : w, bias_first ? w : bias}) {
        if (!t.defined())
            continue;
        if (task->streams)
            bring_to_side(t);
        edges.push_back(edge_of(t));
    }
    task->has_bias = bias.defined();
    task->set_next_edges(std::move(edges));
    task->add_input_metadata(y);
}

} // namespace

void leave_room_for_waiting() {
    while (at::sequence_number::peek() < OF_PRIORITIES)
        at::sequence_number::get_and_increment();
}

void make_tasks(const LayerUse &use, const at::Tensor &y, const at::Tensor &x, const at::Tensor &w,
                const at::Tensor &bias, const ConvOptions *conv) {
    if (use.known.layer)
        leave_room_for_waiting();
    const NodeOf<WeightTask> weight = new_node<WeightTask>(use);
    const NodeOf<InputTask> input = new_node<InputTask>(use);
    if (conv) {
        weight->conv = input->conv = *conv;
        if (bias.defined())
            weight->bias_sizes = input->bias_sizes = bias.sizes().vec();
    }
    place(weight.get(), y, w, bias);
    weight->at_once = weight->sequence_nr();
    input->weight = weight;
    input->input_bytes = x.nbytes();
    if (conv) {
        input->x = SavedVariable(x, false);
        input->w = SavedVariable(w, false);
        input->kernel = w.sizes().slice(2).vec();
    } else {
        const at::Tensor transposed = x.requires_grad() ? w.t() : at::Tensor();
        if (!bias.defined())
            input->w = SavedVariable(transposed, false);
        weight->x = SavedVariable(x, false);
        if (bias.defined())
            input->w = SavedVariable(transposed, false);
        weight->by_rows = is_by_rows(w);
        if (transposed.defined())
            weight->add_next_edge(edge_of(transposed));
        input->by_columns = is_by_rows(x.t());
    }
    input->set_next_edges({edge_of(x), Edge(weight, 0)}); // weight has all of its own
    torch::autograd::set_history(y, input);
    const Watched *watched = use.known.watched.get();
    if (watched != nullptr && !use.recomputed)
        watched->by->input(watched->number, use.collection, x, conv, input->kernel);
}

} // namespace optfuse
