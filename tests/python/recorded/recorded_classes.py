# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels, one for each way in which a step() computes."""

import contextlib

import torch
from torch.optim import Optimizer

KINDS: dict[str, type[Optimizer]] = {}


def kind(cls):
    KINDS[cls.__name__] = cls
    return cls


class Base(Optimizer):
    """one(p, group, its state) for each parameter"""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.n = 0
        self.seen = []
        self.arrays = {}

    def __getstate__(self):
        return self.__dict__.copy()  # copies have all

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.n += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(m=torch.zeros_like(p), v=torch.zeros_like(p), t=0)
                    state["t"] += 1
                    self.one(p, group, state)
        return loss


@kind
class Elementwise(Base):
    def one(self, p, group, state):
        state["m"].lerp_(p.grad, 0.1)
        state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
        root = (state["v"] / (1 - 0.9 ** state["t"])).sqrt_().add_(1e-8)
        p.addcdiv_(state["m"], root, value=-group["lr"])


@kind
class WithOut(Base):
    """out= of the results' form, of another one, an operand, and a result of before."""

    def one(self, p, group, state):
        grad, m, v = p.grad, state["m"], state["v"]
        torch.mul(m, 0.9, out=m)
        torch.add(m, grad, alpha=0.1, out=m)
        torch.maximum(v, grad.abs(), out=v)
        update = torch.empty_like(p)
        torch.div(m, v + 0.1, out=update)
        torch.div(torch.full((), 0.5, dtype=p.dtype), update.abs() + 1, out=v)
        torch.lerp(v, m, 0.25, out=v)
        torch.clamp(update, -1.5, 1.5, out=update)
        torch.neg(update, out=update)
        torch.gt(update, m, out=(mask := torch.empty_like(p, dtype=torch.bool)))
        torch.add(update, mask, out=update)
        torch.sqrt(m.abs(), out=(wide := torch.empty_like(p, dtype=torch.float64)))
        torch.mul(wide, 2, out=wide)
        small = torch.zeros(2, dtype=p.dtype)
        torch.add(small[:1].sum(), 1, out=small)  # becomes one without dimensions, with a warning
        torch.add(small, 1, out=(other := torch.empty((), dtype=p.dtype)))
        torch.sub(p, update + other * wide.to(p.dtype), alpha=group["lr"], out=p)
        flat = m.flatten()
        flat[1:].copy_(torch.add(flat[:-1], 0.5, out=torch.empty_like(flat[1:])))
        self.seen.append((update._version, v._version, p._version, small.dim()))


@kind
class WideStrides(Base):
    """Dimensions of one element, whose strides are arbitrary: results have those of stock."""

    def one(self, p, group, state):
        x = p.flatten().as_strided((1, p.numel()), (7 * p.numel() + 1, 1))
        y = x * 2 + 1
        z = torch.maximum(y, x)
        self.seen.append((y.stride(), z.stride(), (x.abs() > 1).stride(), (z * x.sum()).stride()))
        p.sub_(z.view_as(p), alpha=0.01)


@kind
class Masks(Base):
    """Booleans that only exist between operators, and one that stays."""

    def one(self, p, group, state):
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        mask = ((state["m"] * p.grad > 0) | (p > 1)).to(p.dtype)
        state["kept"] = p.grad.abs() > 0.5
        update = torch.where(state["kept"], p.grad, state["m"] * mask).clamp(-0.5, 0.5)
        p.add_(update.masked_fill(p < -2, 0.0), alpha=-group["lr"])


@kind
class Norms(Base):
    """Each update is scaled by numbers that tensors have."""

    def one(self, p, group, state):
        update = p.grad / (p.grad.norm() + 1e-6)
        trust = torch.where(p.norm() > 0, p.norm() / update.norm(), 1.0)
        p.add_(update * trust.clamp(max=1), alpha=-group["lr"])


@kind
class Coupled(Base):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            total = torch.stack(torch._foreach_norm(grads)).norm()
            torch._foreach_mul_(grads, 1 / (total + 1e-6))
            super().step()
        return loss

    def one(self, p, group, state):
        p.add_(p.grad, alpha=-group["lr"])


@kind
class Lists(Base):
    """All parameters at once."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(m=torch.zeros_like(p), t=torch.tensor(0.0))
            means = [self.state[p]["m"] for p in params]
            times = [self.state[p]["t"] for p in params]
            torch._foreach_add_(times, 1)
            torch._foreach_lerp_(means, grads, 0.2)
            roots = torch._foreach_sqrt(torch._foreach_abs(means))
            torch._foreach_add_(roots, 1e-3)
            torch._foreach_div_(roots, [1 + t.item() for t in times])
            torch._foreach_addcdiv_(params, means, roots, -group["lr"] * 0.01)


@kind
class NumbersFirst(Base):
    """An operator on lists whose first operand is none."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                rates = torch._foreach_pow(0.5, torch._foreach_abs([p.grad for p in params]))
                torch._foreach_addcmul_(params, [p.grad for p in params], rates, -group["lr"])


@kind
class Looks(Base):
    """Python decides by numbers of tensors, and keeps them."""

    def one(self, p, group, state):
        state["m"].mul_(0.5).add_(p.grad)
        size = state["m"].abs().max()
        if size > 1:
            state["m"].div_(size)
        self.seen.append((state["m"].sum().item(), state["m"].numpy().max(), p.tolist()))
        p.sub_(state["m"], alpha=group["lr"])


@kind
class Addresses(Base):
    """Memory that others write between the operators."""

    def one(self, p, group, state):
        array = state["m"].add_(p.grad).numpy()
        array *= 0.5
        state["v"].copy_(state["m"])
        array += 0.25
        p.data.add_(state["v"], alpha=-group["lr"])
        p.data = p.data - state["m"] * 0.01


@kind
class KeepsAnAddress(Base):
    """NumPy's view of its state, step after step."""

    def one(self, p, group, state):
        array = self.arrays[p] if p in self.arrays else state["m"].numpy()
        self.arrays[p] = array
        state["m"].mul_(0.5).add_(p.grad)
        array += 0.25
        p.sub_(state["m"], alpha=group["lr"])


@kind
class Draws(Base):
    def one(self, p, group, state):
        noise = torch.randn_like(p) * 0.01
        mask = torch.empty_like(p).bernoulli_(0.9)
        p.add_((p.grad + noise) * mask, alpha=-group["lr"])


@kind
class Views(Base):
    """Tensors that share some of their elements."""

    def one(self, p, group, state):
        flat, ahead = p.view(-1), state["m"].view(-1)
        ahead[1:].add_(p.grad.reshape(-1)[:-1], alpha=0.5)
        ahead[:1].copy_(p.grad.reshape(-1)[:1])
        flat[::2].sub_(ahead[::2], alpha=group["lr"])
        flat[1::2].sub_(ahead[1::2] * 0.5, alpha=group["lr"])


@kind
class Gathers(Base):
    """Gradients of steps before."""

    def one(self, p, group, state):
        state.setdefault("queue", []).append(p.grad.clone())
        oldest = state["queue"].pop(0) if len(state["queue"]) > 2 else p.grad
        p.add_(oldest * 0.5 + p.grad * 0.5, alpha=-group["lr"])


@kind
class OldStyle(Base):
    """Without no_grad(), by .data."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])
                    p.data.mul_(0.999)


@kind
class Inner(Base):
    """Steps another optimizer, of a class with kernels."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.inner = torch.optim.Adam([p for g in self.param_groups for p in g["params"]], lr=0.01)

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for g in self.param_groups for p in g["params"]]
        self.inner.step()
        for p, old in zip((p for g in self.param_groups for p in g["params"]), before, strict=True):
            p.lerp_(old, 0.5)


@kind
class Suppresses(Base):
    """Goes on after an error."""

    def one(self, p, group, state):
        state["m"].add_(p.grad)
        with contextlib.suppress(RuntimeError):
            state["m"].add_(torch.ones(7, 7, 7))
        with contextlib.suppress(RuntimeError):
            state["m"].add_(1).fill_(torch.ones_like(p))
        p.sub_(state["m"], alpha=group["lr"])


@kind
class Settings(Base):
    """Operators whose numbers depend on what is set meanwhile."""

    def one(self, p, group, state):
        tiny = p.grad * 1e-39
        torch.set_flush_denormal(True)
        flushed = p.grad * 1e-39
        torch.set_flush_denormal(False)
        p.sub_(p.grad, alpha=group["lr"])
        state.update(tiny=tiny * 1, flushed=flushed * 1)


@kind
class Capturable(Base):
    """Counters and the rate on the GPU, of which no number is looked at."""

    def one(self, p, group, state):
        if "step" not in state:
            state["step"] = torch.zeros((), device=p.device)
        state["step"] += 1
        state["m"].lerp_(p.grad, 0.1)
        correction = 1 - torch.pow(0.9, state["step"])
        p.addcdiv_(state["m"] / correction, p.grad.square().sqrt_().add_(1e-3), value=-group["lr"])


@kind
class CapturableLists(Base):
    def step(self, closure=None):
        with torch.no_grad():
            params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
            for device in {p.device for p in params}:
                self.some([p for p in params if p.device == device])

    def some(self, params):
        for p in params:
            if not self.state[p]:
                self.state[p].update(m=torch.zeros_like(p), t=torch.zeros((), device=p.device))
        grads, steps = [p.grad for p in params], [self.state[p]["t"] for p in params]
        means = [self.state[p]["m"] for p in params]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 0.1)
        roots = torch._foreach_add(torch._foreach_abs(means), 1.0)
        torch._foreach_div_(roots, torch._foreach_sqrt(steps))
        torch._foreach_div_(roots, [3.0 + i for i in range(len(params))])
        torch._foreach_maximum_(roots, torch._foreach_abs(grads))
        torch._foreach_addcdiv_(params, means, roots, -0.1)
