# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that torch.optim does not have. They work without fuse(), like
any other, and their step() is the reference for what fuse() gives."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optfuse._rounding.one_by_one import (
    Entry,
    Group,
    OneByOne,
    Rounding,
    States,
    check_numbers,
    rounding_options,
)

if TYPE_CHECKING:
    from optfuse._rounding.factored import CAME as CAME
    from optfuse._rounding.factored import Adafactor as Adafactor
else:

    def __getattr__(name: str) -> Any:
        """Loads two classes when they are asked for: they are many lines, and fuse() needs none."""
        if name not in ("Adafactor", "CAME"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("optfuse._rounding.factored"), name)


class Lion(OneByOne):
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
    stochastic_rounding, stochastic_state, seed: as AdamW's. With the first the optimizer is a
        RoundedLion, which computes in float32, rounds once and counts its steps.

    The state has one tensor a parameter, "exp_avg", of its shape and dtype.
    Raises ValueError for a number out of its range and RuntimeError for a
    sparse gradient.
    """

    STATE = ("exp_avg",)

    def __new__(cls, *args: Any, stochastic_rounding: bool = False, **options: Any) -> Lion:
        return super().__new__(RoundedLion if stochastic_rounding and cls is Lion else cls)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        stochastic_state: bool = False,
        seed: int = 0,
    ) -> None:
        check_numbers(lr, betas, 2, weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        rounding = rounding_options(stochastic_rounding, stochastic_state, seed)
        super().__init__(params, {**defaults, **(rounding if isinstance(self, Rounding) else {})})

    def _update(self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int) -> None:
        exp_avg, lr, decay = state["exp_avg"], float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        update = exp_avg.mul(beta1).add_(grad, alpha=1 - beta1).sign_()
        param.mul_(1 - lr * decay)
        param.add_(update, alpha=-lr)
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


class RoundedLion(Rounding, Lion):
    """Lion(stochastic_rounding=True)."""

    def _compute(self, group: Group, param: Tensor, grad: Tensor, state: States, step: int) -> None:
        (exp_avg,) = state
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        update = exp_avg.mul(beta1).add_(grad.mul(1 - beta1)).sign_()
        param.mul_(1 - lr * decay).add_(update.mul_(-lr))
        exp_avg.mul_(beta2).add_(grad.mul(1 - beta2))


class Adan(OneByOne):
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
        check_numbers(lr, betas, 3, weight_decay, eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "no_prox": no_prox,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _update(self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int) -> None:
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


class AdamW(Rounding):
    """AdamW ("Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 2) that computes
    in float32, whatever the parameters' dtype, and rounds once:

        p = (1 - lr * weight_decay) * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        p = p - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    params: of float32, bfloat16, float16 or float64 (then it computes in that), or groups of them.
    lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW's.
    stochastic_rounding: parameters of 16 bits are rounded up or down at random, with the
        probabilities that make their mean the number that was computed. So they move by steps that
        rounding to nearest swallows, and need no copy in float32.
    stochastic_state: m and v of such parameters are of their dtype, and rounded stochastically,
        too. Without it they are float32.
    seed: of the random numbers, from 0 to 2**53 - 1. Two optimizers of one model should have
        different ones, all processes of a training the same.

    The random numbers are optfuse.random_bits() of seed, t, the number that state_dict() has for
    the parameter, and the element: no generator has a state, the order of parameters and the number
    of threads change no bit, and a run that is resumed goes on as it would have. The integers of a
    DTensor's shard are those of its place in the whole, so neither does the number of ranks; it may
    be sharded once, by its first dimension (FSDP2's way).

    The state has "step" (t), a 0-dim float32 tensor on the CPU, "exp_avg" (m) and "exp_avg_sq" (v),
    of a parameter's shape. load_state_dict() leaves their dtype as it was saved. Raises ValueError
    for a number out of its range and RuntimeError for a sparse gradient.
    """

    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        stochastic_state: bool = False,
        seed: int = 0,
    ) -> None:
        check_numbers(lr, betas, 2, weight_decay, eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            **rounding_options(stochastic_rounding, stochastic_state, seed),
        }
        super().__init__(params, defaults)

    def _compute(self, group: Group, param: Tensor, grad: Tensor, state: States, step: int) -> None:
        exp_avg, exp_avg_sq = state
        lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        exp_avg.mul_(beta1).add_(grad.mul(1 - beta1))
        exp_avg_sq.mul_(beta2).add_(grad.mul(grad).mul_(1 - beta2))
        # The root of a float32 is correctly rounded so, on every device; sqrt() on the CPU is not.
        root = exp_avg_sq.double().sqrt_().to(exp_avg_sq.dtype)
        denominator = root.mul_(1 / math.sqrt(1 - beta2**step)).add_(eps)
        param.mul_(1 - lr * decay)
        param.add_(exp_avg.div(denominator).mul_(-lr / (1 - beta1**step)))


#: The rule of each has its name in small letters.
CLASSES = (Lion, Adan)
#: Classes that round once have rules of these names.
ROUNDING = {AdamW: "adamw", RoundedLion: "lion_rounded"}
