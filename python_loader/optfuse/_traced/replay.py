# SPDX-License-Identifier: BSD-3-Clause
"""A step() on stand-ins mostly does what it did at the step before, with other numbers. Then the
library answers its operators (shim/traced/replay.cpp) and says which numbers they were given. What
else a step() does to stand-ins, options and attributes is compared here. Where anything is
different, the step is recorded anew."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch

from optfuse._library.bindings import guard, lib_with_gil
from optfuse._own_step.twin import Entry, Group, Twin
from optfuse._traced.given import Given
from optfuse._traced.guide import Guide, Inputs, Left, Place, Recorded, disagreement, plain
from optfuse._traced.parts import Parts, merged, numbers_of, origins, with_numbers
from optfuse._traced.program import Program, Structure
from optfuse._traced.standin import (
    Branch,
    Call,
    Learning,
    Line,
    Standin,
    Tape,
    Untraceable,
    dict_of,
    requires_grad_of,
)

_ops = torch.ops.optfuse
_Sizes = tuple[tuple[int, ...], torch.dtype, "tuple[int, ...] | None"]  # and strides, as for Tape


class Run:
    """A run of a step() that was learned, by one outcome of its branches on values."""

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
        self.tape = guide.tape
        self._param, self._grad = guide.param, guide.grad
        self._given = given
        self._keys = list(made or ())
        self._after = _standins_in(made)
        self._of_data = self._grad, *given.values(), *self._after.values()

    def settle(self, recorded: Recorded, free: list[int], n_numbers: int) -> None:
        """recorded: what the whole step() did; free: the numbers of operators that may be others;
        n_numbers: of all operators. Nobody else has the stand-ins any more."""
        entry = recorded.entry or {}
        self._looks_at_shape = recorded.looked_at_shape
        self._places = {k: v for k, v in entry.items() if isinstance(v, Place)}
        self.numbers = (ctypes.c_double * max(1, n_numbers))()
        self._all = [x for x in (reference() for reference in self.tape.alive) if x is not None]
        self._lengths = len(self.tape.lines), len(self.tape.alive)
        self.tape.is_played = True
        self._references = self._count_references()
        _ops.set_free(self._address, free)

    def play(self, step_on: Twin, inputs: Inputs) -> Left | None:
        """The entry, options and attributes after it; None: it was another one."""
        made, after, options, same = self._play(step_on, *inputs)
        if not same or not self._looks_the_same(after) or list(made or ()) != self._keys:
            return None
        kept = None if made is None else self._with_places(made)
        if made is not None and kept is None:
            return None
        del made, after["state"], after["param_groups"], options["params"]
        if self._references != self._count_references() and guard("replay_kept"):
            return None
        return kept, options, after

    def _play(
        self, step_on: Twin, attributes: dict[str, Any], options: Group, entry: Entry | None
    ) -> tuple[Entry | None, dict[str, Any], Group, bool]:
        """The entry, attributes and options after it, and whether the operators were the same."""
        tape, standins = self.tape, self._given
        tape.why, tape.looked_at_shape, tape.looked_at_requires_grad = None, False, False
        tape.taken = []
        given = None if entry is None else {k: standins.get(k, v) for k, v in entry.items()}
        done = None
        try:
            lib_with_gil.of_shim_play(self._address)
            done = step_on.step_alone(attributes, options, self._param, given)
        except Exception:
            pass  # it is recorded anew, which says what is wrong
        finally:
            same = lib_with_gil.of_shim_played(self._address, self.numbers)
        return (None, {}, {}, False) if done is None else (*done, same)

    def _looks_the_same(self, after: dict[str, Any]) -> bool:
        """Whether step() has done nothing else to stand-ins."""
        tape, param = self.tape, self._param
        return (
            tape.why is None
            and (self._looks_at_shape or not tape.looked_at_shape)
            and len(tape.taken) == len(tape.asked)
            and self._lengths == (len(tape.lines), len(tape.alive))
            and len(after["state"]) < 2
            and next(iter(after["state"]), param) is param
            and param.of_grad is self._grad
            and requires_grad_of(param)
            and not any(map(requires_grad_of, self._of_data))
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


@dataclass(frozen=True)
class Source:
    """A number of a program that comes from operators, in one run or in several, which share its
    line."""

    line: int  # of the program
    which: int  # of its numbers
    places: tuple[tuple[int, int, int], ...]  # run, number of all its operators, sign

    def value(self, runs: list[Run]) -> float | None:
        """None: each run says something else."""
        found = [
            runs[run].numbers[number] if sign == 1 else -1.0 * runs[run].numbers[number]
            for run, number, sign in self.places
        ]
        first = found[0]
        same = len(found) == 1 or len({struct.pack("d", x) for x in found}) == 1
        return first if same else None


class Replay:
    """A step() that was learned, of parameters that are alike."""

    def __init__(self, runs: list[Run], sources: list[Source], recorded: Recorded) -> None:
        self._runs, self._sources = runs, sources
        self._program, self._names = recorded.program, recorded.names
        self._looks_at_shape, self._of_runs = recorded.looked_at_shape, recorded.runs
        self._places = [(s.line * 2 + s.which, *s.places[0][1:]) for s in sources]

    def play(self, step_on: Twin, first: Inputs, again: Callable[[], Inputs]) -> Recorded | None:
        """As guide.record(), which it leaves to say what is wrong: then it is None."""
        left = None
        for run in self._runs:
            found = run.play(step_on, first if left is None else _copied(again()))
            if found is None or (left is not None and disagreement(left, found) is not None):
                return None
            left = left or found
        assert left is not None
        program = self._now()
        if program is None:
            return None
        kept, options, after = left
        at_requires_grad = any(run.tape.looked_at_requires_grad for run in self._runs)
        of_all = self._looks_at_shape, at_requires_grad, self._of_runs
        return Recorded(program, kept, self._names, options, after, *of_all)

    def _now(self) -> Program | Parts | None:
        """The program with the numbers of this step."""
        if isinstance(self._program, Program):
            values, numbers = list(self._program.values), self._runs[0].numbers
            for at, number, sign in self._places:
                values[at] = numbers[number] if sign == 1 else -1.0 * numbers[number]
            return Program(self._program.structure, values)
        lines = list(self._program.tape)
        for source in self._sources:
            value = source.value(self._runs)
            if value is None:
                return None
            line = lines[source.line]
            assert not isinstance(line, Branch)
            of_line = list(numbers_of(line))
            of_line[source.which] = value
            lines[source.line] = with_numbers(line, tuple(of_line))
        return Parts(self._program.structure, tuple(lines), self._program.forms)


def learn(
    step_on: Twin,
    inputs: Callable[[], Inputs],
    of_param: _Sizes,
    names: list[str],
    recorded: Recorded,
) -> Replay | None:
    """A replay of the step() that was recorded, which takes place once more for each of its runs.
    inputs: of each. names: as guide.record() says. None: it can't be played."""
    learned = []
    for decisions, begins in recorded.runs:
        tape = Tape(*of_param)
        tape.decisions, tape.begins = decisions, begins
        found = _learn(step_on, inputs(), tape, names, recorded)
        if found is None:
            return None
        learned.append(found)
    sources = _sources(learned, recorded.program)
    if sources is None:
        return None
    free: list[list[int]] = [[] for _ in learned]
    for source in sources:
        for run, number, _ in source.places:
            free[run].append(number)
    counts = [len(one.numbers) for one in learned]
    runs = [one.run for one in learned]
    del learned
    for one, numbers, n in zip(runs, free, counts, strict=True):
        one.settle(recorded, numbers, n)
    return Replay(runs, sources, recorded)


@dataclass
class _Learned:
    run: Run
    numbers: dict[tuple[int, ...], int]  # of all operators, by their places
    pinned: set[Any]

    def sources_in(self, step: Line | Call) -> Iterator[tuple[int, int, int]]:
        """For each number that may be another one its place in the step, its place among all
        numbers of the operators, and its sign."""
        for i, value in enumerate(numbers_of(step)):
            if isinstance(value, Given) and value.place not in self.pinned:
                yield i, self.numbers[value.place], value.sign


def _learn(
    step_on: Twin, inputs: Inputs, tape: Tape, names: list[str], recorded: Recorded
) -> _Learned | None:
    attributes, options, entry = inputs
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
    run = Run(learning, guide, before, made)
    if failed or tape.lent or _ops.has_failed(learning.address) or tape.why is not None:
        return None
    if tape.looked_at_shape and not recorded.looked_at_shape:
        return None
    kept = None if made is None else guide.with_places(made, entry or {})
    if _places_in(kept) != _places_in(recorded.entry):
        return None
    return _Learned(run, _numbered(places), learning.pinned)


def _sources(learned: list[_Learned], program: Program | Parts) -> list[Source] | None:
    """The numbers in a program that came from arguments, and nothing else depends on. None: the
    tapes say something else than this program."""
    tapes = [one.run.tape.lines for one in learned]
    known = [[_as_known(line) for line in lines] for lines in tapes]
    if isinstance(program, Program):
        return _sources_of_lines(learned[0], known[0], program)
    try:
        lines = merged(known)
    except Untraceable:
        return None
    if repr(lines) != repr([*program.tape]):
        return None
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for at, places in enumerate(origins([(i, 0, lines) for i, lines in enumerate(tapes)])):
        for run, i in places:
            step = tapes[run][i]
            assert not isinstance(step, Branch)
            for which, number, sign in learned[run].sources_in(step):
                found.setdefault((at, which), []).append((run, number, sign))
    return [Source(at, which, tuple(places)) for (at, which), places in found.items()]


def _sources_of_lines(one: _Learned, known: list[Any], program: Program) -> list[Source] | None:
    structure: Structure = program.structure
    if not all(isinstance(line, tuple) for line in known):
        return None
    if tuple([line[:5] for line in known]) != structure.taped:
        return None
    values = [x for at in structure.of for x in known[at][5:]]
    if [struct.pack("d", x) for x in values] != [struct.pack("d", x) for x in program.values]:
        return None
    lines: Any = one.run.tape.lines
    return [
        Source(line, which, ((0, number, sign),))
        for line, at in enumerate(structure.of)
        for which, number, sign in one.sources_in(lines[at])
    ]


def _as_known(line: Line | Call | Branch) -> Line | Call | Branch:
    """With numbers in the place of what stands for them."""
    if isinstance(line, Branch):
        return line
    numbers = [x.now() if isinstance(x, Given) else x for x in numbers_of(line)]
    return with_numbers(line, tuple(numbers))


def _copied(inputs: Inputs) -> Inputs:
    attributes, options, entry = inputs
    return dict(attributes), dict(options), entry


def _numbered(places: list[int]) -> dict[tuple[int, ...], int]:
    """The numbers of all operators, in the library's order."""
    triples = zip(*(iter(places),) * 3, strict=True)
    return {place: i for i, place in enumerate(triples)}


def _standins_in(entry: Entry | None) -> dict[Any, Standin]:
    return {key: x for key, x in (entry or {}).items() if isinstance(x, Standin)}


def _places_in(entry: Entry | None) -> Any:
    if entry is None:
        return None
    return [(key, value if isinstance(value, Place) else None) for key, value in entry.items()]
