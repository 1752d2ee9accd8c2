# SPDX-License-Identifier: BSD-3-Clause
"""CUDA graphs record and replay raw memory: what is pending is launched before
a capture and before a replay, and an update made in a capture is in the graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import MODES, On, common, scenario
from recorded_classes import KINDS
from torch import Tensor, nn

import optfuse

STEPS = 5
LIMIT = 0.05  # of the gradients' norm, where they are clipped
CUDA = ("cuda",)
Made = Callable[..., Any]


def capturable(parameters: Any) -> torch.optim.Optimizer:
    return common.adamw(parameters, capturable=True)


class Iteration:
    """One whole training iteration over inputs that stay where they are."""

    def __init__(
        self, on: On, wrap: Any, make: Made = capturable, limit: float | None = None
    ) -> None:
        self.on, self.model = on, on.net()
        self.optimizer = wrap(make(self.model.parameters()))
        self.x, self.y = (t.clone() for t in on.batch(0))
        self.loss: Tensor | None = None
        self.limit = limit  # of the gradients' norm

    def load(self, i: int) -> None:
        x, y = self.on.batch(i)
        self.x.copy_(x)
        self.y.copy_(y)

    def run(self, step: bool = True) -> None:
        self.backward()
        if step:
            self.clip()
            self.optimizer.step()

    def clip(self) -> None:
        if self.limit is not None:
            optfuse.clip_grad_norm_(self.optimizer, self.limit)

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = nn.functional.mse_loss(self.model(self.x), self.y)
        self.loss.backward()

    def warm_up(self, step: bool = True) -> None:
        """As PyTorch's documentation asks: on a side stream, before a capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(3):
                self.load(i)
                self.run(step)
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, step: bool = True) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self.run(step)
        return graph


@scenario(devices=CUDA)
def the_first_step_of_the_process_in_a_capture(on: On) -> None:
    """Kernels that were never launched before are loaded by fuse(), not in the capture."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, here / "first_capture.py", on.mode], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def whole_iterations(on: On, limit: float | None = None) -> None:
    """Everything is in the graph, the clipping to a limit of the norm, too."""

    def script(wrap: Any) -> Any:
        one = Iteration(on, wrap, limit=limit)
        one.warm_up()
        graph = one.capture()
        for i in range(STEPS):
            one.load(10 + i)
            graph.replay()
            yield "loss", one.loss
        yield from common.everything(one.model, one.optimizer)

    on.same(script, prove=False)


@scenario(devices=CUDA, modes=("forward",))
def recorded_steps_in_a_graph(on: On) -> None:
    """Nothing is recorded in a capture: its operators run at once."""
    for name in ("Elementwise", "Capturable", "CapturableLists"):

        def script(wrap: Any, name: str = name) -> Any:
            def wrapped(optimizer: Any) -> Any:
                return wrap(optimizer, recorded=True)

            one = Iteration(on, wrapped, KINDS[name])
            one.warm_up()
            graph = one.capture()
            for i in range(STEPS):
                one.load(10 + i)
                graph.replay()
                yield f"loss of {name}", one.loss
            one.load(0)
            one.run()
            yield from common.everything(one.model, one.optimizer)

        on.same(script, prove=False)


@scenario(devices=CUDA)
def whole_iterations_in_a_graph(on: On) -> None:
    whole_iterations(on)


@scenario(devices=CUDA)
def whole_iterations_in_a_graph_with_weight_gradients_on_a_side_stream(on: On) -> None:
    """The side stream joins the capture, and is joined before it ends."""

    def script(wrap: Any) -> Any:
        one = Iteration(on, wrap)
        if wrap.fused:
            optfuse.reorder(one.model, side_stream=True)
        one.warm_up()
        graph = one.capture()
        for i in range(STEPS):
            one.load(10 + i)
            graph.replay()
            yield "loss", one.loss
        yield from common.everything(one.model, one.optimizer)

    on.same(script, prove=False)


@scenario(devices=CUDA, modes=("forward",))
def whole_iterations_with_clipping_in_a_graph(on: On) -> None:
    whole_iterations(on, LIMIT)


@scenario(devices=CUDA)
def iterations_in_a_graph_and_outside_of_it_in_turn(on: On) -> None:
    """Updates that an iteration outside leaves pending are launched before the replay."""

    def script(wrap: Any) -> Any:
        one = Iteration(on, wrap)
        one.warm_up()
        graph = one.capture()
        for i in range(STEPS):
            one.load(10 + i)
            if i % 2:
                graph.replay()
            else:
                on.train(one.model, one.optimizer, 20 + i)
            yield "loss", one.loss
        yield from common.everything(one.model, one.optimizer)

    on.same(script, prove=False)


def forward_and_backward_only(on: On, limit: float | None = None) -> None:
    """The step is outside of the graph, after the clipping if there is a limit."""

    def script(wrap: Any) -> Any:
        one = Iteration(on, wrap, common.adamw, limit)
        one.warm_up(step=False)
        graph = one.capture(step=False)
        for i in range(STEPS):
            one.load(10 + i)
            graph.replay()
            one.clip()
            one.optimizer.step()
            yield "loss", one.loss
            if limit is not None and i == 2:
                yield "gradients", [p.grad for p in one.model.parameters()]
        yield from common.everything(one.model, one.optimizer)

    on.same(script)


@scenario(devices=CUDA, modes=("forward",))
def forward_and_backward_in_a_graph_and_step_outside(on: On) -> None:
    forward_and_backward_only(on)


@scenario(devices=CUDA, modes=("forward",))
def forward_and_backward_in_a_graph_and_clipping_outside(on: On) -> None:
    """A replay writes gradients that are still to be multiplied."""
    forward_and_backward_only(on, LIMIT)


@scenario(devices=CUDA)
def pending_when_a_capture_begins(on: On) -> None:
    """The graph that reads the weights is captured right after a step."""

    def script(wrap: Any) -> Any:
        one = Iteration(on, wrap)
        one.warm_up()
        for i in range(STEPS):
            one.load(10 + i)
            one.run()
            wrap.pending()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), torch.no_grad():
                out = one.model(one.x)
            graph.replay()
            yield "output", out
        yield from common.everything(one.model, one.optimizer)

    on.same(script, prove=False)


def graphed(on: On, fuse_first: bool) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        stock = common.adamw(model.parameters())
        optimizer = wrap(stock) if fuse_first else stock
        sample = (torch.zeros_like(on.batch(0)[0]),)
        fast = torch.cuda.make_graphed_callables(model, sample)
        if not fuse_first:
            optimizer = wrap(stock)
        for i in range(STEPS):
            yield "loss", on.train(fast, optimizer, i)
        yield from common.everything(model, optimizer)

    on.same(script, prove=False)


@scenario(devices=CUDA)
def fused_and_then_made_a_graphed_callable(on: On) -> None:
    graphed(on, fuse_first=True)


@scenario(devices=CUDA)
def made_a_graphed_callable_and_then_fused(on: On) -> None:
    graphed(on, fuse_first=False)


@scenario(devices=CUDA, modes=MODES)
def what_can_not_be_captured_is_refused_at_capture(on: On) -> None:
    """As in stock, an optimizer whose step count is on the host."""
    for wrap in (common.Stock(), common.Fused(on.mode)):
        one = Iteration(on, wrap, partial(common.adamw, fused=False))
        one.warm_up()
        try:
            one.capture()
        except RuntimeError:
            torch.cuda.synchronize()
            optfuse.flush()
            continue
        raise AssertionError(f"{type(wrap).__name__}: the capture was not refused")
