# SPDX-License-Identifier: BSD-3-Clause
"""Programs as the library runs them (kernels/program.h), made of what is on a tape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from optfuse._library.bindings import guard, lib
from optfuse._traced.standin import Later, Line, Number, Untraceable

NAMES = lib.of_shim_operators().decode().split()
_NUMBER = {name: i for i, name in enumerate(NAMES)}
PARAM, GRAD, STATE = 0, 1, 2  # registers
MOST_STATE = 8
TEMPORARY = STATE + MOST_STATE
REGISTERS = 28
# Limits of the kernels on GPUs (cuda_kernels.h).
GPU_ROOM, GPU_INSTRUCTIONS = 12, 256

# How many registers and numbers each operator takes; the others take one register.
_NO_REGISTER = {"fill"}
_THREE = {"addcmul", "addcdiv", "clamp", "where"}
_TWO = {"add", "mul", "div", "lerp", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne"}
_TWO |= {"where_number_first", "where_number_second", "logical_and", "logical_or"}
_TWO |= {"maximum_list", "minimum_list"}
_SHOWN = {"add": "{a} + {s} {b}", "add_number": "{a} + {s}", "number_add": "{s} + {t} {a}"}
_SHOWN |= {"mul": "{a} * {b}", "mul_number": "{s} {a}", "div": "{a} / {b}"}
_SHOWN |= {"div_number": "{a} / {s}", "number_div": "{s} / {a}", "fill": "{s}", "copy": "{a}"}
_SHOWN |= {"div_number_list": "{a} / {s}"}
_SHOWN |= {"addcmul": "{a} + {s} {b} * {c}", "addcdiv": "{a} + {s} {b} / {c}"}
_SHOWN |= {
    "lerp": "lerp({a}, {b}, {s})",
    "clamp_min": "max({a}, {s})",
    "clamp_max": "min({a}, {s})",
}


def inputs_of(line: Shape | Line) -> tuple[int, ...]:
    """The registers that it reads."""
    name, _, a, b, c = line[:5]
    if name in _NO_REGISTER:
        return ()
    return (a, b, c) if name in _THREE else (a, b) if name in _TWO else (a,)


# A line without its numbers.
Shape = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Structure:
    """A program without its numbers; the same object for the same lines on a tape."""

    lines: tuple[Shape, ...]  # in the library's registers
    of: tuple[int, ...]  # which lines of the tape they are
    taped: tuple[Shape, ...]  # all lines of the tape
    code: list[int]  # as the library reads it


def code_of(lines: Iterable[Shape]) -> list[int]:
    return [x for q in lines for x in (_NUMBER[q[0]], *q[1:])]


@dataclass(frozen=True)
class Program:
    """One update, in the library's registers."""

    structure: Structure
    values: list[Number]  # s and t of each line; the library takes no Later

    @property
    def instructions(self) -> list[Line]:
        pairs = zip(self.values[::2], self.values[1::2], strict=True)
        return [(*q, *pair) for q, pair in zip(self.structure.lines, pairs, strict=True)]

    def __len__(self) -> int:
        return len(self.structure.lines)

    def code(self) -> list[int]:
        return self.structure.code

    def numbers(self) -> list[Number]:
        return self.values

    def shown(self, state: Iterable[str]) -> str:
        """One line for each instruction; state: the names of the state tensors."""
        state = list(state)
        return "\n".join(shown_line(line, state) for line in self.instructions)


def check_fits_gpu(program: Program) -> None:
    """Raises Untraceable if it is more than a kernel there takes."""
    if len(program) > GPU_INSTRUCTIONS:
        raise Untraceable(
            f"its program has {len(program)} instructions, and on a GPU at most {GPU_INSTRUCTIONS}"
        )
    used = {r for line in program.structure.lines for r in (line[1], *inputs_of(line))}
    states = max((r - STATE + 1 for r in used if STATE <= r < TEMPORARY), default=0)
    temporaries = max(used, default=0) - TEMPORARY + 1
    if states + max(0, temporaries) > GPU_ROOM:
        raise Untraceable(
            f"it needs more than {GPU_ROOM} state tensors and temporaries at once on a GPU"
        )


def shown_line(line: Line, state: list[str]) -> str:
    names = {PARAM: "param", GRAD: "grad"}
    names |= {STATE + i: name for i, name in enumerate(state)}
    operator, to, a, b, c, s, t = line

    def name(r: int) -> str:
        return names.get(r, f"t{r - TEMPORARY}")

    def number(value: Number) -> str:
        if isinstance(value, Later):
            return ("-" if value.sign < 0 else "") + name(value.register)
        return f"{value:g}"

    x, *of = map(name, (to, a, b, c))
    n = len(inputs_of(line))
    plain = f"{operator}({', '.join(of[:n])}{f', {number(s)}' if s else ''})"
    found = _SHOWN.get(operator, plain).format(a=of[0], b=of[1], c=of[2], s=number(s), t=number(t))
    return f"{x} = {found}"


def reads_a_number(line: Line) -> bool:
    """Whether one of its numbers is known when the program runs only, as parts.py has them."""
    return isinstance(line[5], Later) or isinstance(line[6], Later)


def refuse_mixed(lines: Iterable[Shape], apart: frozenset[int]) -> None:
    """Raises Untraceable if a line has a register of another number of elements or dtype than the
    parameter's: it would be read or written beyond its end."""
    if any(not apart.isdisjoint((q[1], *inputs_of(q))) for q in lines) and guard("elements"):
        raise Untraceable(
            "a line of its program combines tensors of different sizes or dtypes, which is an "
            "error of optfuse"
        )


def make_program(
    lines: list[Line], made: frozenset[int], n_state: int, apart: frozenset[int] = frozenset()
) -> Program:
    """lines: in registers of which the first are those of parameter, gradient and n_state state
    tensors, and none from there to TEMPORARY. made: those of the state that have no values
    before. apart: registers that are not as the parameter. What nobody sees is left out."""
    structure = _structure(tuple(q[:5] for q in lines), made, n_state, apart)
    return Program(structure, [x for i in structure.of for x in lines[i][5:]])


@cache
def _structure(
    lines: tuple[Shape, ...], made: frozenset[int], n_state: int, apart: frozenset[int]
) -> Structure:
    refuse_mixed(lines, apart)
    in_memory = range(STATE + n_state)
    of = needed(lines, set(in_memory))
    kept = [lines[i] for i in of]
    has_values = set(in_memory) - made
    for line in kept:
        if not has_values.issuperset(inputs_of(line)):
            raise Untraceable("it reads a tensor that it has made without values")
        has_values.add(line[1])
    if not has_values.issuperset(made):
        raise Untraceable("it makes state without values")
    placed = tuple(with_few_registers(kept, in_memory))
    return Structure(placed, tuple(of), lines, code_of(placed))


def needed(lines: Sequence[Shape], live: set[int]) -> list[int]:
    """Those whose results are read or stay. An operator writes all of its register."""
    kept = []
    for i in reversed(range(len(lines))):
        if lines[i][1] in live:
            live.discard(lines[i][1])
            live.update(inputs_of(lines[i]))
            kept.append(i)
    return kept[::-1]


def with_few_registers(lines: list[Shape], in_memory: range) -> Iterable[Shape]:
    """Temporaries take over the registers of those that are read no more, if they can the one
    that the same operator reads first."""
    last = {r: i for i, line in enumerate(lines) for r in (line[1], *inputs_of(line))}
    place = {r: r for r in in_memory}
    free = list(range(REGISTERS - 1, TEMPORARY - 1, -1))
    for i, line in enumerate(lines):
        operator, to = line[:2]
        of = inputs_of(line)
        places = [place[r] for r in of]
        for r in dict.fromkeys(reversed(of)):
            if r not in in_memory and last[r] == i and r != to:
                free.append(place.pop(r))
        if to not in place:
            if not free:
                raise Untraceable(f"it needs more than {REGISTERS - TEMPORARY} temporaries at once")
            place[to] = free.pop()
        a, b, c = (*places, 0, 0, 0)[:3]
        yield operator, place[to], a, b, c
