# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers as users write them, for the tests of register()."""

import abc
import random

import torch
from torch.optim import Optimizer


class Tensors(Optimizer):
    """Momentum and a counter, all of its state in tensors that are written in place."""

    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, self.state[p])
        return loss

    def update(self, group, p, state):
        if not state:
            state["t"] = torch.zeros(())
            state["m"] = torch.zeros_like(p)
        state["t"] += 1
        state["m"].mul_(group["beta"]).add_(p.grad)
        p.add_(state["m"].sign() / state["t"].sqrt() * -group["lr"])


class Numbers(Tensors):
    """Its counter is a Python number."""

    def update(self, group, p, state):
        state["t"] = state.get("t", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / state["t"])


class NewTensors(Tensors):
    """Puts another tensor into its state at each step."""

    def update(self, group, p, state):
        state["m"] = group["beta"] * state.get("m", torch.zeros_like(p)) + p.grad
        p.sub_(group["lr"] * state["m"])


class InDicts(Tensors):
    """Has its state in dicts of an entry, and a method of its own in an attribute."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.chain = self.of_part

    def update(self, group, p, state):
        self.chain(group, p, state.setdefault(0, {}))

    def of_part(self, group, p, state):
        state.setdefault("m", torch.zeros_like(p)).mul_(group["beta"]).add_(p.grad)
        p.sub_(state["m"], alpha=group["lr"])


class Stateless(Tensors):
    """Has no state, and changes the gradient, as some optimizers do."""

    def update(self, group, p, state):
        p.grad.add_(p, alpha=0.1)
        p.sub_(group["lr"] * p.grad.sign())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, None)


class Flaky(Tensors):
    """Raises when a gradient is not finite."""

    def update(self, group, p, state):
        if not p.grad.isfinite().all():
            raise ValueError("a gradient is not finite")
        super().update(group, p, state)


class Interrupted(Tensors):
    """Ctrl-C comes in the middle of its third step."""

    def update(self, group, p, state):
        super().update(group, p, state)
        if state["t"] == 3:
            raise KeyboardInterrupt


# Options and attributes that change with a step, alike for all parameters


class GroupCounter(Tensors):
    """Counts steps in the group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / group["t"] * p.grad)


class Counter(Tensors):
    """Counts steps in an attribute."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        super().step(closure)


class CounterInState(Tensors):
    """Counts steps in the state, under a key that is no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])
        super().step(closure)
        self.state["k"] += 1

    def update(self, group, p, state):
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(group["beta"]).add_(p.grad)
        p.sub_(group["lr"] / (1 + self.state["k"].item()) * state["m"])


class SetOnce(Tensors):
    """Makes attributes and options at its first step."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.ready = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.ready:
            self.ready, self.scale = True, 0.5
            for group in self.param_groups:
                group["damping"] = 0.1
        super().step(closure)

    def update(self, group, p, state):
        p.grad.add_(p, alpha=group["damping"] * self.scale)
        super().update(group, p, state)


class NestedCounter(Tensors):
    """Writes into a list and a dict of its options."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["log"] = {"steps": [0]}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            steps = group["log"]["steps"]
            steps.append(steps[-1] + 1)
        super().step(closure)

    def update(self, group, p, state):
        p.sub_(p.grad, alpha=group["lr"] / group["log"]["steps"][-1])


class Averaging(Tensors):
    """Has modes to train and to evaluate in, as schedule-free optimizers."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(k=0, training=False)

    def _enter(self, training, weight):
        for group in self.param_groups:
            if group["training"] is not training:
                group["training"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def train(self):
        self._enter(True, 0.1)

    @torch.no_grad()
    def eval(self):
        self._enter(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        if not self.param_groups[0]["training"]:
            raise RuntimeError("call train() first")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, 1 / (group["k"] + 1))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


# Classes that register() is not for


class GlobalNorm(Tensors):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        for p in params:
            if p.grad is not None:
                p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


class RateOfFirst(Tensors):
    """The first group's rate is that of all, until a scheduler changes one of them."""

    def update(self, group, p, state):
        p.sub_(self.param_groups[0]["lr"] * p.grad)


class Noisy(Tensors):
    """Draws random numbers, so that the order of the parameters matters."""

    def update(self, group, p, state):
        p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


DRAWS = random.Random(0)


class Drawing(Tensors):
    """Draws random numbers from a generator of its own."""

    def update(self, group, p, state):
        p.sub_(group["lr"] * DRAWS.random() * p.grad)


class ByPosition(Tensors):
    """Reads an attribute by a parameter's position."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.rates = [lr / 2**i for i in range(len(self.param_groups[0]["params"]))]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(self.rates[i] * p.grad)


class OptionsInAttribute(Tensors):
    """Looks like ByPosition: its attribute has two items, and the norm is that of all gradients."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.bounds = {"norm": 1e-6, "scale": 0.5, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        for p in params:
            if p.grad is not None:
                p.sub_(p.grad * self.bounds["scale"] / (norm + self.bounds["norm"]))


class KeysOfFirst(Tensors):
    """Makes the state of all parameters where that of the first has none."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            is_new = bool(params) and "m" not in self.state[params[0]]
            for p in params:
                if is_new:
                    self.state[p]["m"] = torch.zeros_like(p)
                p.sub_(self.state[p]["m"].lerp_(p.grad, 0.1), alpha=group["lr"])


class CounterOfFirst(Tensors):
    """Counts the steps of all parameters in the state of the first one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                state = self.state[p]
                state["t"] = state.get("t", 0) + (2 if p is params[0] else 1)
                p.sub_(p.grad, alpha=group["lr"] / self.state[params[0]]["t"])


class MeanWeight(Tensors):
    """Pulls a parameter towards the first one's mean."""

    def update(self, group, p, state):
        p.sub_(p.grad - group["params"][0].mean(), alpha=group["lr"])


class Listed(Tensors):
    """Knows its parameters from elsewhere than param_groups."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]


class Abstract(abc.ABC, Tensors):
    """A class whose first base has no attributes."""


class Searching(Tensors):
    """Evaluates the loss itself."""

    def step(self, closure):
        return closure()


class Coupled(Tensors):
    """Divides some gradients by their common norm, at some steps."""

    def coupled(self, gradients, step):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        step = 1 + int(max([self.state[p].get("t", 0) for p in params], default=0))
        for gradient in self.coupled([p.grad for p in params], step):
            gradient.div_(2)
        super().step(closure)


class ClipsAbove(Coupled):
    """Above a threshold."""

    def coupled(self, gradients, step):
        return gradients if sum(g.float().norm() for g in gradients) > 1000 else []


class EveryFifth(Coupled):
    """In every fifth step, by a mean of all."""

    k = 5

    def coupled(self, gradients, step):
        is_up = sum(g.float().sum() for g in gradients) > 0
        return gradients if step % self.k == 0 and is_up else []


class EveryTwentieth(EveryFifth):
    """As rarely as can be found."""

    k = 20


class CouplesLarge(Coupled):
    """Only large parameters."""

    def coupled(self, gradients, step):
        large = [g for g in gradients if g.numel() > 4096]
        return large if sum(g.float().sum() for g in large) > 0 else []


class CouplesHalves(Coupled):
    """Only those of one dtype."""

    def coupled(self, gradients, step):
        halves = [g for g in gradients if g.dtype is torch.bfloat16]
        return halves if sum(g.float().sum() for g in halves) > 0 else []


class Skips(Tensors):
    """Skips a step in which a gradient is not finite."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        if all(p.grad.isfinite().all() for p in params if p.grad is not None):
            super().step(closure)


class Decaying(Tensors):
    """Changes parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        super().step(closure)


class CountsUpdates(Tensors):
    """Counts updates, not steps."""

    def update(self, group, p, state):
        group["updates"] = group.get("updates", 0) + 1
        super().update(group, p, state)


class CountsSteps(Tensors):
    """Counts steps in which a parameter has a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["t"] = group.get("t", 0) + 1
        super().step(closure)


class WarnsOnce(Tensors):
    """Sets an attribute at the first gradient."""

    warned = False

    def update(self, group, p, state):
        self.warned = True
        super().update(group, p, state)


class Cached(Tensors):
    """Keeps numbers for all parameters in a nested option, in place."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["buffer"] = [[None, None] for _ in range(10)]

    def update(self, group, p, state):
        t = state["t"] = state.get("t", 0) + 1
        buffer = group["buffer"][t % 10]
        if buffer[0] != t:
            buffer[:] = t, 1 / t
        p.sub_(p.grad, alpha=group["lr"] * buffer[1])


# Objects that a trial must not reach


class Wrapper(Optimizer):
    """Steps another optimizer, and pulls its parameters back every second time."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {"k": 2})
        self.inner, self.t = inner, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        self.t += 1
        if self.t % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.lerp_(p, 0.5)
                    p.copy_(q)


class Holding(Tensors):
    """Holds what it is given, and steps it if it can."""

    def __init__(self, params, held=None, lr=1e-2):
        super().__init__(params, lr)
        self.held = held(self) if held else None


REAL = []  # what Reaching finds without its optimizer's help


class Reaching(Tensors):
    """Does something to what is in REAL."""

    def __init__(self, params, act=None):
        super().__init__(params)
        self.act = act

    @torch.no_grad()
    def step(self, closure=None):
        for real in REAL:
            self.act(real)
        super().step(closure)
