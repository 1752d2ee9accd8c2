# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers in the styles of many packages, for tests of tracing: those that can be traced, and
those that can't."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optfuse
from optfuse._trials.compare import difference


class Base(Optimizer):
    """step() goes through groups and parameters, as it does in most classes."""

    defaults: Any = {"lr": 1e-2}

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**type(self).options(), **options})

    @classmethod
    def options(cls) -> dict[str, Any]:
        return {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        raise NotImplementedError


class AdaBelief(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_var"] = torch.zeros_like(p)
        (b1, b2), average = group["betas"], state["exp_avg"]
        state["step"] += 1
        p.mul_(1 - group["lr"] * group["weight_decay"])
        average.mul_(b1).add_(grad, alpha=1 - b1)
        surprise = grad - average
        state["exp_avg_var"].mul_(b2).addcmul_(surprise, surprise, value=1 - b2)
        c1, c2 = 1 - b1 ** state["step"], 1 - b2 ** state["step"]
        root = (state["exp_avg_var"].add_(group["eps"]).sqrt() / math.sqrt(c2)).add_(group["eps"])
        p.addcdiv_(average, root, value=-group["lr"] / c1)


class SignOfAverage(Base):
    """As Lion."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        (b1, b2), average = group["betas"], state["exp_avg"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(average.clone().mul_(b1).add(grad, alpha=1 - b1).sign_(), alpha=-group["lr"])
        average.mul_(b2).add_(grad, alpha=1 - b2)


class WritesGradient(Base):
    """Decay is added to the gradient, in place; the average begins as its copy."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        grad.add_(p, alpha=group["weight_decay"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = grad.clone()
        else:
            state["momentum_buffer"].mul_(group["betas"][0]).add_(grad)
        p.add_(state["momentum_buffer"], alpha=-group["lr"])


class TensorCounter(Base):
    """A counter that is a tensor, and a root of a maximum."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["square"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["largest"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        state["square"].lerp_(grad.square(), 1 - group["betas"][1])
        torch.maximum(state["largest"], state["square"], out=state["largest"])
        rate = group["lr"] / (1 - group["betas"][0] ** state["step"])
        p.addcdiv_(grad, state["largest"].sqrt().add_(group["eps"]), value=-float(rate))


class Replaces(Base):
    """New tensors in the state at each step."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        before = state.get("average", torch.zeros_like(p))
        state["average"] = group["betas"][0] * before + (1 - group["betas"][0]) * grad
        state["last"] = grad.clone()
        p.sub_(state["average"].clamp(-0.5, 0.5), alpha=group["lr"])


class Masks(Base):
    """Choices element by element, as Rprop makes them."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["before"] = torch.zeros_like(p)
            state["size"] = torch.full_like(p, group["lr"])
        sign = grad.mul(state["before"]).sign()
        factor = sign.clone()
        factor[sign.gt(0)] = 1.2
        factor[sign.lt(0)] = 0.5
        factor[sign.eq(0)] = 1.0
        state["size"].mul_(factor).clamp_(1e-6, 50)
        kept = torch.where(sign < 0, 0.0, grad)
        p.addcmul_(kept.sign(), state["size"], value=-1)
        state["before"].copy_(kept)
        p.mul_(1 - 0.01 * (p.abs() > 1).to(p.dtype))


class GroupCounter(Base):
    """Counts in options, with a list that is written in place, and in an attribute."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps = 0
        for group in self.param_groups:
            group["buffer"] = [None, None]

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def begin(self, group: dict[str, Any]) -> None:
        group["n"] = group.get("n", 0) + 1
        group["buffer"][group["n"] % 2] = 1 / group["n"]

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] * group["buffer"][group["n"] % 2] / self.steps)


class EveryFifth(Base):
    """Moves slow weights at every fifth step; they are made at the first."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        if "slow" not in state:
            state["slow"] = p.clone()
        p.add_(grad, alpha=-group["lr"])
        if state["n"] % 5 == 0:
            state["slow"].add_(p - state["slow"], alpha=0.5)
            p.copy_(state["slow"])


class ByShape(Base):
    """Treats vectors and matrices differently, and small and large ones."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if p.dim() > 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(grad, alpha=-group["lr"] / (1 + p.numel() % 3))


class Foreach(Base):
    """Multi-tensor functions."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["average"] = torch.zeros_like(p)
            averages = [self.state[p]["average"] for p in params]
            torch._foreach_lerp_(averages, grads, 1 - group["betas"][0])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            roots = torch._foreach_sqrt(torch._foreach_mul(grads, grads))
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_maximum_(roots, 1e-3)
            torch._foreach_addcdiv_(params, averages, roots, -group["lr"])


class TrainsAndEvaluates(Base):
    """Parameters are other ones to train with than to evaluate with."""

    def begin(self, group: dict[str, Any]) -> None:
        if not group.get("training"):
            raise RuntimeError("call train() first")
        group["k"] = group.get("k", 0) + 1

    def _set(self, training: bool) -> None:
        for group in self.param_groups:
            if group.get("training", False) != training and "k" in group:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 0.1 if training else -1 / 9)
            group["training"] = training

    def train(self) -> None:
        self._set(True)

    def eval(self) -> None:
        self._set(False)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if "z" not in state:
            state["z"] = torch.clone(p, memory_format=torch.preserve_format)
        p.lerp_(state["z"], 1 / (group["k"] + 1)).add_(grad, alpha=-0.1 * group["lr"])
        state["z"].sub_(grad, alpha=group["lr"])


# ---- those in which PyTorch's operators take turns with segments of a program


class TrustRatio(Base):
    """Steps as long as the parameter is large, as in Lamb and Lars."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["average"] = torch.zeros_like(p)
            state["square"] = torch.zeros_like(p)
        state["average"].lerp_(grad, 0.1)
        state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = state["average"] / state["square"].sqrt().add_(group["eps"])
        update.add_(p, alpha=group["weight_decay"])
        size, length = p.norm(2.0), update.norm(2.0)
        ratio = torch.where(size > 0, torch.where(length > 0, size / length, 1.0), 1.0)
        p.add_(update.mul_(ratio.clamp(max=10.0)), alpha=-group["lr"])


class Centered(Base):
    """Gradients without their mean, and a mask that grows what it leaves."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if grad.dim() > 1:
            grad = grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
        if not state:
            state["average"] = torch.zeros_like(p)
        state["average"].mul_(0.9).add_(grad)
        mask = (state["average"] * grad > 0).to(grad.dtype)
        mask.div_(mask.mean().clamp_(min=1e-3))
        p.sub_(state["average"] * mask * group["lr"])


class Factored(Base):
    """Rows and columns of squares, as in Adafactor, but of this step only."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        square = grad.square().add_(1e-12)
        if grad.dim() > 1:
            row, column = square.mean(dim=-1), square.mean(dim=-2)
            row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = row * column.rsqrt().unsqueeze(-2) * grad
        else:
            update = square.rsqrt() * grad
        largest = update.norm() / math.sqrt(update.numel())
        p.add_(update.div_(largest.clamp_(min=1.0)), alpha=-group["lr"])


class ByViews(Base):
    """Writes through other shapes of the same memory."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.mul_(0.99)
        flat, length = p.view(-1), p.norm()
        flat.sub_(grad.reshape(-1) / (1 + length), alpha=group["lr"])
        p.add_(p.sign(), alpha=-1e-4)
        grad.view(-1).mul_(0.5)


class Rare(Base):
    """Elementwise, by operators that programs have not."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["last"] = torch.zeros_like(p)
        friction = torch.sigmoid((state["last"] - grad).abs())
        state["last"].copy_(grad)
        large = grad.abs() > 0.5
        tame = torch.where(large & ~torch.isfinite(grad), 0.0, torch.nan_to_num(grad))
        p.addcmul_(tame.masked_fill(large, 0.25), friction.pow(0.25), value=-group["lr"])


class Doubles(Base):
    """Computes with more bits than parameters have."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        wide = grad.double().mul_(0.5).add_(p.double())
        p.copy_(p.double() - group["lr"] * wide / (1 + wide.abs().max()))


class CopiesDeep(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        before = copy.deepcopy(p.data)
        p.add_(grad, alpha=-group["lr"])
        p.lerp_(before, 0.1)


class Sorts(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(torch.sort(grad, dim=-1)[0], alpha=-group["lr"])


class CounterOfAll(Base):
    """Counts steps in the state, under a key that is no parameter, as MADGRAD does."""

    def make(self) -> Any:
        return torch.tensor([0], dtype=torch.long)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if "k" not in self.state:
            self.state["k"] = self.make()  # type: ignore[index]
        loss = super().step(closure)
        self.state["k"] += 1  # type: ignore[index]
        return loss

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        k = self.state["k"]  # type: ignore[index]
        scale = group["lr"] * math.sqrt(float(k) + 1)
        if not state:
            state["sum_sq"], state["sum"] = torch.zeros_like(p), torch.zeros_like(p)
            state["x0"] = torch.clone(p).detach()
        state["sum_sq"].addcmul_(grad, grad, value=scale)
        state["sum"].add_(grad, alpha=scale)
        root = state["sum_sq"].sqrt().add_(group["eps"])
        p.mul_(0.9).add_(state["x0"].addcdiv(state["sum"], root, value=-1), alpha=0.1)


class NumberOfAll(CounterOfAll):
    def make(self) -> Any:
        return 0


class PointOfAll(CounterOfAll):
    def make(self) -> Any:
        return torch.tensor(0.0)


class EightStates(Base):
    """As many as there can be, from which the update is made in one expression."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        power = grad
        for i, name in enumerate("abcdefgh"):
            state[name] = average = state.get(name, torch.zeros_like(p))
            average.lerp_(power, 0.5 ** (i + 1))
            power = average + grad
        whole = sum(state[name] * (i + 1) for i, name in enumerate("abcdefgh"))
        p.add_(whole / (state["a"].abs() + state["h"].abs() + 1), alpha=-group["lr"])


TRACEABLE = [
    *(AdaBelief, SignOfAverage, WritesGradient, TensorCounter, Replaces, Masks, GroupCounter),
    *(EveryFifth, ByShape, Foreach, TrainsAndEvaluates, CounterOfAll, NumberOfAll, PointOfAll),
    EightStates,
]


class OwnNumber(Base):
    """A number of its own for each parameter, of its data, as in NovoGrad."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        square = grad.square().sum()
        if "square" not in state:
            state["square"] = square
        else:
            state["square"].mul_(0.9).add_(square, alpha=0.1)
        p.add_(grad / state["square"].sqrt().add_(group["eps"]), alpha=-group["lr"])


class NewNumber(Base):
    """The same, another tensor after each step, that is a view."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        old = state.get("norm")
        state["norm"] = torch.stack([grad.norm(), p.norm()])[0]
        p.add_(grad if old is None else grad * old, alpha=-group["lr"])


class FactoredState(Base):
    """Rows and columns of squares, as in Adafactor, made by their shapes."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["n"] = 0
            if grad.dim() > 1:
                shape = grad.shape
                state["row"] = torch.zeros(shape[:-1], dtype=grad.dtype, device=grad.device)
                state["column"] = torch.zeros(shape[:-2] + shape[-1:], dtype=grad.dtype)
            else:
                state["square"] = torch.zeros_like(grad)
        state["n"] += 1
        weight = 1 - state["n"] ** -0.8
        square = grad.square().add_(1e-12)
        if grad.dim() > 1:
            row = state["row"].mul_(weight).add_(square.mean(dim=-1), alpha=1 - weight)
            column = state["column"].lerp_(square.mean(dim=-2), 1 - weight)
            row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = row * column.rsqrt().unsqueeze(-2) * grad
        else:
            update = state["square"].lerp_(square, 1 - weight).rsqrt() * grad
        p.add_(update, alpha=-group["lr"])


class PointState(Base):
    """Numbers made from nothing, with a dimension and without."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["one"] = torch.zeros((1,), dtype=grad.dtype)
            state["point"] = torch.full((), 2.0, dtype=grad.dtype)
            state["n"] = torch.tensor(0.0)
        state["n"] += 1
        state["one"].lerp_(grad.abs().mean().view(1), 0.25)
        state["point"].mul_(0.5).add_(grad.abs().amax())
        p.sub_(grad * state["one"], alpha=group["lr"] / float(state["n"]))
        p.div_(1 + state["point"] * 1e-3)


class OtherDtypes(Base):
    """An average in double precision, and a mask."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["average"] = torch.zeros_like(p, dtype=torch.float64)
            state["was"] = grad > 0
        state["average"].lerp_(grad.double(), 0.1)
        agrees = state["was"] == (grad > 0)
        state["was"] = grad > 0
        p.sub_(torch.where(agrees, state["average"].to(p.dtype), grad), alpha=group["lr"])


CALLING = [TrustRatio, Centered, Factored, ByViews, Rare, Doubles, CopiesDeep, Sorts]
CALLING += [OwnNumber, NewNumber, FactoredState, PointState, OtherDtypes]


def beside_stock(cls: type[Optimizer], params: list[nn.Parameter], steps: int) -> Optimizer:
    """Fused, after steps in which it has had the bits of the class by itself."""
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ours, stock = optfuse.fuse(cls(params)), cls(twins)  # type: ignore[call-arg]
    for _ in range(steps):
        for a, b in zip(params, twins, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        stock.step()
    for a, b in zip(params, twins, strict=True):
        assert difference("", a.detach(), b.detach()) is None
    return ours


# ---- those that can't be traced: what they do, and what the error says of it


class Queue(Base):
    """A queue of past gradients."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state.setdefault("past", deque(maxlen=10)).append(grad.clone())
        p.add_(state["past"][0], alpha=-group["lr"])


class LooksAtValues(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if grad.abs().max().item() > 100:
            return
        p.add_(grad, alpha=-group["lr"])


class CatchesErrors(Base):
    """As if nothing had happened."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        largest = 1.0
        try:
            largest = max(1.0, grad.abs().max().item())
        except Exception:
            largest = 1.0
        p.add_(grad, alpha=-group["lr"] / largest)


class Random(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad + 0.01 * torch.randn_like(grad), alpha=-group["lr"])


class RandomOfPython(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] * random.random())


class ByNumpy(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] / (1 + float(abs(grad.numpy()).max())))


class KeepsInAttribute(Base):
    last: Any = None

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        self.last = grad
        p.add_(grad, alpha=-group["lr"])


class KeepsElsewhere(Base):
    kept: list[Any] = []  # noqa: RUF012  that is the point

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        self.kept.append(grad * 1)
        p.add_(grad, alpha=-group["lr"])


class OptionOfGradient(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        group["scale"] = float(grad.abs().mean())
        p.add_(grad, alpha=-group["lr"] * group["scale"])


class Coupled(Base):
    """Large parameters by how many others there are."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if p.numel() > 16_384:
            grad = grad * len(self.param_groups[0]["params"])
        p.add_(grad, alpha=-group["lr"])


class NineStates(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        for name in "abcdefghi":
            state[name] = grad * 1
        p.add_(grad, alpha=-group["lr"])


class NewGradient(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"])
        p.grad = grad * 2


class CountsUpdatesForAll(CounterOfAll):
    """Looks like MADGRAD, and its counter depends on how many parameters there are."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        super().update(p, grad, state, group)
        self.state["k"] += 1  # type: ignore[index]


class SumOfAll(CounterOfAll):
    """Keeps a mean of all parameters' gradients there."""

    def make(self) -> Any:
        return torch.zeros(1)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        self.state["k"] += grad.float().mean()  # type: ignore[index]
        p.add_(grad, alpha=-group["lr"] * float(1 + self.state["k"].abs()))  # type: ignore[index]


class ByIndexOfAll(Base):
    """Keeps what belongs to a parameter under its place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    entry = self.state[i]  # type: ignore[index]
                    if not entry:
                        entry["average"] = torch.zeros_like(p)
                    p.sub_(entry["average"].lerp_(p.grad, 0.1), alpha=group["lr"])


class LastGradientOfAll(CounterOfAll):
    """Keeps a gradient there, for the next step."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"])
        self.state["last"] = grad * 1  # type: ignore[index]


UNTRACEABLE = {
    Queue: "keeps a tensor of this step",
    LooksAtValues: "item",
    CatchesErrors: "item",
    Random: "independently",
    RandomOfPython: "independently",
    ByNumpy: "numpy",
    KeepsInAttribute: "attribute 'last'",
    KeepsElsewhere: "keeps a tensor of this step",
    OptionOfGradient: "option 'scale'",
    Coupled: "independently",
    NineStates: "more than 8 state tensors",
    NewGradient: "gradient",
    CountsUpdatesForAll: "how many parameters have a gradient",
    SumOfAll: "the gradients of other parameters",
    ByIndexOfAll: "state that belongs to no parameter",
    LastGradientOfAll: "state that belongs to no parameter",
}
