# SPDX-License-Identifier: BSD-3-Clause
"""A step() on stand-ins mostly does what it did at the step before, with other numbers. Then the
library answers its operators (shim/traced/replay.cpp) and says which numbers they were given. What
else a step() does to stand-ins, options and attributes is compared here. Where anything is
different, the step is recorded anew."""

from __future__ import annotations

import ctypes
import struct
import weakref
from sys import getrefcount
from typing import Any

import torch

from optfuse._library.bindings import guard, lib_with_gil
from optfuse._own_step.twin import Entry, Group, Twin
from optfuse._traced.given import Given
from optfuse._traced.guide import Guide, Place, Recorded, plain
from optfuse._traced.program import Program, Structure
from optfuse._traced.standin import Learning, Standin, Tape, dict_of, requires_grad_of

_ops = torch.ops.optfuse
_Sources = list[tuple[int, int, int]]  # a number of a program, of the operators, and its sign


class Replay:
    """A step() that was learned, of parameters that are alike."""

    def __init__(
        self,
        learning: Learning,
        guide: Guide,
        given: dict[Any, Standin],
        made: Entry | None,
    ):
        """given: the stand-ins in the state entry before it; made: the entry after it."""
        self._address = learning.address
        self._free = weakref.finalize(self, lib_with_gil.of_shim_replay_free, self._address)
        self._free.atexit = False
        self._tape = guide.tape
        self._param, self._grad = guide.param, guide.grad
        self._given = given
        self._keys = list(made or ())
        self._after = _standins_in(made)

    def settle(
        self, recorded: Recorded, sources: _Sources, values: list[float], n_numbers: int
    ) -> None:
        """recorded: what it did, by this program; values: its numbers; n_numbers: of all
        operators. Nobody else has the stand-ins any more."""
        assert isinstance(recorded.program, Program)
        self._structure, self._names = recorded.program.structure, recorded.names
        self._sources = sources
        self._values = values
        self._places = {k: v for k, v in (recorded.entry or {}).items() if isinstance(v, Place)}
        self._numbers = (ctypes.c_double * max(1, n_numbers))()
        self._all = [x for x in (reference() for reference in self._tape.alive) if x is not None]
        self._lengths = len(self._tape.lines), len(self._tape.alive)
        self._references = self._count_references()
        _ops.set_free(self._address, [number for _, number, _ in sources])

    def play(
        self, step_on: Twin, attributes: dict[str, Any], options: Group, entry: Entry | None
    ) -> Recorded | None:
        """As guide.record(), which it leaves to say what is wrong: then it is None."""
        made, after, options, same = self._run(step_on, attributes, options, entry)
        if not same or not self._looks_the_same(after) or list(made or ()) != self._keys:
            return None
        kept = None if made is None else self._with_places(made)
        if made is not None and kept is None:
            return None
        del made, after["state"], after["param_groups"], options["params"]
        if self._references != self._count_references() and guard("replay_kept"):
            return None
        values, numbers = list(self._values), self._numbers
        for at, number, sign in self._sources:
            values[at] = numbers[number] if sign == 1 else -1.0 * numbers[number]
        program = Program(self._structure, values)
        looks = False, self._tape.looked_at_requires_grad
        return Recorded(program, kept, self._names, options, after, *looks)

    def _run(
        self, step_on: Twin, attributes: dict[str, Any], options: Group, entry: Entry | None
    ) -> tuple[Entry | None, dict[str, Any], Group, bool]:
        """The entry, attributes and options after it, and whether the operators were the same."""
        tape, standins = self._tape, self._given
        tape.why, tape.looked_at_shape, tape.looked_at_requires_grad = None, False, False
        given = None if entry is None else {k: standins.get(k, v) for k, v in entry.items()}
        done = None
        lib_with_gil.of_shim_play(self._address)
        try:
            done = step_on.step_alone(attributes, options, self._param, given)
        except Exception:
            pass  # it is recorded anew, which says what is wrong
        finally:
            same = lib_with_gil.of_shim_played(self._address, self._numbers)
        return (None, {}, {}, False) if done is None else (*done, same)

    def _looks_the_same(self, after: dict[str, Any]) -> bool:
        """Whether step() has done nothing else to stand-ins."""
        tape, param = self._tape, self._param
        return (
            tape.why is None
            and not tape.looked_at_shape
            and self._lengths == (len(tape.lines), len(tape.alive))
            and len(after["state"]) < 2
            and next(iter(after["state"]), param) is param
            and param.of_grad is self._grad
            and requires_grad_of(param)
            and not requires_grad_of(self._grad)
        )

    def _with_places(self, made: Entry) -> Entry | None:
        """The state entry after it; None: it has other tensors."""
        places, after, found = self._places, self._after, {}
        for key, value in made.items():
            if key in places:
                if value is not after.get(key):
                    return None
                found[key] = places[key]
            else:
                try:
                    found[key] = plain(key, value)
                except Exception:
                    return None
        return found

    def _count_references(self) -> list[int]:
        """References to all stand-ins, and how many attributes they have."""
        everything = self._all
        return [*map(getrefcount, everything), *map(len, map(dict_of, everything))]


def learn(
    step_on: Twin,
    attributes: dict[str, Any],
    options: Group,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    entry: Entry | None,
    names: list[str],
    strides: tuple[int, ...] | None,
    recorded: Recorded,
) -> Replay | None:
    """A replay of the step() that was recorded, which takes place once more. The arguments before
    are those of guide.record(). None: it can't be played."""
    tape = Tape(shape, dtype, strides)
    found = _learn(step_on, attributes, options, tape, entry, names, recorded)
    if found is None:
        return None
    replay, *numbers = found
    replay.settle(recorded, *numbers)
    return replay


def _learn(
    step_on: Twin,
    attributes: dict[str, Any],
    options: Group,
    tape: Tape,
    entry: Entry | None,
    names: list[str],
    recorded: Recorded,
) -> tuple[Replay, _Sources, list[float], int] | None:
    guide = Guide(tape, names)
    given = guide.prepare(entry)
    tape.learning = learning = Learning(_ops.begin_learning())
    before = _standins_in(given)  # step() may exchange them
    for standin in (guide.param, guide.grad, *before.values()):
        _ops.learn_standin(learning.address, standin)
    made, failed = None, True
    try:
        made, _, _ = step_on.step_alone(attributes, options, guide.param, given)
        failed = False
    except Exception:
        pass  # then there is no replay
    finally:
        tape.learning = None
        places = _ops.end_learning(learning.address)
    replay = Replay(learning, guide, before, made)
    if failed or _ops.has_failed(learning.address) or tape.why is not None or tape.looked_at_shape:
        return None
    kept = None if made is None else guide.with_places(made, entry or {})
    if _places_in(kept) != _places_in(recorded.entry):
        return None
    assert isinstance(recorded.program, Program)
    structure, known = recorded.program.structure, recorded.program.values
    sources = _sources(tape, structure, known, _numbered(places), learning.pinned)
    return None if sources is None else (replay, sources, known, len(places) // 3)


def _numbered(places: list[int]) -> dict[tuple[int, ...], int]:
    """The numbers of all operators, in the library's order."""
    triples = zip(*(iter(places),) * 3, strict=True)
    return {place: i for i, place in enumerate(triples)}


def _sources(
    tape: Tape, structure: Structure, known: list[float], numbers: Any, pinned: Any
) -> _Sources | None:
    """The numbers in a program that came from arguments, and nothing else depends on. None: the
    tape says something else than this program, whose numbers are `known`."""
    found = []
    lines: Any = tape.lines
    if tuple([line[:5] for line in lines]) != structure.taped:
        return None
    for i, value in enumerate(x for at in structure.of for x in lines[at][5:]):
        now = value.now() if isinstance(value, Given) else value
        if struct.pack("d", now) != struct.pack("d", known[i]):
            return None
        if isinstance(value, Given) and value.place not in pinned:
            found.append((i, numbers[value.place], value.sign))
    return found


def _standins_in(entry: Entry | None) -> dict[Any, Standin]:
    return {key: x for key, x in (entry or {}).items() if isinstance(x, Standin)}


def _places_in(entry: Entry | None) -> Any:
    if entry is None:
        return None
    return [(key, value if isinstance(value, Place) else None) for key, value in entry.items()]
