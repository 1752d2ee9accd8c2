// SPDX-License-Identifier: BSD-3-Clause
#include "graphs.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/version.h>

#include <atomic>

#include "aliases.h"
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
#include <ATen/core/GraphImplInterface.h>
#endif

namespace fake {
namespace {

// One operator, or one launch of our kernels.
struct Node {
    std::optional<c10::OperatorHandle> op;
    torch::jit::Stack arguments;
    std::vector<void *> made; // memory, in order
    size_t given = 0;         // of it, in this replay
    bool replays = false;
    const void *work = nullptr;
    fake_again *again = nullptr;
};

thread_local Node *running = nullptr; // what this thread runs

struct Running {
    explicit Running(Node *node) { running = node; }
    ~Running() { running = nullptr; }
};

struct Graph {
    uint64_t id;
    StreamNumber stream;
    Contents before; // the device's memory when the capture began
    std::mutex lock; // guards the nodes: those of backward come from a thread of the engine
    std::vector<std::unique_ptr<Node>> nodes;

    void add(std::unique_ptr<Node> node) {
        const std::lock_guard<std::mutex> guard(lock);
        nodes.push_back(std::move(node));
    }
};

std::atomic<Graph *> recording{nullptr};

Graph *recording_on(StreamNumber stream) {
    Graph *graph = recording.load();
    return graph != nullptr && capture_of(stream) == graph->id ? graph : nullptr;
}

// By address, as a kernel has it: the graph keeps no memory alive.
at::Tensor frozen(const c10::OperatorHandle &op, const at::Tensor &tensor) {
    if (!tensor.defined() || is_mine(tensor))
        return tensor.defined() ? borrowed(tensor) : tensor;
    TORCH_CHECK(tensor.dim() == 0 && op.schema().name() != "aten::_copy_from", op.schema().name(),
                ": Cannot copy between CPU and fakecuda tensors during graph capture");
    return tensor.clone();
}

} // namespace

void *memory_again() {
    if (running == nullptr || !running->replays)
        return nullptr;
    TORCH_CHECK(running->given < running->made.size(), "an operator made more memory in a replay");
    return running->made[running->given++];
}

void note_memory(void *memory) {
    if (running != nullptr && memory != nullptr)
        running->made.push_back(memory);
}

bool keep_work(void *handle, const void *work, fake_again *again) {
    Graph *graph = recording_on(stream_of(handle, current_device()));
    if (graph == nullptr)
        return false;
    auto node = std::make_unique<Node>();
    node->work = work;
    node->again = again;
    graph->add(std::move(node));
    return true;
}

// Operators that this one calls are a part of it; what launches nothing, as views, is not needed.
void Recorded::operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                          torch::jit::Stack *stack) {
    Graph *graph = running == nullptr ? recording_on(current_stream(current_device())) : nullptr;
    if (graph == nullptr) {
        kernel.callBoxed(op, keys, stack);
        return;
    }
    auto node = std::make_unique<Node>();
    node->op = op;
    for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); i++)
        node->arguments.push_back(
            mapped((*stack)[i], [&](const at::Tensor &tensor) { return frozen(op, tensor); }));
    const uint64_t before = launches_of_thread();
    {
        const Running here(node.get());
        kernel.callBoxed(op, keys, stack);
    }
    node->replays = true;
    if (launches_of_thread() != before)
        graph->add(std::move(node));
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
namespace {

void run(Node *node, StreamNumber stream) {
    if (node->again != nullptr) {
        node->again(node->work, handle_of(stream));
        return;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack = node->arguments;
    node->given = 0;
    const Running here(node);
    node->op->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
    TORCH_CHECK(node->given == node->made.size(), node->op->schema().name(),
                " made less memory in a replay");
}

// torch.accelerator.Graph's part on this device.
struct GraphOfDevice final : at::GraphImplInterface {
    explicit GraphOfDevice(const at::GraphImplArgs &) {}
    void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
        static std::atomic<uint64_t> graphs{FIRST_RECORDED};
        const StreamNumber stream = current_stream(current_device());
        TORCH_CHECK(stream > DEVICES, "CUDA graphs must be captured on a non-default stream");
        TORCH_CHECK(recording.load() == nullptr, "another graph is being captured");
        graph_ = std::make_unique<Graph>();
        graph_->id = graphs++;
        graph_->stream = stream;
        graph_->before = contents();
        set_capture(stream, graph_->id);
        recording = graph_.get();
    }
    void capture_end() override {
        recording = nullptr;
        set_capture(graph_->stream, 0);
        undo(std::exchange(graph_->before, {}), graph_->id);
    }
    void instantiate() override {}
    void replay() override {
        TORCH_CHECK(graph_ != nullptr, "no graph was captured");
        const Replaying replaying;
        for (const std::unique_ptr<Node> &node : graph_->nodes)
            run(node.get(), current_stream(current_device()));
    }
    void reset() override { graph_.reset(); }
    at::MempoolId_t pool() const override { return {0, graph_->id}; }
    void enable_debug_mode() override {}
    void debug_dump(const std::string &) override {}

  private:
    struct Replaying {
        Replaying() { set_replaying(true); }
        ~Replaying() { set_replaying(false); }
    };
    std::unique_ptr<Graph> graph_;
};

} // namespace
#endif

} // namespace fake

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
namespace at {
REGISTER_GRAPH_IMPL(FAKECUDA, fake::GraphOfDevice)
}
#endif
