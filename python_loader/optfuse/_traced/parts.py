# SPDX-License-Identifier: BSD-3-Clause
"""Programs with calls of PyTorch's operators: the lines between two calls are segments, each a
program of its own (program.py) over at most as many tensors as an update has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

from optfuse._traced.program import (
    STATE,
    TEMPORARY,
    Shape,
    code_of,
    inputs_of,
    needed,
    refuse_mixed,
    shown_line,
    with_few_registers,
)
from optfuse._traced.standin import DTYPES, Call, Form, Later, Line, Number, Tape, Untraceable

# A line without its numbers, and where these are registers: (s or t, register, sign); or a call
# without its numbers.
Step = tuple[Shape, tuple[tuple[int, int, int], ...]] | Call
# State tensors, by their places, that are not as their parameter.
Forms = dict[int, tuple[torch.dtype, Form | None]]
COPY = "aten::copy_."  # writes all of its first argument


@dataclass
class _Part:
    """A call or a segment, with what it needs and leaves."""

    code: list[int]
    uses: set[int]  # registers
    words: tuple[str, ...] = ()
    of: list[int] = field(default_factory=list)  # lines of the tape that its numbers are of


@dataclass(frozen=True)
class Structure:
    """A program without its numbers; the same object for the same tape."""

    code: list[int]
    words: list[str]
    of: list[int]  # whose numbers follow each other: lines and calls of the tape
    touches: int  # a bit for each register in memory that it reads or writes
    writes: int  # for each that it writes
    n_registers: int


@dataclass(frozen=True)
class Parts:
    """One update."""

    structure: Structure
    tape: tuple[Line | Call, ...]
    forms: tuple[int, ...]  # as shim/traced/parts.h says

    def __len__(self) -> int:
        return len(self.tape)

    def numbers(self) -> list[float]:
        found: list[float] = []
        for i in self.structure.of:
            step = self.tape[i]
            found += step.numbers if isinstance(step, Call) else map(_known, step[5:])
        return found

    def shown(self, state: list[str]) -> str:
        """One line for each operator; state: the names of the state tensors."""
        return "\n".join(
            _shown_call(step, state) if isinstance(step, Call) else shown_line(step, state)
            for step in self.tape
        )


def _known(x: Number) -> float:
    """The number; NaN stands in its place until its register is read (_segment()'s patches)."""
    return math.nan if isinstance(x, Later) else float(x)


def _shown_call(call: Call, state: list[str]) -> str:
    names = ["param", "grad", *state]

    def name(r: int) -> str:
        return names[r] if r < len(names) else f"t{r - TEMPORARY}"

    made = ", ".join(map(name, call.makes)) or name(call.reads[0])
    numbers = [f"{x:g}" for x in call.numbers]
    return f"{made} = {call.operator}({', '.join([*map(name, call.reads), *numbers])})"


def make_parts(tape: Tape, made: frozenset[int], n_state: int, forms: Forms) -> Parts:
    """made: the registers of state that have no values before."""
    lines = tuple(tape.lines)
    steps = tuple(_step(line) for line in lines)
    written, apart = frozenset(tape.written), frozenset(tape.apart)
    structure = _structure(steps, made, n_state, written, apart, tape.n)
    words: list[int] = []
    for place, (dtype, form) in forms.items():
        sizes, strides = form or ((), ())
        words += place, DTYPES[dtype], -1 if form is None else len(sizes), *sizes, *strides
    return Parts(structure, lines, tuple(words))


def _step(line: Line | Call) -> Step:
    if isinstance(line, Call):
        return Call(line.operator, line.code, line.words, (), line.reads, line.makes)
    later = ((i, x.register, x.sign) for i, x in enumerate(line[5:]) if isinstance(x, Later))
    return line[:5], tuple(later)


@cache
def _structure(
    steps: tuple[Step, ...],
    made: frozenset[int],
    n_state: int,
    written: frozenset[int],
    apart: frozenset[int],
    n: int,
) -> Structure:
    in_memory = set(range(STATE + n_state))
    _check_values(steps, in_memory, made)
    refuse_mixed((step[0] for step in steps if not isinstance(step, Call)), apart)
    parts = list(_parts(steps, in_memory, apart))[::-1]
    last = {r: i for i, part in enumerate(parts) for r in part.uses}
    code: list[int] = []
    touched: set[int] = set()
    for i, part in enumerate(parts):
        touched |= part.uses
        frees = [r for r in sorted(part.uses) if last[r] == i and r >= TEMPORARY]
        code += [*part.code, len(frees), *frees]
    wrote = written | {step[0][1] for step in steps if not isinstance(step, Call)}
    return Structure(
        code,
        [word for part in parts for word in part.words],
        [i for part in parts for i in part.of],
        _bits(touched & in_memory),
        _bits(wrote & in_memory),
        n,
    )


def _bits(registers: set[int]) -> int:
    return sum(1 << r for r in registers)


def _reads(step: Step) -> set[int]:
    if isinstance(step, Call):
        return set(step.reads[1:] if step.operator == COPY else step.reads)
    return {*inputs_of(step[0]), *(register for _, register, _ in step[1])}


def _makes(step: Step) -> set[int]:
    if isinstance(step, Call):
        return set(step.reads[:1] if step.operator == COPY else step.makes)
    return {step[0][1]}


def _check_values(steps: tuple[Step, ...], in_memory: set[int], made: frozenset[int]) -> None:
    has_values = in_memory - made
    for step in steps:
        if not has_values >= _reads(step):
            raise Untraceable("it reads a tensor that it has made without values")
        has_values |= _makes(step)
    if not has_values >= made:
        raise Untraceable("it makes state without values")


def _parts(steps: tuple[Step, ...], in_memory: set[int], apart: frozenset[int]) -> Iterator[_Part]:
    """From the last to the first."""
    live = set(in_memory)
    end = len(steps)
    for i in reversed(range(-1, len(steps))):
        step = steps[i] if i >= 0 else None
        if step is not None and not isinstance(step, Call):
            continue
        yield from _segments(steps, range(i + 1, end), live, in_memory)
        if step is not None:
            live -= _makes(step)
            live |= _reads(step)
            whole = [r for r in step.makes if r not in apart]
            code = [1, len(step.makes), *step.makes, len(whole), *whole, *step.code]
            yield _Part(code, {*step.reads, *step.makes}, step.words, [i])
        end = i


def _segments(
    steps: tuple[Step, ...], which: range, live: set[int], in_memory: set[int]
) -> Iterator[_Part]:
    """From the last to the first; live: what is needed after them, and then before them."""
    kept = _needed(steps, which, live)
    if not kept:
        return
    before = set(live)
    for i in reversed(kept):
        before -= _makes(steps[i])
        before |= _reads(steps[i])
    written = {r for i in kept for r in _makes(steps[i])}
    read = {r for r in before if any(r in inputs_of(_shape(steps[i])) for i in kept)}
    memory = sorted(read | (written & live))
    part = None
    if len(memory) <= TEMPORARY:
        makes = sorted((written & live) - before - in_memory)
        part = _segment([(i, *_line(steps[i])) for i in kept], memory, makes)
    if part is None:
        middle = kept[len(kept) // 2]
        yield from _segments(steps, range(middle, which.stop), live, in_memory)
        yield from _segments(steps, range(which.start, middle), live, in_memory)
        return
    live.clear()
    live |= before
    yield part


def _line(step: Step) -> tuple[Shape, tuple[tuple[int, int, int], ...]]:
    assert not isinstance(step, Call)
    return step


def _shape(step: Step) -> Shape:
    return _line(step)[0]


def _needed(steps: tuple[Step, ...], which: range, live: set[int]) -> list[int]:
    lines = [_shape(steps[i]) for i in which]
    return [which[i] for i in needed(lines, set(live))]


def _segment(
    lines: list[tuple[int, Shape, tuple[tuple[int, int, int], ...]]],
    memory: list[int],
    makes: list[int],
) -> _Part | None:
    """None: it needs too many registers. lines: with their numbers on the tape."""
    place = {r: k for k, r in enumerate(memory)}

    def local(r: int) -> int:
        return place.get(r, TEMPORARY + r)

    renamed = [(q[0], *map(local, q[1:])) for _, q, _ in lines]
    try:
        code = code_of(with_few_registers(renamed, range(len(memory))))
    except Untraceable:
        if len(lines) == 1:
            raise
        return None
    patches = [
        (k, which, register, sign)
        for k, (_, _, later) in enumerate(lines)
        for which, register, sign in later
    ]
    padded = [*memory, *(TEMPORARY - len(memory)) * [-1]]
    flat = [x for patch in patches for x in patch]
    head = [0, *padded, len(makes), *makes, len(patches), *flat, len(lines)]
    uses = {*memory, *(register for _, _, register, _ in patches)}
    return _Part([*head, *code], uses, of=[i for i, _, _ in lines])
