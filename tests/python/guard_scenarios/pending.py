# SPDX-License-Identifier: BSD-3-Clause
"""Guards of what nobody may see: an update that is pending."""

import ctypes
import gc
import os
import select
import signal
import threading

import torch
from common import assert_same, batch, loss_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise, through_address
from optfuse._averages import stock_update_parameters
from optfuse._patches import cuda_graphs

EMA = get_ema_multi_avg_fn(0.5)


@guards("key", "seal")
def an_operator_sees_the_update():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    pair.assert_same()


@guards("privacy")
def an_alias_made_before_sees_the_update():
    pair = Pair()
    arrays = [p.detach().numpy() for p in (pair.theirs[0].weight, pair.ours[0].weight)]
    pair.train(0)
    assert (arrays[0] == arrays[1]).all(), "an array over the weight shows the old one"


@guards("average_alias")
def an_alias_of_an_average_sees_it():
    pair = Pair()
    averages = [AveragedModel(m, multi_avg_fn=EMA) for m in (pair.theirs, pair.ours)]
    arrays = [a.module[0].weight.detach().numpy() for a in averages]
    for i in range(2):
        pair.train(i)
        stock_update_parameters(averages[0], pair.theirs)
        averages[1].update_parameters(pair.ours)
    if optfuse.summary(pair.fused).averages == 0:
        raise RuntimeError("no average was pending: the scenario would prove nothing")
    assert (arrays[0] == arrays[1]).all(), "an array over the average shows the old one"


@guards("seal", "raw")
def raw_access_past_every_hook_raises():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    must_raise(lambda: through_address(pair.ours[0].weight), "reading a pending storage")


@guards("raw", "seal")
def an_address_taken_while_pending_leads_to_the_update():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    theirs, ours = (through_address(m[0].weight) for m in (pair.theirs, pair.ours))
    assert theirs == ours, "the memory behind data_ptr() still holds the old weight"


class Graph:
    """Like a CUDA graph: replays what it recorded, on raw memory."""

    def __init__(self, weight):
        self.address, self.size = weight.data_ptr(), weight.numel() * weight.element_size()

    def replay(self):
        return ctypes.string_at(self.address, self.size)


@guards("graphs")
def a_replayed_graph_sees_the_update():
    pair = Pair()
    graphs = [Graph(model[0].weight) for model in (pair.theirs, pair.ours)]
    cuda_graphs.wrap(Graph, "replay", optfuse.flush)
    pair.train(0)
    pair.assert_pending()
    theirs, ours = (graph.replay() for graph in graphs)
    assert theirs == ours, "the replay read the old weight"


@guards("floating")
def a_first_use_flushes_denormals_as_step_did():
    param = torch.nn.Parameter(torch.full((8,), 1e-38))
    optimizer = optfuse.fuse(torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True))
    param.grad = torch.full((8,), 1e-38)
    optimizer.step()
    torch.set_flush_denormal(True)
    assert optfuse.summary(optimizer).pending == 1, "the update was not deferred"
    momentum = optimizer.state[param]["momentum_buffer"].clone()
    torch.set_flush_denormal(False)
    assert param.detach().view(torch.int32).all(), "the use flushed what step() would have kept"
    assert momentum.view(torch.int32).all()


@guards("version")
def backward_through_a_changed_weight_raises():
    pair = Pair()
    pair.train(0)
    loss = loss_of(pair.ours, 1)
    loss.backward(retain_graph=True)
    pair.fused.step()
    pair.assert_pending()
    must_raise(loss.backward, "backward through weights that step() has changed")


@guards("rearm", "seal")
def two_steps_in_a_row_are_two_updates_in_order():
    pair = Pair()
    pair.train(0)
    for model, optimizer in ((pair.theirs, pair.stock), (pair.ours, pair.fused)):
        for scale in (2.0, -3.0):
            for p in model.parameters():
                p.grad = torch.full(p.shape, scale)
            optimizer.step()
    pair.assert_pending()
    pair.assert_same()


@guards("foreign")
def another_thread_ends_the_deferring():
    pair = Pair()
    pair.train(0)
    thread = threading.Thread(target=lambda: pair.ours(batch(1)[0]))
    thread.start()
    thread.join()
    pair.train(1)
    pending = optfuse.summary(pair.fused).pending
    assert pending == 0, f"{pending} updates are pending while another thread reads weights"


@guards("clear")
def a_deleted_optimizer_leaves_no_update_behind():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    pair.fused = None
    gc.collect()
    pair.assert_same()


@guards("fork")
def a_forked_child_reads_weights_at_once():
    """Its threads are gone, so that it could not run a parallel update."""
    torch.set_num_threads(2)
    pair = Pair(build=lambda: nn.Linear(6, 100_000))
    for optimizer, model in ((pair.stock, pair.theirs), (pair.fused, pair.ours)):
        for i in range(2):
            model(torch.full((1, 6), 1.0 + i)).sum().backward()
            optimizer.step()
    pair.assert_pending()
    torch.randn(1_000_000).sum()  # the pool of threads is there
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"%.9f" % pair.ours.weight[-1, -1].item())
        os._exit(0)
    ready, _, _ = select.select([read], [], [], 5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ready, "the child hangs when it reads a weight"
    expected = b"%.9f" % pair.theirs.weight[-1, -1].item()
    assert os.read(read, 99) == expected, "the child reads another weight"


@guards("compile", "key", "seal", "raw")
def a_compiled_function_sees_the_update():
    def build():
        return nn.Linear(6, 3)

    pair = Pair(build=build)
    compiled = torch.compile(pair.ours)
    with torch.no_grad():
        compiled(batch(0)[0])
    pair.train(0)
    pair.assert_pending()
    with torch.no_grad():
        assert_same("output", compiled(batch(1)[0]), pair.theirs(batch(1)[0]))
