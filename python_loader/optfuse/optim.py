# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that torch.optim does not have. They work without fuse(), like
any other, and their step() is the reference for what fuse() gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _OneByOne(Optimizer):
    """An optimizer that updates its parameters one by one, with _update()."""

    STATE: tuple[str, ...] = ()  # tensors of a parameter's shape and dtype, at first zeros
    COUNTS = False  # there is a "step", a 0-dim float32 tensor on the CPU

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Tensor]]
    ) -> None:
        """Collects the parameters that have a gradient, and makes their state."""
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            state = self.state[param]
            if not state:
                if self.COUNTS:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                for name in self.STATE:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            params.append(param)
            states.append(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what closure
        returns, which is called first with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            states: list[dict[str, Tensor]] = []
            self._init_group(group, params, states)
            for param, state in zip(params, states, strict=True):
                assert param.grad is not None
                grad = -param.grad if group["maximize"] else param.grad
                self._update(group, param, grad, state)
        return loss

    def _update(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """grad: with the sign that descends."""
        raise NotImplementedError


def _check_numbers(lr: Any, betas: Any, n_betas: int, weight_decay: float) -> None:
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if len(betas) != n_betas:
        raise ValueError(f"Invalid betas, which are {n_betas} numbers: {betas}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


class Lion(_OneByOne):
    """Lion: the sign of a momentum ("Symbolic Discovery of Optimization
    Algorithms", arXiv 2302.06675, algorithm 2):

        u = sign(beta1 * m + (1 - beta1) * g)
        p = (1 - lr * weight_decay) * p - lr * u
        m = beta2 * m + (1 - beta2) * g

    params: floating-point tensors of any shape, or groups of them.
    lr: learning rate, a number or a 0-dim tensor; about a third to a tenth of
        AdamW's, since every element of u is -1, 0 or 1.
    betas: of the update and of the momentum, in [0, 1).
    weight_decay: decoupled, as AdamW's; about three to ten times AdamW's.
    maximize: ascends.

    The state has one tensor a parameter, "exp_avg", of its shape and dtype.
    Raises ValueError for a number out of its range and RuntimeError for a
    sparse gradient.
    """

    STATE = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check_numbers(lr, betas, 2, weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _update(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        exp_avg, lr = state["exp_avg"], float(group["lr"])
        beta1, beta2 = group["betas"]
        update = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-lr)
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


#: The rule of each has its name in small letters.
CLASSES = (Lion,)
