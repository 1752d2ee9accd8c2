# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() branches on a tensor's value, in the styles of Lamb, AdamP, NovoGrad and
others; and those that look alike and can't be traced."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from traced_classes import Base


class ClipsAbove(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        norm = grad.norm()
        if norm > 1:
            grad = grad / norm
        p.add_(grad, alpha=-group["lr"])


class SkipsLarge(Base):
    """Does nothing for some gradients."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if bool((grad > 1).any()):
            return
        p.add_(grad, alpha=-group["lr"])


class Lamb(Base):
    """Two questions, of which the second is not always asked."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["step"] = 0
            state["average"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        average, square = state["average"], state["square"]
        average.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = average / square.sqrt().add(group["eps"])
        update.add_(p, alpha=group["weight_decay"])
        size, length = p.norm(), update.norm()
        ratio = 1 if size == 0 or length == 0 else size / length
        p.add_(update, alpha=-group["lr"] / math.sqrt(state["step"]) * ratio)


class Projects(Base):
    """As AdamP: for each of two views the update is projected if it is nearly the gradient."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if "average" not in state:
            state["average"] = torch.zeros_like(p)
        state["average"].mul_(0.9).add_(grad, alpha=0.1)
        update, ratio = state["average"] / (grad.abs() + 1), 1.0
        if p.dim() > 1:
            update, ratio = self.projected(p, grad, update)
        p.mul_(1 - group["lr"] * group["weight_decay"] * ratio)
        p.add_(update, alpha=-group["lr"])

    def projected(self, p: Tensor, grad: Tensor, update: Tensor) -> tuple[Tensor, float]:
        for rows in (p.shape[0], 1):
            a, b, c = (x.reshape(rows, -1) for x in (p, grad, update))
            cosine = torch.nn.functional.cosine_similarity(a, b, dim=1).abs()
            if cosine.max() < 4.0 / math.sqrt(a.shape[1]) / rows:
                unit = a / a.norm(dim=1, keepdim=True).add(1e-8)
                c = c - unit * (unit * c).sum(dim=1, keepdim=True)
                return c.view(p.shape), 0.1
        return update, 1.0


class FirstNorm(Base):
    """As NovoGrad: a number in the state that begins with the first norm."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["average"] = torch.zeros_like(p)
            state["square"] = torch.zeros([], dtype=torch.float32)
        norm = grad.float().norm().pow(2)
        if state["square"] == 0:
            state["square"].copy_(norm)
        else:
            state["square"].mul_(0.98).add_(norm, alpha=0.02)
        denominator = state["square"].sqrt().add_(group["eps"])
        state["average"].mul_(0.9).add_(grad.div(denominator))
        p.add_(state["average"], alpha=-group["lr"])


class NaNIsTrue(Base):
    """A number by itself is the question."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad if grad.sum() else p, alpha=-group["lr"])


class ByStep(Base):
    """Asks at some steps only."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 3 == 0 and grad.norm() > 0.5:
            grad = grad * 0.5
        elif state["step"] > 10 and not grad.mean() > 0:
            grad = grad * 2
        p.add_(grad, alpha=-group["lr"])


BRANCHING = [ClipsAbove, SkipsLarge, Lamb, Projects, FirstNorm, NaNIsTrue, ByStep]


class CountsLarge(Base):
    """Counts in the state what is large."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state["n"] = state.get("n", 0) + (1 if grad.norm() > 1 else 0)
        p.add_(grad, alpha=-group["lr"] / (1 + state["n"]))


class MakesState(Base):
    """Has more state after a large gradient."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if grad.norm() > 1 and "large" not in state:
            state["large"] = torch.zeros_like(p)
        p.add_(grad, alpha=-group["lr"] if "large" in state else -1e-3)


class Anneals(Base):
    """Changes an option where a parameter's gradient is large."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if grad.norm() > 1:
            group["lr"] *= 0.9
        p.add_(grad, alpha=-group["lr"])


class NotesLarge(Base):
    """The same with an attribute."""

    seen_large = False

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if grad.norm() > 1:
            self.seen_large = True
        p.add_(grad, alpha=-group["lr"])


class ManyQuestions(Base):
    """Three of them, so that there are eight ways."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        for bound in (0.1, 1.0, 10.0):
            if grad.norm() > bound:
                grad = grad * 0.5
        p.add_(grad, alpha=-group["lr"])


class ClipsByAll(Base):
    """Looks like ClipsAbove, and the norm is that of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads if grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / norm if norm > 1 else p.grad, alpha=-group["lr"])


class OfElements(Base):
    """Asks a tensor of several elements, which PyTorch refuses where there are."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if p.numel() == 1 and grad > 0:
            p.add_(grad, alpha=-group["lr"])
        p.add_(grad, alpha=-group["lr"])


UNTRACEABLE = {
    CountsLarge: "it makes something else of the state entry",
    MakesState: "it makes something else of the state entry",
    Anneals: "how many parameters have a gradient",
    NotesLarge: "the optimizer's attribute 'seen_large'|something else of attributes",
    ManyQuestions: "more than 4 outcomes",
    ClipsByAll: "the gradients of other parameters",
}
