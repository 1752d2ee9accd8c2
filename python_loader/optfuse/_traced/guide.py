# SPDX-License-Identifier: BSD-3-Clause
"""One run of a class's step() on stand-ins for one parameter, its gradient and its state."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import optfuse._traced.foreach  # noqa: F401  and with it all handlers
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._own_step.twin import Entry, Group, Twin
from optfuse._traced.calls import Making, Numbers
from optfuse._traced.parts import Forms, Parts, make_parts
from optfuse._traced.program import (
    MOST_STATE,
    STATE,
    TEMPORARY,
    Program,
    check_fits_gpu,
    make_program,
    reads_a_number,
)
from optfuse._traced.standin import (
    CPU,
    MOST_OUTCOMES,
    POINT,
    Branch,
    Call,
    ForeignTensor,
    Form,
    Made,
    Standin,
    Tape,
    Untraceable,
    own_attributes,
    requires_grad_of,
)
from optfuse._trials.compare import difference


@dataclass(frozen=True)
class Place:
    """In a state entry: where a tensor is."""

    index: int  # among the state tensors; -1: not known yet
    dtype: torch.dtype | None = None  # None: the parameter's
    form: Form | None = None  # None: the parameter's


Inputs = tuple[dict[str, Any], Group, "Entry | None"]


@dataclass(frozen=True)
class Recorded:
    """The effects of a step() on a parameter, on its state entry and on the optimizer."""

    program: Program | Parts
    entry: Entry | None  # after it, with a Place for each tensor that is no counter
    names: tuple[str, ...]  # the keys of those tensors, in the order of the registers
    options: Group
    attributes: dict[str, Any]
    looked_at_shape: bool
    looked_at_requires_grad: bool

    def shaped(self) -> set[str]:
        """The names of state tensors that have another shape than the parameter."""
        entry = self.entry or {}
        return {name for name, x in entry.items() if isinstance(x, Place) and x.form is not None}


def place_of(
    key: Any, value: Tensor, param: Tensor, names: list[str], shaped: Container[str]
) -> Place | None:
    """The place of a tensor in a state entry. names: the state tensors that are known; shaped:
    those among them that may have another shape than the parameter. None: a counter, as tensors
    without dimensions are, but for those of parameters without dimensions and for shaped ones; or a
    tensor of which nothing is known."""
    is_known = key in names and (key in shaped or value.dim() > 0 or param.dim() == 0)
    if not is_known and (value.shape != param.shape or param.dim() == 0):
        return None
    dtype = None if value.dtype == param.dtype else value.dtype
    is_other = key in shaped and value.shape != param.shape
    form = (tuple(value.shape), value.stride()) if is_other else None
    return Place(names.index(key) if is_known else -1, dtype, form)


def like(
    entry: Entry | None, param: Tensor, names: list[str], shaped: Container[str] = ()
) -> Entry | None:
    """A state entry for record(): with places for tensors that have one, and copies of all else.
    names, shaped: place_of()."""
    if entry is None:
        return None
    return {key: _copied(key, value, param, names, shaped) for key, value in entry.items()}


def _copied(key: Any, value: Any, param: Tensor, names: list[str], shaped: Container[str]) -> Any:
    if isinstance(value, Tensor):
        place = place_of(key, value, param, names, shaped)
        if place is not None:
            is_alike = type(value) is Tensor or (is_dtensor(value) and is_dtensor(param))
            if not is_alike or value.device != param.device:
                what = f"{type(value).__name__} on device {value.device}"
                raise Untraceable(f"state[{key!r}] is a {what}, not a tensor on {param.device}")
            return place
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
    if isinstance(value, list | tuple | set | deque):
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
    strides: tuple[int, ...] | None = None,
    made: Made = "none",
    device: torch.device = CPU,
    again: Callable[[], Inputs] | None = None,
) -> Recorded:
    """entry: as like() makes it. names: the state tensors that are known, in the order of their
    registers. strides: of a parameter that is not contiguous. made: which of the tensors that
    step() makes from nothing are traced. What step() writes into attributes
    and options it does to those given. again: gives attributes, options and entry once more, for
    another run where step() branches on a value; without it that is refused. Raises Untraceable if
    a program can't do what step() does."""
    follows = again is not None and device == CPU
    of_tape = shape, dtype, strides, device
    runs = [_run((attributes, options, entry), Tape(*of_tape), follows, names, made, step_on)]
    while (decisions := _next_decisions(runs[-1].tape.taken)) and again is not None:
        if len(runs) == MOST_OUTCOMES:
            raise Untraceable(f"its branches on values have more than {MOST_OUTCOMES} outcomes")
        tape, known = Tape(*of_tape), len(decisions) - 1
        begins = (*runs[-1].tape.begins, *known * [0])[:known]
        tape.decisions, tape.begins = decisions, (*begins, max(run.tape.n for run in runs))
        runs.append(_run(again(), tape, True, runs[0].order, made, step_on))
        _must_agree(runs[0], runs[-1])
    return _joined(runs)


@dataclass(frozen=True)
class _Run:
    """One run of step(), by one outcome of its branches on values."""

    tape: Tape
    order: list[str]
    fresh: frozenset[int]  # registers of state that have no values before
    kept: Entry | None
    options: Group
    after: dict[str, Any]


def _next_decisions(taken: list[bool]) -> tuple[bool, ...]:
    """Those of the next run, in which the last outcome that was True is False; none: it was the
    last."""
    while taken and not taken[-1]:
        taken = taken[:-1]
    return (*taken[:-1], False) if taken else ()


def _must_agree(one: _Run, other: _Run) -> None:
    left, others = (one.kept, one.options, one.after), (other.kept, other.options, other.after)
    what = disagreement(left, others)
    if what is not None:
        raise Untraceable(f"by a tensor's value it makes something else of {what}")
    if one.order != other.order or one.fresh != other.fresh:
        raise Untraceable("by a tensor's value it makes other state")


Left = tuple["Entry | None", Group, dict[str, Any]]


def disagreement(one: Left, other: Left) -> str | None:
    """Names the one of entry, options and attributes that differs after two runs."""
    for what, a, b in zip(("the state entry", "options", "attributes"), one, other, strict=True):
        if difference("", a, b) is not None or list(a or ()) != list(b or ()):
            return what
    return None


def _joined(runs: list[_Run]) -> Recorded:
    first, tapes = runs[0], [run.tape for run in runs]
    n_state = len(first.order)
    lines = [line for line in first.tape.lines if not isinstance(line, Call | Branch)]
    if len(lines) < len(first.tape.lines) or any(map(reads_a_number, lines)):
        if first.tape.device != CPU:
            raise Untraceable("it takes a number from a tensor on a GPU")
        program: Program | Parts = make_parts(
            tapes, first.fresh, n_state, _forms(first.tape, first.kept)
        )
    else:
        program = make_program(lines, first.fresh, n_state, frozenset(first.tape.apart))
        if first.tape.device != CPU:
            check_fits_gpu(program)
    looked = any(tape.looked_at_shape for tape in tapes)
    at_requires_grad = any(tape.looked_at_requires_grad for tape in tapes)
    of_optimizer = first.options, first.after
    return Recorded(
        program, first.kept, tuple(first.order), *of_optimizer, looked, at_requires_grad
    )


def _run(
    inputs: Inputs, tape: Tape, follows: bool, names: list[str], made: Made, step_on: Twin
) -> _Run:
    """follows: branches on values."""
    attributes, options, entry = inputs
    if follows and tape.decisions is None:
        tape.decisions = ()
    guide = Guide(tape, names)
    numbers = nullcontext() if tape.device == CPU else Numbers(tape)
    with nullcontext() if made == "none" else Making(tape, made), numbers:
        after, options, kept = guide.run(step_on, attributes, options, entry)
    order = guide.order
    fresh = frozenset(
        STATE + place.index
        for name, place in (kept or {}).items()
        if isinstance(place, Place) and name not in (entry or {})
    )
    del guide  # and its stand-ins
    if any(reference() is not None for reference in tape.alive):
        raise Untraceable("it keeps a tensor of this step somewhere else than in its state")
    return _Run(tape, order, fresh, kept, options, after)


def _forms(tape: Tape, entry: Entry | None) -> Forms:
    """The forms of the state tensors that are not as the parameter."""
    found: Forms = {}
    for place in (entry or {}).values():
        if isinstance(place, Place) and (place.form or place.dtype):
            found[place.index] = place.dtype or tape.dtype, place.form
    return found


class Guide:
    """The stand-ins that a step() is given. Their registers on the tape are those of programs."""

    def __init__(self, tape: Tape, names: list[str]) -> None:
        self.tape = tape
        self.param, self.grad = tape.new(tape.dtype), tape.new(tape.dtype)
        self.param.requires_grad_(True)
        self.param.grad = self.grad
        self._plain: set[Any] = set()  # keys of the entry at which there is no state tensor
        self.order = list(names)  # of state tensors
        tape.looked_at_shape = False

    def run(
        self, step_on: Twin, attributes: dict[str, Any], options: Group, entry: Entry | None
    ) -> tuple[dict[str, Any], Group, Entry | None]:
        """Attributes, options and entry after the step."""
        given = None if entry is None else self._with_standins(entry)
        self.tape.n = TEMPORARY
        try:
            made, after, options = step_on.step_alone(attributes, options, self.param, given)
        except Untraceable:
            raise
        except Exception as error:
            why = f"its step() raises {type(error).__name__} without data: {error}"
            kind, why = self.tape.why or (Untraceable, why)
            raise kind(why) from error
        if self.tape.why is not None:  # step() has caught it
            kind, why = self.tape.why
            raise kind(why)
        if self.tape.lent:
            self.tape.give_back((), {})
        self._look_at_tensors(after.pop("state"))
        del after["param_groups"], options["params"]
        return after, options, None if made is None else self._with_places(made, entry or {})

    def _with_standins(self, entry: Entry) -> Entry:
        """Appends to the order what is not in it yet."""
        given = dict(entry)
        for key, value in entry.items():
            if not isinstance(value, Place):
                self._plain.add(key)
            else:
                given[key] = self._standin(key, value)
        return given

    def _standin(self, key: Any, place: Place) -> Standin:
        """For a state tensor, in its register."""
        dtype = place.dtype or self.tape.dtype
        made = Standin(self.tape, STATE + self._place(key), dtype, place.form)
        if place.dtype is not None:
            self.tape.apart.add(made.register)
        made.in_bytes = dtype == torch.bool
        made.is_fixed = place.form == POINT  # else step() has looked at the shape when it made it
        return made

    def _place(self, key: Any) -> int:
        if key not in self.order:
            if len(self.order) == MOST_STATE:
                raise Untraceable(f"it keeps more than {MOST_STATE} state tensors for a parameter")
            self.order.append(key)
        return self.order.index(key)

    def _look_at_tensors(self, state: dict[Any, Entry]) -> None:
        """Refuses changes that step() makes to stand-ins only."""
        param = self.param
        if any(owner is not param for owner in state):
            raise Untraceable("it keeps state for what is no parameter")
        if param.grad is not self.grad:
            raise Untraceable("it puts another gradient into the place of the one that there is")
        for reference in self.tape.alive:
            alive = reference()
            if alive is not None and requires_grad_of(alive) != (alive is param):
                raise Untraceable("it changes requires_grad")
            if alive is not None and own_attributes(alive):
                raise Untraceable(
                    f"it gives tensors attributes: {', '.join(sorted(own_attributes(alive)))}"
                )

    def _with_places(self, entry: Entry, before: Entry) -> Entry:
        """The entry after the step. What was put into it is copied to the register of its
        place."""
        found = {}
        taken = {self.param.register, self.grad.register}
        for key, value in entry.items():
            if not isinstance(value, Standin):
                found[key] = plain(key, value)
                continue
            if key in self._plain:
                raise Untraceable(f"state[{key!r}] becomes a tensor, after it was none")
            register = STATE + self._place(key)
            root = self.tape.roots.get(value.register, value.register)
            is_others = root < TEMPORARY and value.register != register
            if root in taken or is_others:
                raise Untraceable(f"state[{key!r}] is the tensor of another place, too")
            taken.add(root)
            dtype = None if value.dtype == self.tape.dtype else value.dtype
            found[key] = place = Place(register - STATE, dtype, value.form)
            was = before.get(key)
            if isinstance(was, Place) and was.dtype != dtype:
                raise Untraceable(f"state[{key!r}] becomes a tensor of another dtype")
            if value.register != register:
                torch.ops.aten.copy_.default(self._standin(key, place), value)
        return found


def plain(key: Any, value: Any) -> Any:
    """The value, which must hold no stand-in."""
    for x in _items(value):
        if isinstance(x, Standin):
            what = f"state[{key!r}], a {type(value).__name__}"
            raise Untraceable(f"it keeps a tensor of this step in {what}")
        if isinstance(x, Tensor) and x.ndim:
            raise ForeignTensor(f"state[{key!r}] is a tensor that is not made from the parameter")
    return value
