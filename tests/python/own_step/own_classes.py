# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers as users write them: those that keep the promise of register(), and others."""

import abc

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


class Drops(Tensors):
    """Has used its gradients up."""

    def update(self, group, p, state):
        super().update(group, p, state)
        p.grad = None


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


class Abstract(abc.ABC, Tensors):
    """A class whose first base has no attributes."""


class Searching(Tensors):
    """Evaluates the loss itself."""

    def step(self, closure):
        return closure()


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
