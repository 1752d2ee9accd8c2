# SPDX-License-Identifier: BSD-3-Clause
"""What the machinery around an update costs: many parameters of one element,
so that hardly anything but the machinery is left. One thread, and its own CPU
time, which other processes disturb less than the time on the wall."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import optfuse
from optfuse import _native
from optfuse._ab.result import Interval, median_interval
from optfuse._classes import link_of

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": Tensor.detach,
    "view": lambda p: p.view(1),
    "mul": lambda p: p * 2.0,
}


@dataclass(frozen=True)
class Cost:
    """Microseconds a parameter (of a first use: an operator)."""

    what: str
    parameters: int
    us: Interval
    budget: float | None = None

    def __str__(self) -> str:
        text = f"{self.what:<46} {self.parameters:>6,}  {self.us.median:6.3f} us"
        text += f" [{self.us.low:.3f}, {self.us.high:.3f}]"
        if self.budget is None:
            return text
        verdict = "within" if self.us.median <= self.budget else "OVER"
        return f"{text}  {verdict} the budget of {self.budget} us"


def parameters(n: int, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1, device=device)) for _ in range(n)]


def backward_seconds(params: list[nn.Parameter]) -> float:
    loss = torch.stack([p * 2.0 for p in params]).sum()
    begin = time.thread_time()
    loss.backward()
    return time.thread_time() - begin


def seconds(run: Callable[[], object]) -> float:
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def pending(n: int) -> tuple[list[nn.Parameter], AdamW]:
    """Parameters with gradients, whose updates each step() leaves pending."""
    params = parameters(n)
    optimizer = optfuse.fuse(AdamW(params), mode="forward")
    torch.stack([p * 2.0 for p in params]).sum().backward()
    optimizer.step()
    if not optfuse.summary(optimizer).pending:
        raise RuntimeError("no update is pending: there is nothing to measure")
    optfuse.flush(optimizer)
    return params, optimizer


def gradient_hook(n: int, repeats: int) -> Iterator[Cost]:
    """backward() with backward fusion less the same without an optimizer; and
    less what a launch itself costs in a flush()."""
    plain, ours = parameters(n), parameters(n)
    without, optimizer = AdamW(plain), optfuse.fuse(AdamW(ours), mode="backward")
    _, launched = pending(n)
    bare, whole, above = [], [], []
    for _ in range(repeats):
        for o in (without, optimizer):
            o.zero_grad()
        more = backward_seconds(ours)
        optimizer.step()
        less = backward_seconds(plain)
        hook = more - less
        launched.step()
        launch = seconds(lambda: optfuse.flush(launched))
        bare.append(less / n * 1e6)
        whole.append(hook / n * 1e6)
        above.append((hook - launch) / n * 1e6)
    yield Cost("backward() without an optimizer", n, median_interval(bare[2:]))
    yield Cost("gradient hook, above the update", n, median_interval(above[2:]), 1.5)
    yield Cost("gradient hook, with the update", n, median_interval(whole[2:]))


def first_use(n: int, repeats: int) -> Iterator[Cost]:
    """An operator on a parameter whose update is pending, less the same where
    none is; and less what the launch itself costs in a flush()."""
    params, optimizer = pending(n)
    for name, op in OPS.items():
        whole, above = [], []
        for _ in range(repeats):
            plain = seconds(lambda op=op: [None for p in params if op(p) is None])
            optimizer.step()
            used = seconds(lambda op=op: [None for p in params if op(p) is None])
            optimizer.step()
            launch = seconds(lambda: optfuse.flush(optimizer))
            whole.append((used - plain) / n * 1e6)
            above.append((used - plain - launch) / n * 1e6)
        yield Cost(f"first use by {name}, above the update", n, median_interval(above[2:]), 0.2)
        yield Cost(f"first use by {name}, with the update", n, median_interval(whole[2:]))


def step(n: int, repeats: int) -> Iterator[Cost]:
    """step() in forward mode: all of it, and its part in C."""
    _, optimizer = pending(n)
    link = link_of(optimizer)
    needs, missing = (ctypes.c_size_t * n)(), ctypes.c_size_t()

    def in_c() -> None:
        _native.check(_native.lib.of_shim_step(link.plan, needs, n, ctypes.byref(missing)))

    whole, inner, launch = [], [], []
    for _ in range(repeats):
        inner.append(seconds(in_c) / n * 1e6)
        optfuse.flush(optimizer)
        whole.append(seconds(optimizer.step) / n * 1e6)
        launch.append(seconds(lambda: optfuse.flush(optimizer)) / n * 1e6)
    yield Cost("step() in forward mode, in C", n, median_interval(inner[2:]), 0.2)
    yield Cost("step() in forward mode, in all", n, median_interval(whole[2:]), 1.0)
    yield Cost("the update itself, launched by flush()", n, median_interval(launch[2:]))


@contextmanager
def quiet() -> Iterator[None]:
    """One thread and no garbage collection."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def costs(repeats: int = 40) -> Iterator[Cost]:
    """Every cost, from a usual number of parameters to one no cache holds."""
    for n in (200, 1_000, 10_000):
        for measure in (gradient_hook, first_use, step):
            with quiet():
                found = list(measure(n, repeats + 2))
            yield from found


if __name__ == "__main__":
    for cost in costs():
        print(cost, flush=True)
