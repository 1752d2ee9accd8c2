# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers as users write them, for the tests of register()."""

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


# What register() is not for


class GlobalNorm(Tensors):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        for p in params:
            if p.grad is not None:
                p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


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


class Noisy(Tensors):
    """Draws random numbers, so that the order of the parameters matters."""

    def update(self, group, p, state):
        p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


class Listed(Tensors):
    """Knows its parameters from elsewhere than param_groups."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        self.all = [p for group in self.param_groups for p in group["params"]]


class Searching(Tensors):
    """Evaluates the loss itself."""

    def step(self, closure):
        return closure()
