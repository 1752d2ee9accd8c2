# SPDX-License-Identifier: BSD-3-Clause
"""Training with nothing in it but gradients and an optimizer: backward() hands
given gradients to the parameters, each a copy that was just written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from cells import OPTIMIZERS
from torch import nn
from variants import few_variants

import optfuse

NONE, FUSED = "no optimizer", "fused=True"
COMPARED = (NONE, FUSED, "backward fusion", "forward fusion")


@dataclass(frozen=True)
class Run:
    run: Callable[[], None]
    first: float

    def __call__(self) -> None:
        self.run()


def iteration(optimizer: str, variant: str, tensors: int, elements: int) -> Run:
    """zero_grad(), backward(), step(), and all updates done. It has run once,
    which makes the state, and bears the seconds that took as `first`."""
    params = [nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
    gradients = [torch.full((elements,), 1e-3)] * tensors
    opt = few_variants()[variant](OPTIMIZERS[optimizer](iter(params)))

    def run() -> None:
        opt.zero_grad()
        torch.autograd.backward(params, gradients)
        opt.step()
        optfuse.flush()

    begin = perf_counter()
    run()
    return Run(run, perf_counter() - begin)
