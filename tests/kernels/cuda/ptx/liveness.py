# SPDX-License-Identifier: BSD-3-Clause
"""Liveness: the registers of a function that are read later, at each of its instructions."""

from __future__ import annotations

import re

from ptx_text import Function, Instruction, Label

NO_RESULT = ("st", "bra", "bar", "ret", "call")


def registers(function: Function, text: str) -> list[str]:
    return [name for name in re.findall(r"%\w+", text) if name in function.registers]


def written(function: Function, one: Instruction) -> list[str]:
    return [] if one.parts[0] in NO_RESULT else registers(function, one.operands[0])


def read(function: Function, one: Instruction) -> list[str]:
    """Without the predicate of the instruction itself."""
    operands = one.operands if one.parts[0] in NO_RESULT else one.operands[1:]
    return [name for text in operands for name in registers(function, text)]


def followers(code: list[Instruction], labels: dict[str, int], at: int) -> list[int]:
    one = code[at]
    next_one = [at + 1] if at + 1 < len(code) else []
    if one.parts[0] == "bra":
        return [labels[one.operands[0]], *(next_one if one.guard else [])]
    return next_one if one.parts[0] != "ret" or one.guard else []


def live(function: Function) -> tuple[list[Instruction], list[set[str]], list[set[str]]]:
    """The instructions, what is live before each, and what behind it."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in function.body:
        if isinstance(statement, Label):
            labels[statement.name] = len(code)
        elif isinstance(statement, Instruction):
            code.append(statement)
    before: list[set[str]] = [set() for _ in range(len(code) + 1)]
    behind: list[set[str]] = [set() for _ in code]
    changed = True
    while changed:
        changed = False
        for at in range(len(code) - 1, -1, -1):
            one = code[at]
            behind[at] = set().union(*(before[i] for i in followers(code, labels, at)))
            kept = behind[at] if one.guard else behind[at] - set(written(function, one))
            now = kept | set(read(function, one)) | ({one.guard} if one.guard else set())
            changed |= now != before[at]
            before[at] = now
    return code, before[:-1], behind
