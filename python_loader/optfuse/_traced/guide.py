# SPDX-License-Identifier: BSD-3-Clause
"""One run of a class's step() on stand-ins for one parameter, its gradient and its state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import optfuse._traced.operators  # noqa: F401  the handlers
from optfuse._own_step.twin import Entry, Group, Twin
from optfuse._traced.program import MOST_STATE, STATE, Program, make_program
from optfuse._traced.standin import Standin, Tape, Untraceable


@dataclass(frozen=True)
class Place:
    """In a state entry: where a tensor of the parameter's shape is."""

    index: int  # among the state tensors; -1: not known yet


@dataclass(frozen=True)
class Recorded:
    """What a step() does to a parameter, to its state entry and to the optimizer."""

    program: Program
    entry: Entry | None  # after it, with a Place for each tensor of the parameter's shape
    names: tuple[str, ...]  # the keys of those tensors, in the order of the registers
    options: Group
    attributes: dict[str, Any]
    looked_at_shape: bool


def like(entry: Entry | None, param: Tensor, names: list[str]) -> Entry | None:
    """A state entry for record(): with places for tensors of the parameter's shape, and copies
    of all else."""
    if entry is None:
        return None
    return {key: _copied(key, value, param, names) for key, value in entry.items()}


def _copied(key: Any, value: Any, param: Tensor, names: list[str]) -> Any:
    if isinstance(value, Tensor):
        if key in names or (param.dim() > 0 and value.shape == param.shape):
            return Place(names.index(key) if key in names else -1)
        if value.dim() > 0 or value.device.type != "cpu":
            raise Untraceable(f"state[{key!r}] has another shape or device than its parameter")
        return value.detach().clone()
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if any(isinstance(x, Tensor) for x in _items(value)):
        raise Untraceable(f"state[{key!r}] is a {type(value).__name__} that holds tensors")
    return copy.deepcopy(value)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for item in value.values() for x in (item, *_items(item))]
    if isinstance(value, list | tuple | set):
        return [x for item in value for x in (item, *_items(item))]
    return [value]


def record(
    step_on: Twin,
    attributes: dict[str, Any],
    options: Group,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    entry: Entry | None,
    names: list[str],
) -> Recorded:
    """entry: as like() makes it. names: the state tensors that are known, in the order of their
    registers. What step() writes into attributes and options it does to those given. Raises
    Untraceable if a program can't do what step() does."""
    tape = Tape()
    param, grad = tape.new(shape, dtype), tape.new(shape, dtype)
    state = [tape.new(shape, dtype) for _ in range(MOST_STATE)]
    param.requires_grad_(True)
    param.grad = grad
    order = list(names)
    given = None if entry is None else _with_standins(entry, state, order)
    try:
        made, after, changed = step_on.step_alone(attributes, options, param, given)
    except Untraceable:
        raise
    except Exception as error:
        raise tape.why or Untraceable(
            f"its step() raises {type(error).__name__} without data: {error}"
        ) from error
    if tape.why is not None:  # step() has caught it
        raise tape.why
    if param.grad is not grad:
        raise Untraceable("it puts another gradient into the place of the one that there is")
    changed.pop("params")
    _look_at_survivors(tape, param, grad, made, state)
    found = None if made is None else _with_places(made, tape, state, order)
    fresh = [name in (found or {}) and name not in (entry or {}) for name in order]
    unset = frozenset(STATE + i for i, is_fresh in enumerate(fresh) if is_fresh)
    program = make_program(tape.lines, unset, len(order))
    return Recorded(program, found, tuple(order), changed, after, tape.looked_at_shape)


def _with_standins(entry: Entry, state: list[Standin], order: list[str]) -> Entry:
    """Appends to the order what is not in it yet."""
    given = dict(entry)
    for key, value in entry.items():
        if not isinstance(value, Place):
            continue
        if key not in order:
            _append(order, key)
        given[key] = state[order.index(key)]
    return given


def _append(order: list[str], key: str) -> None:
    if len(order) == MOST_STATE:
        raise Untraceable(f"it keeps more than {MOST_STATE} state tensors for a parameter")
    order.append(key)


def _look_at_survivors(
    tape: Tape, param: Standin, grad: Standin, entry: Entry | None, state: list[Standin]
) -> None:
    known = {id(param), id(grad), *map(id, state), *map(id, (entry or {}).values())}
    for reference in tape.alive:
        alive = reference()
        if alive is not None and id(alive) not in known:
            raise Untraceable("it keeps a tensor of this step somewhere else than in its state")


def _with_places(entry: Entry, tape: Tape, state: list[Standin], order: list[str]) -> Entry:
    """The entry after the step. What was put into it is copied to the register of its place."""
    found = {}
    taken = {0, 1}  # registers
    for key, value in entry.items():
        if not isinstance(value, Standin):
            if any(isinstance(x, Standin) for x in _items(value)):
                raise Untraceable(f"state[{key!r}] is a {type(value).__name__} that holds tensors")
            found[key] = value
            continue
        if value.dtype != state[0].dtype or Tensor.size(value) != Tensor.size(state[0]):
            raise Untraceable(f"state[{key!r}] has another dtype or shape than its parameter")
        if key not in order:
            _append(order, key)
        own = state[order.index(key)]
        is_other = value.register != own.register and value.register < STATE + MOST_STATE
        if value.register in taken or is_other:
            raise Untraceable(f"state[{key!r}] is the tensor of another place, too")
        taken.add(value.register)
        if value.register != own.register:
            tape.write("copy", own, value)
        found[key] = Place(order.index(key))
    return found
