# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that are compared: those of optfuse.ab and, beside them, what else does
one of the two things that optfuse does: updating in backward (the Python hooks of PyTorch's
tutorial) and a faster step() (torch.compile, DeepSpeed's CPUAdam)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

import optfuse
from optfuse_tools.ab.variants import VARIANTS, Wrap, with_flags

HOOKS = "Python hooks"
HOOK_FLAGS = {"": {"foreach": False}, ", foreach": {"foreach": True}, ", fused": {"fused": True}}
HOOK_VARIANTS = tuple(HOOKS + name for name in HOOK_FLAGS)
FOREACH, FOR_LOOP = "foreach=True", "for-loop"
FINAL = "final fusion"
COMPILED, CPU_ADAM = "compiled step", "DeepSpeed CPUAdam"


class PythonHooks(Optimizer):
    """One optimizer per parameter, stepped in the parameter's gradient hook, after "How to save
    memory by fusing the optimizer step into the backward pass", docs.pytorch.org/tutorials."""

    def __init__(self, optimizer: Optimizer, **flags: bool) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        like = with_flags(optimizer, **{"foreach": None, "fused": None, **flags})
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
    """The optimizer's step() under torch.compile, after PyTorch's tutorial."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        torch._dynamo.reset()
        like = with_flags(optimizer, foreach=True, fused=None)
        self._step = torch.compile(like.step, fullgraph=False)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        self._step()


def cpu_adam(optimizer: Optimizer) -> Optimizer:
    """DeepSpeed's Adam for offloaded states, which runs on the CPU."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(f"DeepSpeed has no {type(optimizer).__name__} for the CPU")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    (group,) = optimizer.param_groups
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    return DeepSpeedCPUAdam(group["params"], adamw_mode=decoupled, **options)


# The variants that show what an optimizer costs and how much of it we recover.
FEW = ("no optimizer", "default", "fused=True", "backward fusion", "forward fusion")


def few_variants() -> Mapping[str, Wrap]:
    return {name: VARIANTS[name] for name in FEW}


def variants(device: str = "cpu", compiled: bool = False) -> Mapping[str, Wrap]:
    """By name, in the order of the table. The default is a loop over the
    parameters on the CPU and foreach on a GPU; the other one is named."""
    ours = {name: wrap for name, wrap in VARIANTS.items() if name.endswith("fusion")}
    ours[FINAL] = partial(optfuse.fuse, mode=optfuse.Backward(final=True))
    stock = {name: wrap for name, wrap in VARIANTS.items() if not name.endswith("fusion")}
    if device == "cuda":
        del stock[FOREACH]
        stock[FOR_LOOP] = partial(with_flags, foreach=False, fused=None)
    elif importlib.util.find_spec("deepspeed"):
        stock[CPU_ADAM] = cpu_adam
    if compiled:
        stock[COMPILED] = CompiledStep
    hooks = {HOOKS + name: partial(PythonHooks, **flags) for name, flags in HOOK_FLAGS.items()}
    return {**stock, **hooks, **ours}
