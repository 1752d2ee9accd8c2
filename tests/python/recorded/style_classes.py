# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers in the styles of many packages: what their step() does with tensors, with state, with
options and with the parameters themselves."""

import copy
import itertools
import math
from collections import deque

import torch
from torch.optim import Optimizer

STYLES: dict[str, type[Optimizer]] = {}


def style(cls):
    STYLES[cls.__name__] = cls
    return cls


class Base(Optimizer):
    """step() goes through groups and parameters, as it does in most classes."""

    def __init__(self, params, **options):
        super().__init__(params, {**type(self).options(), **options})
        self.prepare([p for group in self.param_groups for p in group["params"]])

    @classmethod
    def options(cls):
        return {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}

    def prepare(self, params):
        pass

    @torch.no_grad()
    def step(self, closure=None):
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

    def begin(self, group):
        pass

    def update(self, p, grad, state, group):
        raise NotImplementedError


# ---- elementwise rules


@style
class AdaBelief(Base):
    def update(self, p, grad, state, group):
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


@style
class SignOfAverage(Base):
    """As Lion."""

    def update(self, p, grad, state, group):
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        (b1, b2), average = group["betas"], state["exp_avg"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(average.clone().mul_(b1).add(grad, alpha=1 - b1).sign_(), alpha=-group["lr"])
        average.mul_(b2).add_(grad, alpha=1 - b2)


@style
class WritesGradient(Base):
    """Decay is added to the gradient, in place; the average begins as its copy."""

    def update(self, p, grad, state, group):
        grad.add_(p, alpha=group["weight_decay"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = grad.clone()
        else:
            state["momentum_buffer"].mul_(group["betas"][0]).add_(grad)
        p.add_(state["momentum_buffer"], alpha=-group["lr"])


@style
class TensorCounter(Base):
    """A counter that is a tensor, and a root of a maximum."""

    def update(self, p, grad, state, group):
        if not state:
            state["step"] = torch.tensor(0.0)
            state["square"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["largest"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        state["square"].lerp_(grad.square(), 1 - group["betas"][1])
        torch.maximum(state["largest"], state["square"], out=state["largest"])
        rate = group["lr"] / (1 - group["betas"][0] ** state["step"])
        p.addcdiv_(grad, state["largest"].sqrt().add_(group["eps"]), value=-float(rate))


@style
class Replaces(Base):
    """New tensors in the state at each step."""

    def update(self, p, grad, state, group):
        before = state.get("average", torch.zeros_like(p))
        state["average"] = group["betas"][0] * before + (1 - group["betas"][0]) * grad
        state["last"] = grad.clone()
        p.sub_(state["average"].clamp(-0.5, 0.5), alpha=group["lr"])


@style
class Signs(Base):
    """Choices element by element, as Rprop makes them."""

    def update(self, p, grad, state, group):
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


@style
class EveryFifth(Base):
    """Moves slow weights at every fifth step; they are made at the first."""

    def update(self, p, grad, state, group):
        state["n"] = state.get("n", 0) + 1
        if "slow" not in state:
            state["slow"] = p.clone()
        p.add_(grad, alpha=-group["lr"])
        if state["n"] % 5 == 0:
            state["slow"].add_(p - state["slow"], alpha=0.5)
            p.copy_(state["slow"])


@style
class ByShape(Base):
    def update(self, p, grad, state, group):
        if p.dim() > 1:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(grad, alpha=-group["lr"] / (1 + p.numel() % 3))


@style
class Foreach(Base):
    @torch.no_grad()
    def step(self, closure=None):
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


@style
class ManyStates(Base):
    """Nine of them, from which the update is made in one expression."""

    def update(self, p, grad, state, group):
        power = grad
        for i, name in enumerate("abcdefghi"):
            state[name] = average = state.get(name, torch.zeros_like(p))
            average.lerp_(power, 0.5 ** (i + 1))
            power = average + grad
        whole = sum(state[name] * (i + 1) for i, name in enumerate("abcdefghi"))
        p.add_(whole / (state["a"].abs() + state["i"].abs() + 1), alpha=-group["lr"])


@style
class Chooses(Base):
    """Masks in all ways that PyTorch has."""

    def update(self, p, grad, state, group):
        agree = ((grad > 0) & (p > 0)) | (grad.le(0) & ~(p > 0.0)) | torch.isnan(p)
        masked = torch.where(agree, grad, 0.5 - grad).masked_fill(grad.eq(0), 1.0)
        masked[p >= grad] = 0.25
        p.add_(masked * agree.to(grad.dtype), alpha=-group["lr"])
        ordered = (p > grad).to(p.dtype) + (p < masked) * p - p * (p <= grad)
        p.add_(ordered * (grad >= 0.1), alpha=0.1).add_(p.eq(masked).to(p.dtype))
        p.sub_(torch.where(p != 0, 0.1, p)).mul_(torch.where(p < 0, p, 1.0))
        p.copy_(torch.logical_not(agree).to(p.dtype) + p)


# ---- norms, means, views, other dtypes, other shapes of state


@style
class TrustRatio(Base):
    """Steps as long as the parameter is large, without a look at the norms."""

    def update(self, p, grad, state, group):
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


@style
class Centered(Base):
    """Gradients without their mean, and a mask that grows what it leaves."""

    def update(self, p, grad, state, group):
        if grad.dim() > 1:
            grad = grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
        if not state:
            state["average"] = torch.zeros_like(p)
        state["average"].mul_(0.9).add_(grad)
        mask = (state["average"] * grad > 0).to(grad.dtype)
        mask.div_(mask.mean().clamp_(min=1e-3))
        p.sub_(state["average"] * mask * group["lr"])


@style
class FactoredState(Base):
    """Rows and columns of squares, as in Adafactor, made by their shapes."""

    def update(self, p, grad, state, group):
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


@style
class Covers(Base):
    """As SM3: a momentum and a number for each place along each dimension."""

    def update(self, p, grad, state, group):
        if not state:
            state["momentum"] = torch.zeros_like(p)
            for i in range(p.dim()):
                shape = [n if k == i else 1 for k, n in enumerate(p.shape)]
                state[f"cover_{i}"] = torch.zeros(shape, dtype=p.dtype)
        covers = [state[f"cover_{i}"] for i in range(p.dim())]
        square = covers[0] if covers else grad * 0
        for cover in covers[1:]:
            square = torch.min(square, cover)
        square = square + grad * grad
        for i, cover in enumerate(covers):
            others = [k for k in range(p.dim()) if k != i]
            cover.copy_(square.amax(dim=others, keepdim=True) if others else square)
        state["momentum"].mul_(0.9).add_(grad / (square + 1e-30).sqrt(), alpha=0.1)
        p.add_(state["momentum"], alpha=-group["lr"])


@style
class PointState(Base):
    """Numbers made from nothing, with a dimension and without."""

    def update(self, p, grad, state, group):
        if not state:
            state["one"] = torch.zeros((1,), dtype=grad.dtype)
            state["point"] = torch.full((), 2.0, dtype=grad.dtype)
            state["n"] = torch.tensor(0.0)
        state["n"] += 1
        state["one"].lerp_(grad.abs().mean().view(1), 0.25)
        state["point"].mul_(0.5).add_(grad.abs().sum())
        p.sub_(grad * state["one"], alpha=group["lr"] / float(state["n"]))
        p.div_(1 + state["point"] * 1e-3)


@style
class NewNumber(Base):
    """Another tensor after each step, that is a view."""

    def update(self, p, grad, state, group):
        old = state.get("norm")
        state["norm"] = torch.stack([grad.norm(), p.norm()])[0]
        p.add_(grad if old is None else grad * old, alpha=-group["lr"])


@style
class ByViews(Base):
    """Writes through other shapes of the same memory."""

    def update(self, p, grad, state, group):
        p.mul_(0.99)
        flat, length = p.reshape(-1), p.norm()
        flat.sub_(grad.reshape(-1) / (1 + length), alpha=group["lr"])
        p.add_(p.sign(), alpha=-1e-4)
        grad.reshape(-1).mul_(0.5)


@style
class OtherDtypes(Base):
    """An average in double precision, and a mask."""

    def update(self, p, grad, state, group):
        if not state:
            state["average"] = torch.zeros_like(p, dtype=torch.float64)
            state["was"] = grad > 0
        state["average"].lerp_(grad.double(), 0.1)
        agrees = state["was"] == (grad > 0)
        state["was"] = grad > 0
        p.sub_(torch.where(agrees, state["average"].to(p.dtype), grad), alpha=group["lr"])


@style
class Copies(Base):
    def update(self, p, grad, state, group):
        before = copy.deepcopy(p.data)
        p.add_(torch.sort(grad, dim=-1)[0] if p.dim() else grad, alpha=-group["lr"])
        p.lerp_(before, 0.1)


# ---- branches on numbers of tensors, and errors


@style
class Lamb(Base):
    """Two questions, of which the second is not always asked."""

    def update(self, p, grad, state, group):
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


@style
class CountsLarge(Base):
    """A count in the state, an option and an attribute that depend on numbers."""

    large = 0

    def update(self, p, grad, state, group):
        if grad.norm() > 0.5:
            state["n"] = state.get("n", 0) + 1
            state.setdefault("large", torch.zeros_like(p)).add_(grad)
            self.large += 1
            group["lr"] *= 0.999
        p.add_(grad, alpha=-group["lr"] / (1 + state.get("n", 0) + self.large))


@style
class EndsAtLarge(Base):
    """A loop that ends by a number."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.abs().sum() > 2:
                    break
                while (p.grad.abs() > 0.1).any():
                    p.grad.mul_(0.5)
                p.add_(p.grad, alpha=-group["lr"])


# ---- what is kept, and where


@style
class GroupCounter(Base):
    """Counts in options, with a list that is written in place, and in an attribute."""

    def prepare(self, params):
        self.steps = 0
        for group in self.param_groups:
            group["buffer"] = [None, None]

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)

    def begin(self, group):
        group["n"] = group.get("n", 0) + 1
        group["buffer"][group["n"] % 2] = 1 / group["n"]

    def update(self, p, grad, state, group):
        p.add_(grad, alpha=-group["lr"] * group["buffer"][group["n"] % 2] / self.steps)


@style
class TrainsAndEvaluates(Base):
    """Parameters are other ones to train with than to evaluate with."""

    def begin(self, group):
        if not group.get("training"):
            raise RuntimeError("call train() first")
        group["k"] = group.get("k", 0) + 1

    def _set(self, training):
        for group in self.param_groups:
            if group.get("training", False) != training and "k" in group:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 0.1 if training else -1 / 9)
            group["training"] = training

    def train(self):
        self._set(True)

    def eval(self):
        self._set(False)

    def update(self, p, grad, state, group):
        if "z" not in state:
            state["z"] = torch.clone(p, memory_format=torch.preserve_format)
        p.lerp_(state["z"], 1 / (group["k"] + 1)).add_(grad, alpha=-0.1 * group["lr"])
        state["z"].sub_(grad, alpha=group["lr"])


@style
class CounterOfAll(Base):
    """Counts steps in the state, under a key that is no parameter, as MADGRAD does."""

    first = staticmethod(lambda: torch.tensor([0], dtype=torch.long))

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = self.first()
        loss = super().step(closure)
        self.state["k"] += 1
        return loss

    def update(self, p, grad, state, group):
        scale = group["lr"] * math.sqrt(float(self.state["k"]) + 1)
        if not state:
            state["sum_sq"], state["sum"] = torch.zeros_like(p), torch.zeros_like(p)
            state["x0"] = torch.clone(p).detach()
        state["sum_sq"].addcmul_(grad, grad, value=scale)
        state["sum"].add_(grad, alpha=scale)
        root = state["sum_sq"].sqrt().add_(group["eps"])
        p.mul_(0.9).add_(state["x0"].addcdiv(state["sum"], root, value=-1), alpha=0.1)


@style
class NumberOfAll(CounterOfAll):
    first = staticmethod(lambda: 0)


@style
class SumOfAll(CounterOfAll):
    """A mean of all parameters' gradients, which the next ones see."""

    first = staticmethod(lambda: torch.zeros(1))

    def update(self, p, grad, state, group):
        self.state["k"] += grad.float().mean()
        p.add_(grad, alpha=-group["lr"] * float(1 + self.state["k"].abs()))


@style
class ByPlace(Base):
    """Keeps things of a parameter under its place: in the state, in an attribute, in an option."""

    def prepare(self, params):
        self.kept = [None] * len(params)
        for group in self.param_groups:
            group["rates"] = [0.1 / 2**i for i in range(len(group["params"]))]

    @torch.no_grad()
    def step(self, closure=None):
        places = itertools.count()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                at = next(places)
                if p.grad is not None:
                    entry = self.state[at]
                    if not entry:
                        entry["average"] = torch.zeros_like(p)
                        self.kept[at] = torch.zeros_like(p)
                    self.kept[at].add_(p.grad)
                    entry["average"].lerp_(self.kept[at], 0.1)
                    p.sub_(entry["average"], alpha=group["rates"][i])


@style
class Queue(Base):
    """Past gradients in a queue, in a nested dict of the state."""

    def update(self, p, grad, state, group):
        past = state.setdefault(0, {}).setdefault("past", deque(maxlen=3))
        past.append(grad.clone())
        p.add_(past[0], alpha=-group["lr"])


@style
class Written(Base):
    """Writes into a list, a dict, a tensor and an object that others hold, one of them twice."""

    def prepare(self, params):
        self.history, self.parts = [0], {"inner": [0]}
        self.meter = deque([0])
        for group in self.param_groups:
            group["count"], group["log"] = torch.zeros(()), self.history

    @torch.no_grad()
    def step(self, closure=None):
        self.history.append(len(self.history))
        self.parts["inner"][0] += 1
        self.meter[0] += 1
        return super().step(closure)

    def begin(self, group):
        group["count"] += 1

    def update(self, p, grad, state, group):
        scale = len(group["log"]) + self.parts["inner"][0] + self.meter[0] + float(group["count"])
        p.sub_(grad, alpha=group["lr"] / scale)


@style
class SetOnce(Base):
    """Makes attributes, options and defaults at its first step; a buffer has this step's number."""

    @torch.no_grad()
    def step(self, closure=None):
        if not hasattr(self, "scale"):
            self.scale = 0.5
            self.defaults["n"] = 0
            for group in self.param_groups:
                group["damping"] = 0.1
                group["buffer"] = [[None, None] for _ in range(10)]
        self.defaults["n"] += 1
        return super().step(closure)

    def update(self, p, grad, state, group):
        t = state["t"] = state.get("t", 0) + 1
        buffer = group["buffer"][t % 10]
        if buffer[0] != t:
            buffer[:] = t, 1 / t
        p.sub_(grad + p * group["damping"] * self.scale, alpha=group["lr"] * buffer[1])


# ---- parameters that depend on each other


@style
class OfFirst(Base):
    """The first one's rate, state and count are those of all."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            is_new = bool(params) and "m" not in self.state[params[0]]
            for p in params:
                state = self.state[p]
                if is_new:
                    state["m"] = torch.zeros_like(p)
                state["t"] = state.get("t", 0) + (2 if p is params[0] else 1)
                rate = self.param_groups[0]["lr"] / self.state[params[0]]["t"]
                p.sub_(state["m"].lerp_(p.grad, 0.1), alpha=rate)


@style
class MeanWeight(Base):
    """Pulls a parameter towards the first one's mean."""

    def update(self, p, grad, state, group):
        p.sub_(grad - group["params"][0].mean(), alpha=group["lr"])


@style
class ByMany(Base):
    """By how many parameters, elements and updates there are; those without gradients decay."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.999)
        return super().step(closure)

    def update(self, p, grad, state, group):
        group["updates"] = group.get("updates", 0) + 1
        given = sum(q.grad is not None for q in group["params"])
        p.add_(grad, alpha=-group["lr"] * given / (p.numel() + group["updates"]))


@style
class CouplesAtTimes(Base):
    """In every third step, and in the first two: by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        self.t = vars(self).get("t", 0) + 1
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = 1.0
        if self.t < 3 or self.t % 3 == 0:
            norm = 1 + torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm, alpha=0.01)


# ---- what a parameter is


class MyParameter(torch.nn.Parameter):
    pass


class Marks(Base):
    """Ten times the rate for marked parameters."""

    def update(self, p, grad, state, group):
        p.add_(grad, alpha=-group["lr"] * (10 if self.mark(p) else 1))


def marks(name, mark, prepare=Marks.prepare):
    STYLES[name] = type(name, (Marks,), {"mark": mark, "prepare": prepare})


def note_ids(self, params):
    self.ids = {id(p) for p in params[::2]}
    self.texts = {f"{id(p)}" for p in params[1::2]}
    self.names = dict.fromkeys(params[:3], 1)


marks("ByClass", lambda self, p: type(p) is MyParameter or isinstance(p, MyParameter))
marks("ByAttribute", lambda self, p: getattr(p, "special", False) or "other" in vars(p))
marks("ByHook", lambda self, p: bool(p._backward_hooks))
marks("ById", lambda self, p: id(p) in self.ids, note_ids)
marks("ByTextOfId", lambda self, p: f"{id(p)}" in self.texts, note_ids)
marks("ByKey", lambda self, p: p in self.names, note_ids)
marks("ByKind", lambda self, p: p.is_leaf and p.requires_grad and p.ndim == 2)


#: Classes that make their state where the parameters are, for tests on other devices.
ON_ANY_DEVICE = [
    *(AdaBelief, SignOfAverage, WritesGradient, TensorCounter, Replaces, Signs, EveryFifth),
    *(ByShape, Foreach, ManyStates, TrustRatio, Centered, ByViews, Copies),
    *(GroupCounter, TrainsAndEvaluates, CounterOfAll, NumberOfAll),
]
