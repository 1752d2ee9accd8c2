# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that are compared: those of optfuse.ab and, beside them,
the Python hooks of PyTorch's tutorial on optimizer steps in backward, and the
compiled step of its tutorial on compiling the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from optfuse._ab.variants import VARIANTS, Wrap, with_flags

HOOKS = "Python hooks"
HOOKS_FOREACH = "Python hooks, foreach"
HOOK_VARIANTS = (HOOKS, HOOKS_FOREACH)
FOREACH, FOR_LOOP, COMPILED = "foreach=True", "for-loop", "compiled step"


class PythonHooks(Optimizer):
    """One optimizer per parameter, stepped in the parameter's gradient hook.

    The idea of "How to save memory by fusing the optimizer step into the
    backward pass", docs.pytorch.org/tutorials. step() has nothing left to do.
    """

    def __init__(self, optimizer: Optimizer, foreach: bool) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        like = with_flags(optimizer, foreach=foreach, fused=None)
        self._single: dict[torch.Tensor, Optimizer] = {}
        for group in like.param_groups:
            for p in group["params"]:
                one = type(like)([{**group, "params": [p]}], lr=group["lr"])
                self._single[p] = one
                p.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, p: torch.Tensor) -> None:
        self._single[p].step()
        self._single[p].zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None


class CompiledStep(Optimizer):
    """The optimizer's step() under torch.compile."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        torch._dynamo.reset()
        like = with_flags(optimizer, foreach=True, fused=None)
        self._step = torch.compile(like.step, fullgraph=False)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        self._step()


# What an optimizer costs and what of it we recover; nothing else.
FEW = ("no optimizer", "default", "fused=True", "backward fusion", "forward fusion")


def few_variants() -> Mapping[str, Wrap]:
    return {name: VARIANTS[name] for name in FEW}


def variants(device: str = "cpu", compiled: bool = False) -> Mapping[str, Wrap]:
    """By name, in the order of the table. The default is a loop over the
    parameters on the CPU and foreach on a GPU; the other one is named."""
    ours = {name: wrap for name, wrap in VARIANTS.items() if name.endswith("fusion")}
    stock = {name: wrap for name, wrap in VARIANTS.items() if name not in ours}
    if device == "cuda":
        loop = partial(with_flags, foreach=False, fused=None)
        stock = {FOR_LOOP if name == FOREACH else name: wrap for name, wrap in stock.items()}
        stock[FOR_LOOP] = loop
    if compiled:
        stock[COMPILED] = CompiledStep
    hooks = {
        HOOKS: partial(PythonHooks, foreach=False),
        HOOKS_FOREACH: partial(PythonHooks, foreach=True),
    }
    return {**stock, **hooks, **ours}
