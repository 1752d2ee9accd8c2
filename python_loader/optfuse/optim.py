# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that torch.optim does not have. They work without fuse(), like
any other, and their step() is the reference for what fuse() gives."""

from __future__ import annotations

import math
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
        for entry in self.state.values() if self.COUNTS else ():
            entry["step"] = torch.as_tensor(entry["step"], dtype=torch.float32, device="cpu")

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
        exp_avg, lr, decay = state["exp_avg"], float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        update = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        param.mul_(1 - lr * decay)
        param.add_(update, alpha=-lr)
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


class Adan(_OneByOne):
    """Adan: Nesterov's momentum from the change of the gradient ("Adan: Adaptive Nesterov
    Momentum Algorithm for Faster Optimizing Deep Models", arXiv 2208.06677, algorithm 1),
    with betas as Adam's (1 - the paper's) and averages that start at 0, corrected for it:

        d = g - previous g, and 0 in a parameter's first step
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * d
        n = beta3 * n + (1 - beta3) * (g + beta2 * d)**2
        s = lr / (sqrt(n / (1 - beta3**t)) + eps)
        p = (p - s * (m / (1 - beta1**t) + beta2 * v / (1 - beta2**t))) / (1 + lr * weight_decay)

    params: floating-point tensors of any shape, or groups of them.
    lr: learning rate, a number or a 0-dim tensor.
    betas: of the averages of the gradient, of its change and of its square, in [0, 1).
    eps: at least 0.
    weight_decay: decoupled, as AdamW's.
    no_prox: decays as AdamW: p * (1 - lr * weight_decay) before, instead of the division.
    maximize: ascends.

    The state has "step", a 0-dim float32 tensor on the CPU, and four tensors of a
    parameter's shape and dtype: "exp_avg" (m), "exp_avg_diff" (v), "exp_avg_sq" (n) and
    "previous_grad": g, negated by maximize. Raises ValueError for a number out of its
    range and RuntimeError for a sparse gradient.
    """

    STATE = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")
    COUNTS = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        _check_numbers(lr, betas, 3, weight_decay)
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "no_prox": no_prox,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _update(
        self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, eps = float(group["lr"]), float(group["eps"])
        decay = lr * float(group["weight_decay"])
        beta1, beta2, beta3 = map(float, group["betas"])
        exp_avg, exp_avg_diff, exp_avg_sq, previous = (state[name] for name in self.STATE)
        state["step"] += 1
        t = state["step"].item()
        change = grad.sub(previous) if t > 1 else torch.zeros_like(grad)
        ahead = grad.add(change, alpha=beta2)
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_diff.mul_(beta2).add_(change, alpha=1 - beta2)
        exp_avg_sq.mul_(beta3).add_(ahead.mul(ahead), alpha=1 - beta3)
        previous.copy_(grad)
        # Correctly rounded on every device; sqrt() on the CPU is not always.
        (root,) = torch._foreach_sqrt((exp_avg_sq,))
        denominator = root.mul_(1 / math.sqrt(1 - beta3**t)).add_(eps)
        if group["no_prox"]:
            param.mul_(1 - decay)
        param.add_(exp_avg.div(denominator), alpha=-lr / (1 - beta1**t))
        param.add_(exp_avg_diff.div(denominator), alpha=-lr * beta2 / (1 - beta2**t))
        if not group["no_prox"]:
            param.mul_(1 / (1 + decay))


#: The rule of each has its name in small letters.
CLASSES = (Lion, Adan)
