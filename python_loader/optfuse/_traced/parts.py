# SPDX-License-Identifier: BSD-3-Clause
"""Programs with calls of PyTorch's operators: the lines between two calls are segments, each a
program of its own (program.py) over at most as many tensors as an update has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
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
from optfuse._traced.standin import (
    DTYPES,
    Branch,
    Call,
    Form,
    Later,
    Line,
    Number,
    Tape,
    Untraceable,
)

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
    tape: tuple[Line | Call | Branch, ...]  # after a branch those of each outcome
    forms: tuple[int, ...]  # as shim/traced/parts.h says

    def __len__(self) -> int:
        return sum(not isinstance(step, Branch) for step in self.tape)

    def numbers(self) -> list[float]:
        found: list[float] = []
        for i in self.structure.of:
            step = self.tape[i]
            assert not isinstance(step, Branch)
            found += map(_known, numbers_of(step))
        return found

    def shown(self, state: list[str]) -> str:
        """One line for each operator; state: the names of the state tensors."""
        found, indent = [], ""
        for step in self.tape:
            if isinstance(step, Branch):
                begin = f"if t{step.register - TEMPORARY}:" if step.outcome else "else:"
                indent = 4 * step.depth * " "
                found.append(indent + begin)
                indent += 4 * " "
            elif isinstance(step, Call):
                found.append(indent + _shown_call(step, state))
            else:
                found.append(indent + shown_line(step, state))
        return "\n".join(found)


def numbers_of(step: Line | Call) -> tuple[Number, ...]:
    return step.numbers if isinstance(step, Call) else step[5:]


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


def make_parts(tapes: list[Tape], made: frozenset[int], n_state: int, forms: Forms) -> Parts:
    """tapes: of each outcome of branches on values. made: the registers of state that have no
    values before."""
    lines: list[Line | Call | Branch] = []
    node = _grown([tape.lines for tape in tapes], lines)
    written = frozenset[int]().union(*(tape.written for tape in tapes))
    apart = frozenset[int]().union(*(tape.apart for tape in tapes))
    structure = _structure(node, made, n_state, written, apart, max(tape.n for tape in tapes))
    words: list[int] = []
    for place, (dtype, form) in forms.items():
        sizes, strides = form or ((), ())
        words += place, DTYPES[dtype], -1 if form is None else len(sizes), *sizes, *strides
    return Parts(structure, tuple(lines), tuple(words))


@dataclass(frozen=True)
class _Node:
    """Steps up to a branch, and what follows for either outcome."""

    steps: tuple[Step, ...]
    first: int  # the place of the first of them among the lines of all outcomes
    branch: tuple[int, _Node, _Node] | None = None  # its register; if it is true, if it is not

    def paths(self) -> Iterator[tuple[Step, ...]]:
        """The steps of each outcome."""
        if self.branch is None:
            yield self.steps
            return
        for node in self.branch[1:]:
            yield from (self.steps + path for path in node.paths())


def _grown(tapes: list[list[Line | Call | Branch]], lines: list[Line | Call | Branch]) -> _Node:
    """Appends the lines of all tapes to `lines`, those that they share once."""
    one = tapes[0]
    n = next((i for i, line in enumerate(one) if isinstance(line, Branch)), len(one))
    shared = one[:n]
    first = len(lines)
    lines += shared
    steps = tuple(_step(line) for line in shared if not isinstance(line, Branch))
    if n == len(one):
        return _Node(steps, first)
    if any(len(tape) == n or repr(tape[:n]) != repr(shared) for tape in tapes):
        raise Untraceable("it does something else before a branch on a value each time")
    nodes = []
    for outcome in (True, False):
        begins = [tape[n] for tape in tapes]
        marks = [x for x in begins if isinstance(x, Branch) and x.outcome is outcome]
        lines.append(marks[0])
        after = [tape[n + 1 :] for tape in tapes if tape[n] == marks[0]]
        nodes.append(_grown(after, lines))
    return _Node(steps, first, (marks[0].register, nodes[0], nodes[1]))


def _step(line: Line | Call) -> Step:
    if isinstance(line, Call):
        return Call(line.operator, line.code, line.words, (), line.reads, line.makes)
    later = ((i, x.register, x.sign) for i, x in enumerate(line[5:]) if isinstance(x, Later))
    return line[:5], tuple(later)


@cache
def _structure(
    node: _Node,
    made: frozenset[int],
    n_state: int,
    written: frozenset[int],
    apart: frozenset[int],
    n: int,
) -> Structure:
    in_memory = set(range(STATE + n_state))
    for path in node.paths():
        _check_values(path, in_memory, made)
    shapes = {step[0] for path in node.paths() for step in path if not isinstance(step, Call)}
    refuse_mixed(shapes, apart)
    parts, _ = _parts_of(node, in_memory, apart)
    last = {r: i for i, part in enumerate(parts) for r in part.uses}
    code: list[int] = []
    touched: set[int] = set()
    for i, part in enumerate(parts):
        touched |= part.uses
        frees = [r for r in sorted(part.uses) if last[r] == i and r >= TEMPORARY]
        code += [*part.code, len(frees), *frees]
    wrote = written | {shape[1] for shape in shapes}
    return Structure(
        code,
        [word for part in parts for word in part.words],
        [i for part in parts for i in part.of],
        _bits(touched & in_memory),
        _bits(wrote & in_memory),
        n,
    )


def _bits(registers: Set[int]) -> int:
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


def _parts_of(
    node: _Node, in_memory: set[int], apart: frozenset[int]
) -> tuple[list[_Part], set[int]]:
    """The parts, and the registers that are needed before them. Those for a branch's false outcome
    follow those for the true one, which end by skipping them."""
    if node.branch is None:
        after, live = [], set(in_memory)
    else:
        register, yes, no = node.branch
        if_true, of_yes = _parts_of(yes, in_memory, apart)
        if_false, of_no = _parts_of(no, in_memory, apart)
        if_true.append(_Part([2, -1, len(if_false)], set()))
        after = [_Part([2, register, len(if_true)], {register}), *if_true, *if_false]
        live = of_yes | of_no | {register}
    own = list(_parts(node.steps, live, in_memory, apart))[::-1]
    for part in own:
        part.of = [node.first + i for i in part.of]
    return own + after, live


def _parts(
    steps: tuple[Step, ...], live: set[int], in_memory: set[int], apart: frozenset[int]
) -> Iterator[_Part]:
    """From the last to the first; live: what is needed after them, and then before them."""
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
