# SPDX-License-Identifier: BSD-3-Clause
"""While a stream is being captured into a CUDA graph: what is captured must be
the whole update, and nothing from outside of the graph. drain_all() is what
torch.cuda.CUDAGraph.capture_begin calls first."""

import contextlib

import gpu
import pytest
import torch
from common import adamw, assert_same
from gpu import captured, settle
from legal import backward, net, to_host, train

import optfuse
from optfuse._patches import cuda_graphs
from optfuse._process import drain_all

GUARDS_OFF = "OPTFUSE_TEST_GUARDS_OFF"


def prepared(mode="forward"):
    torch.manual_seed(0)
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode)
    train(model, optimizer, 0)
    optfuse.flush(optimizer)
    settle()
    return model, optimizer


def test_a_step_in_a_capture_is_launched_in_it():
    model, optimizer = prepared()
    with captured(gpu.stream()):
        backward(model, optimizer, 1)
        assert gpu.kernels(optimizer.step), "step() left its update pending inside the capture"
    settle()
    ours = to_host(list(model.parameters()))
    torch.manual_seed(0)
    model = net()
    stock = adamw(model.parameters())
    for i in range(2):
        train(model, stock, i)
    assert_same("weights", ours, to_host(list(model.parameters())))


def a_captured_step_behind_an_eager_backward():
    model, optimizer = prepared("backward")
    backward(model, optimizer, 1)
    settle()
    with captured(gpu.stream()):
        optimizer.step()
    return model, optimizer


def test_a_captured_step_whose_updates_backward_has_made_is_refused(monkeypatch):
    with pytest.raises(optfuse.Error, match="replays of the graph would update nothing"):
        a_captured_step_behind_an_eager_backward()
    settle()
    monkeypatch.setenv(GUARDS_OFF, "capture_step")
    a_captured_step_behind_an_eager_backward()
    settle()


def test_backward_and_step_in_one_capture_are_taken():
    model, optimizer = prepared("backward")
    drain_all()
    with captured(gpu.stream()):
        train(model, optimizer, 1)
    train(model, optimizer, 2)
    settle()


def clipped():
    """Its gradients are still to be multiplied."""
    model, optimizer = prepared()
    backward(model, optimizer, 1)
    optfuse.clip_grad_norm_(optimizer, 0.05)
    return model, optimizer


@pytest.mark.parametrize("how", ["pending", "launched", "without the guard"])
def test_a_graph_does_not_depend_on_a_gradient_that_was_clipped_outside(how, monkeypatch):
    model, optimizer = clipped()
    if how == "launched":
        optfuse.flush(optimizer)  # but the device need not have done it
    stream = gpu.stream()
    stream.wait_stream(gpu.current())
    refused = pytest.raises(optfuse.Error, match="captured")
    if how == "without the guard":
        monkeypatch.setenv(GUARDS_OFF, "capture")
        refused = contextlib.nullcontext()
    with captured(stream), refused:
        model[0].weight.grad.add(1)
    model[0].weight.grad.add(1)  # on its own stream
    settle()


def test_what_was_waited_for_is_no_obstacle():
    model, _ = clipped()
    drain_all()
    with captured(gpu.stream()):
        model[2].weight.grad.add(1)
    settle()


def pending(optimizer):
    """The launches of a flush."""
    return len(gpu.kernels(lambda: optfuse.flush(optimizer)))


def pending_after_a_replay():
    """The replay of one of torch's graphs for any device, without the device's part in it."""

    class Base(torch._C._acceleratorGraph):
        def replay(self):
            pass

    class Graph(torch.accelerator.Graph, Base):
        pass

    _, optimizer = clipped()
    Graph.__new__(Graph).replay()
    return pending(optimizer)


needs_graphs = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="this torch has no torch.accelerator.Graph"
)


@needs_graphs
def test_what_is_pending_is_launched_before_a_graph_of_any_device_is_replayed(monkeypatch):
    assert pending_after_a_replay() == 0
    monkeypatch.setenv(GUARDS_OFF, "graphs")
    assert pending_after_a_replay() > 0


def pending_after_a_step(monkeypatch):
    """When somebody has the handle of a graph, with which CUDA launches it."""

    class Graph:
        def raw_cuda_graph_exec(self):
            return 7

    monkeypatch.setattr(cuda_graphs, "_handed_out", False)
    cuda_graphs.watch_handles(Graph, optfuse.flush)
    _, optimizer = clipped()
    assert Graph().raw_cuda_graph_exec() == 7
    late = pending(optimizer)
    optfuse.clip_grad_norm_(optimizer, 0.01)
    optimizer.step()
    return late + pending(optimizer)


def test_nothing_is_left_pending_once_a_graphs_handle_is_given_away(monkeypatch):
    assert pending_after_a_step(monkeypatch) == 0
    monkeypatch.setenv(GUARDS_OFF, "graphs")
    assert pending_after_a_step(monkeypatch) > 0


def test_a_capture_ends_although_what_is_pending_can_not_be_launched():
    ended = []

    class Graph:
        def capture_end(self):
            ended.append(self)

    def fail():
        raise optfuse.Error("the device is broken")

    cuda_graphs.wrap(Graph, "capture_end", fail, anyway=True)
    with pytest.raises(optfuse.Error, match="broken"):
        Graph().capture_end()
    assert len(ended) == 1
