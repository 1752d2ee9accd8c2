# SPDX-License-Identifier: BSD-3-Clause
"""A few steps of each class in both modes, beside stock, compared by bits: on one thread, which
waits for no other, and once on all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from optfuse._fuse import fuse
from optfuse._rules import RULES
from optfuse._summary import summary
from optfuse._trials.random_state import random_as_it_was
from optfuse_tools.ab.result import equal_bits
from optfuse_tools.doctor.finding import Finding, in_words

STEPS = 4
SHAPES = ((3, 7), (64, 33), (129, 300))  # small, in bits and pieces, and with several threads
MODES = ("forward", "backward")
SECONDS = 8.0  # after which no further case begins
_REPORT = "unfuse it, and report this with the block"
Case = tuple[str, type[Optimizer], str, torch.dtype]
_SOME: list[Case] = [("cpu", AdamW, mode, torch.float32) for mode in MODES]


def cases() -> list[Case]:
    """Device, class, mode and dtype: those whose bits are known to be stock's."""
    found = [("cpu", *rest) for rest in product(RULES, MODES, (torch.float32, torch.float64))]
    found += [("cpu", *rest) for rest in product((Adam, AdamW), MODES, (torch.bfloat16,))]
    if torch.cuda.is_available():
        found += [("cuda", *rest) for rest in product((SGD, Adam, AdamW), MODES, (torch.float32,))]
    return found


def _made(cls: type[Optimizer], params: list[Tensor]) -> Optimizer:
    """With the flags that select the reference (docs/numerics.md)."""
    optimizer = cls(params, lr=1e-2)  # type: ignore[call-arg]
    for group in optimizer.param_groups:
        group.update(RULES[cls].flags(group))
    return optimizer


def train(case: Case, wrap: bool, **options: Any) -> tuple[list[Tensor], Optimizer]:
    """Parameters and state after some steps. wrap: whether it is fused; options: of its groups,
    in place of the reference's."""
    device, cls, mode, dtype = case
    random = torch.Generator("cpu").manual_seed(0)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu").to(device, dtype)

    params = [numbers(shape).requires_grad_() for shape in SHAPES]
    optimizer = _made(cls, params)
    optimizer.param_groups[0].update(options)
    if wrap:
        fuse(optimizer, mode=mode)
    for _ in range(STEPS):
        for param in params:
            torch.autograd.backward((param * numbers(tuple(param.shape))).sin().sum())
        optimizer.step()
        optimizer.zero_grad()
    state = [entry[name] for entry in optimizer.state.values() for name in sorted(entry)]
    values = [*params, *(value for value in state if isinstance(value, Tensor))]
    return [value.detach().clone() for value in values], optimizer


def why_not(case: Case, **options: Any) -> str | None:
    """Why this case has other bits than stock, or None. options: for the fused optimizer's groups
    only, which makes the bits differ."""
    theirs, _ = train(case, wrap=False)
    ours, optimizer = train(case, wrap=True, **options)
    if equal_bits(ours, theirs):
        return None
    found = summary(optimizer)
    if found.gpu_bits_differ:  # known where it is so, and refused by strict=True
        return None
    return f"other bits than {found.reference}: {_REPORT}"


def _name(case: Case) -> str:
    device, cls, mode, dtype = case
    return f"{cls.__name__}, {mode} mode, {str(dtype).removeprefix('torch.')} on {device}"


def _instruction_set() -> str:
    _, optimizer = train(_SOME[0], wrap=True)
    return summary(optimizer).isa["float32"]


class _Tally:
    """Cases that were tried."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.equal = self.wrong = self.late = 0

    def findings(self, todo: Iterable[Case]) -> Iterator[Finding]:
        for case in todo:
            if time.perf_counter() - self.began > SECONDS:
                self.late += 1
                continue
            try:
                reason = why_not(case)
            except Exception as error:
                reason = f"raised {in_words(error)}"
            if reason is None:
                self.equal += 1
            else:
                self.wrong += 1
                yield Finding("bits", f"{_name(case)}: {reason}", is_problem=True)

    def __str__(self) -> str:
        done = self.equal + self.wrong
        late = f", and there was no time for {self.late} more" if self.late else ""
        return (
            f"{self.equal} of {done} cases (class, mode, dtype) end with PyTorch's weights, bit by "
            f"bit{late}"
        )


def findings() -> Iterator[Finding]:
    os.environ.pop("OPTFUSE_DISABLE", None)
    tally, threads = _Tally(), torch.get_num_threads()
    with random_as_it_was():
        torch.set_num_threads(1)
        try:
            yield Finding("instructions", f"{_instruction_set()}: updates run in these kernels")
            yield from tally.findings(cases())
        finally:
            torch.set_num_threads(threads)
        yield from tally.findings(_SOME)
    yield Finding("bits", str(tally))
