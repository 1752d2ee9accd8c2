# SPDX-License-Identifier: BSD-3-Clause
"""CUDA graphs record and replay raw memory: what is pending is launched before
a capture and before a replay, and an update made in a capture is in the graph."""

import copy
import functools
from pathlib import Path

import gpu
import pytest
import torch
from common import Fused, Stock, adamw, batch, everything, python
from common import net as net_of_the_cpu
from common import train as train_on_the_cpu
from gpu import NAME
from legal import compare, in_order, legal, net, play, train
from recorded_classes import KINDS
from torch import nn

import optfuse

needs_replays = pytest.mark.skipif(not gpu.REPLAYS, reason="no graph of this torch can be played")
only_real = pytest.mark.skipif(not gpu.IS_REAL, reason="it is a function of CUDA's graphs only")
STEPS, MANY = 5, 100
LIMIT = 0.05  # of the gradients' norm, where they are clipped
capturable = functools.partial(adamw, capturable=True)
both_modes = pytest.mark.parametrize("mode", ["forward", "backward"])


class Iteration:
    """One whole training iteration over inputs that stay where they are. limit: of the gradients'
    norm. keep: .grad is not None after it."""

    def __init__(self, wrap, make=capturable, limit=None, build=net, scaler=False, keep=True):
        self.model, self.limit, self.loss, self.keep = build(), limit, None, keep
        self.optimizer = wrap(make(self.model.parameters()))
        self.x, self.y = (t.to(NAME) for t in batch(0))
        self.scaler = torch.amp.GradScaler(NAME, 2.0**10, growth_interval=3, enabled=scaler)
        self.scaler.scale(self.x)  # makes its tensors, on this stream

    def load(self, i):
        for place, t in zip((self.x, self.y), batch(i), strict=True):
            place.copy_(t)

    def run(self, step=True):
        self.optimizer.zero_grad()
        self.loss = nn.functional.mse_loss(self.model(self.x), self.y)
        self.scaler.scale(self.loss).backward()
        if step:
            self.step()
        if not self.keep:
            self.optimizer.zero_grad()

    def step(self):
        if self.limit is not None:
            self.scaler.unscale_(self.optimizer)
            optfuse.clip_grad_norm_(self.optimizer, self.limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def warm_up(self, step=True):
        """As PyTorch's documentation asks: on a side stream, before a capture."""
        side = gpu.stream()
        side.wait_stream(gpu.current())
        with side:
            for i in range(3):
                self.load(i)
                self.run(step)
        gpu.current().wait_stream(side)

    def capture(self, step=True):
        self.optimizer.zero_grad()
        return gpu.graph_of(lambda: self.run(step))


def whole(side_stream=False, in_turn=False, replays=STEPS, **how):
    """Everything is in the graph, the clipping to a limit of the norm, too. What is a tensor may
    change between replays: the inputs, a rate. GradScaler's scale changes in them."""

    def script(wrap):
        one = Iteration(wrap, **how)
        if side_stream and wrap.fused:
            optfuse.reorder(one.model, side_stream=True)
        one.warm_up()
        graph = one.capture()
        rate = one.optimizer.param_groups[0]["lr"]
        for i in range(replays):
            one.load(10 + i)
            if one.scaler.is_enabled() and i % 7 == 2:
                one.x.fill_(float("inf"))
            if isinstance(rate, torch.Tensor):
                rate.mul_(0.9)
            if in_turn and i % 2 == 0:
                train(one.model, one.optimizer, 20 + i)
            else:
                graph.replay()
            yield "loss", one.loss
            if one.keep and one.limit is not None and i % 10 == 4:
                yield "gradients", [p.grad for p in one.model.parameters()]
        yield from everything(one.model, one.optimizer)
        yield "scale", one.scaler.get_scale()
        one.load(0)
        one.run()  # outside again
        yield from everything(one.model, one.optimizer)

    return script


def by_tensor(parameters):
    return capturable(parameters, lr=torch.tensor(1e-2, device=NAME))


WHOLE = {"all": {"replays": MANY}, "weight gradients on a side stream": {"side_stream": True}}
WHOLE |= {"in turn with iterations outside": {"in_turn": True}}
WHOLE |= {"rate": {"make": by_tensor, "replays": MANY}, "released": {"keep": False}}
#: In forward mode only. Nothing is recorded in a capture: its operators run at once.
FORWARD = {name: {"make": KINDS[name]} for name in ("Elementwise", "Capturable", "CapturableLists")}
CLIPPED = {"limit": LIMIT, "replays": MANY, "make": by_tensor}
FORWARD |= {"clipping": CLIPPED, "clipping and released": {**CLIPPED, "keep": False}}
FORWARD |= {"scaler": {"scaler": True}, "clipping and scaler": {"scaler": True, **CLIPPED}}
CASES = [(name, mode) for name in WHOLE for mode in ("forward", "backward")]
CASES += [(name, "forward") for name in FORWARD]
CASES += [("all", optfuse.Backward(side_stream=True))]


@needs_replays
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_whole_iterations_in_a_graph(name, mode):
    legal(whole(**(WHOLE | FORWARD)[name]), mode, prove=False)


FIRST = """
import sys
sys.path.insert(0, {folder!r})
import gpu
gpu.load()
import test_graphs
test_graphs.first_capture({mode!r})
"""


@needs_replays
@both_modes
def test_the_first_step_of_the_process_in_a_capture(mode):
    """Kernels that were never launched before are loaded by fuse(), not in the capture."""
    done = python(FIRST.format(folder=str(Path(__file__).parent), mode=mode), fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr


def first_capture(mode):
    """As after a resume: state is loaded, no kernel of an optimizer was ever launched. Weights and
    state are those after one step on the CPU."""
    model = net_of_the_cpu()
    optimizer = adamw(model.parameters(), foreach=False)
    train_on_the_cpu(model, optimizer, 0)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["capturable"] = True  # then load_state_dict() puts step counters on the GPU
    small = functools.partial(Iteration, build=lambda: net_of_the_cpu().to(NAME))
    small(Stock()).warm_up(step=False)

    def script(wrap):
        one = small(wrap)
        one.model.load_state_dict(model.state_dict())
        one.optimizer.load_state_dict(copy.deepcopy(state))
        graph = one.capture()
        for i in range(STEPS):
            one.load(10 + i)
            graph.replay()
            yield "loss", one.loss
        yield from everything(one.model, one.optimizer)

    ours, _ = play(script, Fused(mode))  # first, so that ours are new to the process
    compare(ours, play(script, Stock())[0])


@needs_replays
@pytest.mark.parametrize("limit", [None, LIMIT])
@in_order("forward")
def test_forward_and_backward_in_a_graph(wrap, limit):
    """The step is outside, after the clipping: a replay writes gradients still to be multiplied."""
    one = Iteration(wrap, adamw, limit)
    one.warm_up(step=False)
    graph = one.capture(step=False)
    for i in range(STEPS):
        one.load(10 + i)
        graph.replay()
        one.step()
        yield "loss", one.loss
        if limit is not None and i == 2:
            yield "gradients", [p.grad for p in one.model.parameters()]
    yield from everything(one.model, one.optimizer)


@needs_replays
@in_order("forward", "backward", prove=False)
def test_a_capture_right_behind_a_step(wrap):
    """The graph that reads the weights is captured right after a step."""
    one = Iteration(wrap)
    one.warm_up()
    for i in range(STEPS):
        one.load(10 + i)
        one.run()
        seen = []
        with torch.no_grad():
            graph = gpu.graph_of(lambda: seen.append(one.model(one.x)))  # noqa: B023
        graph.replay()
        yield "output", seen[0]
    yield from everything(one.model, one.optimizer)


def iterated(model, optimizer, i):
    optimizer.zero_grad()
    x, y = (t.to(NAME) for t in batch(i))
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    yield "loss", loss


@only_real
@pytest.mark.parametrize("fuse_first", [True, False])
@in_order("forward", "backward", prove=False)
def test_a_graphed_callable(wrap, fuse_first):
    model = net()
    stock = adamw(model.parameters())
    optimizer = wrap(stock) if fuse_first else stock
    fast = torch.cuda.make_graphed_callables(model, (torch.zeros_like(batch(0)[0]).to(NAME),))
    optimizer = optimizer if fuse_first else wrap(stock)
    for i in range(STEPS):
        yield from iterated(fast, optimizer, i)
    yield from everything(model, optimizer)


@needs_replays
@both_modes
def test_what_can_not_be_captured_is_refused_at_capture(mode):
    """As in stock on CUDA, an optimizer whose step count is on the host."""
    for wrap in (*([Stock()] if gpu.IS_REAL else []), Fused(mode)):
        one = Iteration(wrap, functools.partial(adamw, fused=False))
        one.warm_up()
        with pytest.raises(RuntimeError, match="capturable=True"):
            one.capture()
        gpu.synchronize_all()
        optfuse.flush()


@only_real
@pytest.mark.parametrize(
    "how", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str
)
@in_order("forward", "backward", prove=False)
def test_a_compiled_model(wrap, how):
    """Weights are read in between, too. With reduced overhead the compiler records graphs."""
    torch._dynamo.reset()
    model = net()
    optimizer, fast = wrap(adamw(model.parameters())), torch.compile(model, **how)
    for i in range(STEPS):
        yield from iterated(fast, optimizer, i)
        if i % 3 == 1:
            yield "weight", model[0].weight.detach()
    yield from everything(model, optimizer)
