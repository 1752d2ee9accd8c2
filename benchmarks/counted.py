# SPDX-License-Identifier: BSD-3-Clause
"""Run by launch.py under callgrind: each part of the machinery once, between
marks, for many parameters of one element. Prints nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from micro import parameters, pending
from torch import Tensor
from torch.optim import AdamW

import optfuse
from optfuse import _native
from optfuse._classes import link_of

marks = ctypes.CDLL(str(Path(os.environ["OPTFUSE_BUILD"]) / "benchmarks" / "libcallgrind_marks.so"))


def count(name: str, run: Callable[[], object]) -> None:
    marks.count_begin()
    run()
    marks.count_end(name.encode())


def backward(params: list[Tensor]) -> Callable[[], None]:
    return torch.stack([p * 2.0 for p in params]).sum().backward


# Each part runs first to warm up and is not counted then; backward mode takes over what
# the first iteration has made in the second one.


def hooks(n: int) -> None:
    plain, ours = parameters(n), parameters(n)
    without, optimizer = AdamW(plain), optfuse.fuse(AdamW(ours), mode="backward")
    for turn in ("warm up", "warm up", "counted"):
        for o in (without, optimizer):
            o.zero_grad()
        counted = count if turn == "counted" else lambda _, run: run()
        counted("backward, no optimizer", backward(plain))
        counted("backward, backward fusion", backward(ours))
        counted("step, backward fusion", optimizer.step)


def forward_parts(n: int) -> None:
    params, optimizer = pending(n)
    link = link_of(optimizer)
    needs, missing = (ctypes.c_size_t * n)(), ctypes.c_size_t()

    def in_c() -> None:
        _native.check(_native.lib.of_shim_step(link.plan, needs, n, ctypes.byref(missing)))

    def use(op: Callable[[Tensor], Tensor]) -> None:
        for p in params:
            op(p)

    for turn in ("warm up", "counted"):
        counted = count if turn == "counted" else lambda _, run: run()
        counted("step in C", in_c)
        counted("flush", lambda: optfuse.flush(optimizer))
        counted("step", optimizer.step)
        optfuse.flush(optimizer)
        for name, op in (("detach", Tensor.detach), ("view", lambda p: p.view(1))):
            use(op)
            counted(f"{name}, nothing pending", lambda op=op: use(op))
            optimizer.step()
            counted(f"{name}, pending", lambda op=op: use(op))


def stock(n: int) -> None:
    params = parameters(n)
    optimizer = AdamW(params, fused=True)
    for p in params:
        p.grad = torch.ones(1)
    optimizer.step()
    count("step, fused=True", optimizer.step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.disable()
    for part in (hooks, forward_parts, stock):
        part(int(sys.argv[1]))
