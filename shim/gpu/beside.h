// SPDX-License-Identifier: BSD-3-Clause
// beside.h: weight gradients on a stream of their own, beside dX (GPUs only).
//
//   the layer's stream   dX4 | dX3 | dX2 | ...             joins the side stream at the end
//   the side stream           dW4, its update | dW3, ...   each after its own dX
//
// Autograd runs a node on the stream that was current when the node was made, and puts events
// between nodes of different streams. So nodes are made with the side stream current, and what is
// left is memory: the caching allocator has to know who uses it on which stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

#include "base/pinned.h"

namespace optfuse {

struct Streams {
    c10::Stream layer; // of the forward pass and dX
    c10::Stream side;  // of dW, of adding up the gradient, and of an update in backward
};

// For a use of a layer, whose weight and bias (or undefined) these are, casts of autocast
// included. None: not on a GPU, or the gradient of one of them is added up on another stream,
// which somebody has chosen (DistributedDataParallel does) and which would have to wait for dW.
std::optional<Streams> streams_beside(const at::Tensor &w, const at::Tensor &bias);
// The nodes from here to the parameter run on the side stream; it is current.
void bring_to_side(const at::Tensor &t);

// dW on the side stream begins, and is about to read t, memory of the layer's stream.
void begin_on_side(const Streams &streams);
void lend_to_side(const at::Tensor &t, const Streams &streams);
// Inside of dW: in this graph task gradients are added to these parameters on the side stream.
void return_at_end(const torch::autograd::edge_list &parameters, const Streams &streams);
// Whether this is the side stream's turn; not where nodes run on the caller's stream, as under
// torch.autograd.graph.set_override_stale_capture_stream().
bool is_on_side(const Streams &streams);
// Has what the node returns known to the allocator as the layer's stream's, too: whoever gets
// it uses it there.
void return_outputs(torch::autograd::Node *node, const Streams &streams);

// As long as one lives on a thread whose stream is the side stream of the device, the stream of
// the last dW's layer is current instead, and afterwards the side stream waits for it: of
// memory that outlives backward, such as an optimizer's state, the script knows that stream only.
class LastingMemory : Pinned {
  public:
    explicit LastingMemory(const c10::Device &device);
    ~LastingMemory();

  private:
    std::optional<Streams> streams_;
    c10::OptionalStreamGuard guard_;
};

} // namespace optfuse
