# SPDX-License-Identifier: BSD-3-Clause
"""Translates PTX to C as translate.py does, one kernel of it with all its mutants: which one runs
is chosen at run time (mutation.h).

    mutate.py PTX KERNEL OUT [SAMPLE SEED]

Of each instruction: every register exchanged with every other live one of its type, immediates
+-1 and +-4, the predicate negated and removed, other roundings, barriers removed, and stores
dropped, a vector's one element at a time."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from liveness import live, registers
from ptx_text import Function, Instruction, functions
from translate import Writer

ROUNDINGS = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
WHOLE = ("rni", "rzi", "rmi")
IMMEDIATE = re.compile(r"(?<![%\w])(-?\d+|0[fF]\w{8}|0[dD]\w{16})(?![\w])")
JUMPS = ("bra", "ret", "bar")


@dataclass(frozen=True)
class Mutant:
    at: int  # the instruction's place in the function
    kind: str
    what: str
    one: Instruction | None = None  # instead of it; None: left out
    rounding: str = ""


def text_of(one: Instruction) -> str:
    guard = f"@{'!' if one.negated else ''}{one.guard} " if one.guard else ""
    return f"{guard}{one.op} {', '.join(one.operands)}"


def with_operand(one: Instruction, index: int, text: str) -> Instruction:
    changed = (*one.operands[:index], text, *one.operands[index + 1 :])
    return replace(one, operands=changed)


def exchanged(function: Function, one: Instruction, before: set[str], behind: set[str]
              ) -> Iterator[Instruction]:  # fmt: skip
    """With another live register."""
    for index, operand in enumerate(one.operands):
        result = index == 0 and one.parts[0] not in ("st", *JUMPS)
        for match in re.finditer(r"%\w+", operand):
            if match[0] not in function.registers:
                continue
            kind = function.registers[match[0]]
            for other in sorted(behind if result else before):
                if function.registers[other] == kind and other not in registers(function, operand):
                    text = operand[: match.start()] + other + operand[match.end() :]
                    yield with_operand(one, index, text)
    for other in sorted(before) if one.guard else ():
        if function.registers[other] == "pred" and other != one.guard:
            yield replace(one, guard=other)


def shifted(text: str, by: int) -> str:
    if text[:2].lower() in ("0f", "0d"):
        digits = len(text) - 2
        return f"{text[:2]}{(int(text[2:], 16) + by) % 16**digits:0{digits}X}"
    return str(int(text) + by)


def with_immediates(one: Instruction) -> Iterator[Instruction]:
    if one.parts[0] in JUMPS:
        return
    for index, operand in enumerate(one.operands):
        for match in IMMEDIATE.finditer(operand):
            for by in (-4, -1, 1, 4):
                text = operand[: match.start()] + shifted(match[0], by) + operand[match.end() :]
                yield with_operand(one, index, text)


def without_elements(one: Instruction) -> Iterator[Instruction | None]:
    """A store, less a lane."""
    elements = re.findall(r"[^{},\s]+", one.operands[1])
    for lane in range(len(elements)):
        yield replace(one, op=f"{one.op}.without{lane}") if len(elements) > 1 else None


def mutants_of(function: Function) -> Iterator[Mutant]:
    code, before, behind = live(function)
    for at, one in enumerate(code):
        for other in exchanged(function, one, before[at], behind[at]):
            yield Mutant(at, "operand", f"{text_of(one)} -> {text_of(other)}", other)
        for other in with_immediates(one):
            yield Mutant(at, "immediate", f"{text_of(one)} -> {text_of(other)}", other)
        if one.guard:
            negated = replace(one, negated=not one.negated)
            yield Mutant(at, "predicate", f"{text_of(one)}: negated", negated)
            yield Mutant(at, "predicate", f"{text_of(one)}: removed", replace(one, guard=""))
        if "rn" in one.parts:
            for name in ("rz", "rm", "rp"):
                what = f"{text_of(one)}: {name}"
                if one.op == "cvt.rn.bf16.f32":  # is not computed by what the mode rounds
                    yield Mutant(at, "rounding", what, replace(one, op=f"cvt.{name}.bf16.f32"))
                else:
                    yield Mutant(at, "rounding", what, one, ROUNDINGS[name])
        for name in WHOLE if one.parts[0] == "cvt" else ():
            if name not in one.parts and one.parts[1] in WHOLE and one.parts[2:] == ["f32", "f32"]:
                op = ".".join(["cvt", name, *one.parts[2:]])
                yield Mutant(at, "rounding", f"{text_of(one)}: {name}", replace(one, op=op))
        if one.parts[0] == "bar":
            yield Mutant(at, "barrier", f"{text_of(one)}: removed")
        if one.parts[0] == "st":
            for less in without_elements(one):
                yield Mutant(at, "store", f"{text_of(one)}: a lane dropped", less)


class MutantWriter(Writer):
    """Each instruction asks whether it is the one that is not as it was."""

    def __init__(self, function: Function, sample: int = 0, seed: int = 0) -> None:
        super().__init__(function)
        self.mutants = list(mutants_of(function))
        if sample:
            self.mutants = random.Random(seed).sample(self.mutants, sample)
        self.by_place: dict[int, list[tuple[int, Mutant]]] = {}
        for number, mutant in enumerate(self.mutants):
            self.by_place.setdefault(mutant.at, []).append((number, mutant))
        self.apart: list[str] = []  # functions of the mutants
        self.next = 0

    def condition(self, one: Instruction) -> str:
        return f"{'!' if one.negated else ''}{self.register(one.guard)}" if one.guard else "true"

    def access(self, one: Instruction) -> str:
        match = re.search(r"\.without(\d)$", one.op)
        if not match:
            return super().access(one)
        text = super().access(replace(one, op=one.op[: match.start()]))
        puts = re.findall(r" ptx_put_\w+\([^;]*\);", text)
        return text.replace(puts[int(match[1])], "")

    def mutated(self, mutant: Mutant) -> str:
        if not mutant.one:
            return ";"
        if not mutant.rounding:
            return self.effect(mutant.one)
        kind = mutant.one.parts[-1]
        first = mutant.one.operands[0]
        return (
            f"fesetround({mutant.rounding}); {self.effect(mutant.one)} fesetround(FE_TONEAREST); "
            f"(void){self.operand(first)}; /* {kind} */"
        )

    def write_apart(self, at: int, one: Instruction) -> None:
        name = f"{self.function.name}_{at}"
        head = f"struct {self.function.name}_registers *R"
        mine = self.by_place.get(at, [])
        guards = [
            f"case {number}: return {self.condition(mutant.one)};"
            for number, mutant in mine
            if mutant.one and one.guard and (mutant.one.guard, mutant.one.negated)
            != (one.guard, one.negated)
        ]  # fmt: skip
        if one.guard:
            self.apart.append(
                f"static bool {name}_guard({head}) {{ switch (ptx_mutation.number) "
                f"{{ {' '.join(guards)} default: return {self.condition(one)}; }} }}"
            )
        if one.parts[0] in JUMPS:
            return
        effects = [
            f"case {number}: {{ {self.mutated(mutant)} }} break;"
            for number, mutant in mine
            if not mutant.one or mutant.one.operands != one.operands or mutant.one.op != one.op
            or mutant.rounding
        ]  # fmt: skip
        self.apart.append(
            f"static __attribute__((noinline)) void {name}({head}) {{ switch (ptx_mutation.number) "
            f"{{ {' '.join(effects)} default: {self.effect(one)} }} }}"
        )

    def instruction(self, one: Instruction) -> str:
        at, self.next = self.next, self.next + 1
        name = f"{self.function.name}_{at}"
        self.write_apart(at, one)
        changed = f"ptx_mutation.place == {at}"
        if one.parts[0] == "bar":
            return f"if (!({changed})) {self.effect(one)}"
        effect = self.effect(one)
        if one.parts[0] not in JUMPS:
            effect = f"{{ if ({changed}) {name}(R); else {effect} }}"
        if one.parts[1:] == ["pred"] and len(one.operands) == 3:
            first, second = (self.operand(text) for text in one.operands[1:])
            effect = f"ptx_mutation.pairs[{at}] |= 1 << (2 * {first} + {second}); {effect}"
        effect = f"{{ ptx_mutation.executed[{at}] = 1; {effect} }}"
        if not one.guard:
            return effect
        guard = f"{changed} ? {name}_guard(R) : {self.condition(one)}"
        return f"if (ptx_reached({at}, {guard})) {effect}"

    def between(self) -> list[str]:
        return self.apart

    def text(self) -> str:
        table = [f'{{{mutant.at}, "{mutant.kind}", "{mutant.what}"}},' for mutant in self.mutants]
        return "\n".join([
            super().text(),
            "const ptx_mutant ptx_mutants[] = {", *table, "};",
            f"const int ptx_n_mutants = {len(self.mutants)}, ptx_n_places = {self.next};",
            f'const char ptx_mutated[] = "{self.function.name}";', "",
        ])  # fmt: skip


def main() -> None:
    source, kernel, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    sample, seed = map(int, sys.argv[4:6]) if len(sys.argv) > 4 else (0, 0)
    writers: list[Writer] = [
        MutantWriter(one, sample, seed) if one.name == kernel else Writer(one)
        for one in functions(source.read_text("utf-8"))
    ]
    heads = [f"{writer.head()};" for writer in writers]
    texts = [writer.text() for writer in writers]
    out.write_text("\n".join(['#include "mutation.h"', *heads, *texts]), "utf-8")


if __name__ == "__main__":
    main()
