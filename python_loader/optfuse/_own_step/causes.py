# SPDX-License-Identifier: BSD-3-Clause
"""Names the cause for which parameters are not independent of each other. A trial sees that the
update of one is another one when it is stepped by itself; here the step is taken again, each time
with something else changed about the other parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._own_step.settings import Change
from optfuse._own_step.twin import attributes_of, own_attributes
from optfuse._trials.compare import deep_copy, difference

Take = Callable[[Optimizer, int], None]  # a step() after these seeds
# Changes something of the other parameters of an optimizer; with the one that is looked at.
Act = Callable[[list[Tensor], Optimizer, Tensor | None], None]
ROUNDS = 2  # what a first step makes is read by the next one


class Coupled(Exception):
    """Parameters are not independent, as a trial saw. target: the place of a parameter, or a change
    of a setting whose group is a place among the copy's groups."""

    def __init__(self, why: str, target: int | Change | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.target = target


def copied(optimizer: Optimizer) -> Optimizer:
    """With copies of its parameters, gradients and state."""
    made = type(optimizer).__new__(type(optimizer))
    known = {id(optimizer): made}  # by its own methods
    made.__dict__ = deep_copy(optimizer.__dict__, "a trial's optimizer", known)
    return made


def name_cause(before: Optimizer, take: Take, seed: int, target: int | Change) -> str | None:
    """before: as the step with this seed found it, which is left as it is."""
    if isinstance(target, int) and parameters_of(before)[target].grad is None:
        return "updates of parameters without a gradient"
    now = before
    for _ in range(ROUNDS):
        cause = _cause(_changes(now), now, take, seed, target)
        if cause is not None:
            return cause
        grads = [p.grad for p in parameters_of(now)]
        now = copied(now)
        take(now, seed)
        for p, grad in zip(parameters_of(now), grads, strict=True):
            p.grad = None if grad is None else grad.clone()
    return _cause(_OF_NUMBERS, before, take, seed, target)


def _cause(
    changes: Iterable[tuple[str, Act, int]],
    before: Optimizer,
    take: Take,
    seed: int,
    target: int | Change,
) -> str | None:
    """That of the first change by which the target becomes something else."""

    def outcome(act: Act, seed: int) -> Any:
        trial = copied(before)
        params = parameters_of(trial)
        own = params[target] if isinstance(target, int) else None
        act([p for p in params if p is not own], trial, own)
        take(trial, seed)
        if own is not None:
            return own.detach(), trial.state.get(own)
        if target.group is None:
            return attributes_of(trial).get(target.name)
        return trial.param_groups[target.group].get(target.name)

    stock = outcome(_nothing, seed)
    for cause, act, other_seed in changes:
        try:
            if difference("", outcome(act, seed + other_seed), stock) is not None:
                return _worded(cause, target)
        except KeyError:
            if act in (_forget, _lend):
                return _worded(cause, target)
        except Exception:
            continue  # it says nothing
    return None


def _worded(cause: str, target: int | Change) -> str:
    if isinstance(target, int):
        return cause
    return cause.replace("other parameters", "parameters").replace("another", "a")


def _changes(optimizer: Optimizer) -> Iterator[tuple[str, Act, int]]:
    yield "random numbers of its own, or a clock, in step()", _nothing, 0
    yield "random numbers in step()", _nothing, 1
    for name, value in own_attributes(optimizer.__dict__).items():
        if _has_positions(value, len(parameters_of(optimizer))):
            yield f"an attribute read by position ({name})", _reversing(name), 0
    yield "the state of other parameters", _change_state, 0
    yield "keys of another parameter's state", _lend, 0
    yield "keys of another parameter's state", _forget, 0
    yield "the values of other parameters", _change_values, 0
    yield "the gradients of other parameters", _scale_gradients, 0
    yield "the gradients of other parameters", _replace_gradients, 0


def _nothing(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    pass


def _has_positions(value: Any, n: int) -> bool:
    """Whether it may have a place for each of n parameters, or for more of which a trial has no
    copies."""
    by_number = isinstance(value, dict) and all(type(key) is int for key in value)
    return (by_number or isinstance(value, list | tuple | deque)) and len(value) >= max(2, n)


def _reversing(name: str) -> Act:
    def act(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
        value = optimizer.__dict__[name]
        if isinstance(value, dict):
            changed: Any = dict(zip(value, reversed(value.values()), strict=True))
        else:
            changed = type(value)(reversed(value))
        optimizer.__dict__[name] = changed

    return act


def _forget(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    for p in others:
        optimizer.state.pop(p, None)


def _lend(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    """Gives those that have no state one with the same keys."""
    entry = {} if own is None else optimizer.state.get(own) or {}
    for p in others:
        if not optimizer.state.get(p):
            for key, value in entry.items():
                is_like = isinstance(value, Tensor) and own is not None and value.shape == own.shape
                optimizer.state[p][key] = torch.zeros_like(p) if is_like else value


def _change_state(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    for p in others:
        entry = optimizer.state.get(p) or {}
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                value.mul_(1.5).add_(0.01)
            elif isinstance(value, Tensor | int | float):
                entry[key] = value + 1


def _scale_gradients(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    for p in others:
        if p.grad is not None:
            p.grad.mul_(-1.5)


def _replace_gradients(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    for p in others:
        if p.grad is not None:
            p.grad.fill_(1)


def _change_values(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    with torch.no_grad():
        for p in others:
            p.mul_(1.5).add_(0.01)


def _drop_gradients(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    for p in others:
        p.grad = None


def _reverse_order(others: list[Tensor], optimizer: Optimizer, own: Tensor | None) -> None:
    for group in optimizer.param_groups:
        group["params"].reverse()


_OF_NUMBERS = (
    ("how many parameters have a gradient", _drop_gradients, 0),
    ("the order of the parameters", _reverse_order, 0),
)
