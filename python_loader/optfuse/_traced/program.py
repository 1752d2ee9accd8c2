# SPDX-License-Identifier: BSD-3-Clause
"""Programs as the library runs them (kernels/program.h), made of what is on a tape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optfuse._native import lib
from optfuse._traced.standin import Line, Untraceable

NAMES = lib.of_shim_operators().decode().split()
_NUMBER = {name: i for i, name in enumerate(NAMES)}
PARAM, GRAD, STATE = 0, 1, 2  # registers
MOST_STATE = 4
TEMPORARY = STATE + MOST_STATE
REGISTERS = 24

# How many registers and numbers each operator takes; the others take one register.
_NO_REGISTER = {"fill"}
_THREE = {"addcmul", "addcdiv", "clamp", "where"}
_TWO = {"add", "mul", "div", "lerp", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne"}
_TWO |= {"where_number_first", "where_number_second", "logical_and", "logical_or"}
_SHOWN = {"add": "{a} + {s} {b}", "add_number": "{a} + {s}", "number_add": "{s} + {t} {a}"}
_SHOWN |= {"mul": "{a} * {b}", "mul_number": "{s} {a}", "div": "{a} / {b}"}
_SHOWN |= {"div_number": "{a} / {s}", "number_div": "{s} / {a}", "fill": "{s}", "copy": "{a}"}
_SHOWN |= {"addcmul": "{a} + {s} {b} * {c}", "addcdiv": "{a} + {s} {b} / {c}"}
_SHOWN |= {
    "lerp": "lerp({a}, {b}, {s})",
    "clamp_min": "max({a}, {s})",
    "clamp_max": "min({a}, {s})",
}


def inputs_of(line: Line) -> tuple[int, ...]:
    """The registers that it reads."""
    name, _, a, b, c, *_ = line
    if name in _NO_REGISTER:
        return ()
    return (a, b, c) if name in _THREE else (a, b) if name in _TWO else (a,)


@dataclass(frozen=True)
class Program:
    """One update, in the library's registers."""

    instructions: tuple[Line, ...]

    def code(self) -> list[int]:
        return [x for q in self.instructions for x in (_NUMBER[q[0]], *q[1:5])]

    def numbers(self) -> list[float]:
        return [x for q in self.instructions for x in q[5:]]

    def shown(self, state: Iterable[str]) -> str:
        """One line for each instruction; state: the names of the state tensors."""
        names = {PARAM: "param", GRAD: "grad"}
        names |= {STATE + i: name for i, name in enumerate(state)}
        return "\n".join(_shown(line, names) for line in self.instructions)


def _shown(line: Line, names: dict[int, str]) -> str:
    operator, to, a, b, c, s, t = line
    x, *of = (names.get(r, f"t{r - TEMPORARY}") for r in (to, a, b, c))
    n = len(inputs_of(line))
    plain = f"{operator}({', '.join(of[:n])}{f', {s:g}' if s else ''})"
    found = _SHOWN.get(operator, plain).format(a=of[0], b=of[1], c=of[2], s=f"{s:g}", t=f"{t:g}")
    return f"{x} = {found}"


def make_program(lines: list[Line], made: frozenset[int], n_state: int) -> Program:
    """lines: in registers of which the first are parameter, gradient and n_state state tensors;
    made: those of the state that have no values before. What nobody sees is left out."""
    in_memory = range(STATE + n_state)
    kept = _needed(lines, set(in_memory))
    unset = set(made)
    for line in kept:
        if unset.intersection(inputs_of(line)):
            raise Untraceable("it reads state that it has made without values")
        unset.discard(line[1])
    if unset:
        raise Untraceable("it makes state without values")
    return Program(tuple(_with_few_registers(kept, in_memory)))


def _needed(lines: list[Line], live: set[int]) -> list[Line]:
    """Those whose results are read or stay. An operator writes all of its register."""
    kept = []
    for line in reversed(lines):
        if line[1] in live:
            live.discard(line[1])
            live.update(inputs_of(line))
            kept.append(line)
    return kept[::-1]


def _with_few_registers(lines: list[Line], in_memory: range) -> Iterable[Line]:
    """Temporaries take over the registers of those that are read no more, if they can the one
    that the same operator reads first."""
    last = {r: i for i, line in enumerate(lines) for r in (line[1], *inputs_of(line))}
    place = {r: r for r in in_memory}
    free = list(range(REGISTERS - 1, TEMPORARY - 1, -1))
    for i, (operator, to, *_, s, t) in enumerate(lines):
        of = inputs_of(lines[i])
        places = [place[r] for r in of]
        for r in dict.fromkeys(reversed(of)):
            if r not in in_memory and last[r] == i and r != to:
                free.append(place.pop(r))
        if to not in place:
            if not free:
                raise Untraceable(f"it needs more than {REGISTERS - TEMPORARY} temporaries at once")
            place[to] = free.pop()
        a, b, c = (*places, 0, 0, 0)[:3]
        yield operator, place[to], a, b, c, s, t
