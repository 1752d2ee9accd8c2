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


Ways = dict[int, bool]  # of predicated instructions: whether they are always done, or never


def followers(code: list[Instruction], labels: dict[str, int], at: int, ways: Ways) -> list[int]:
    one, way = code[at], ways.get(at)
    jump = [labels[one.operands[0]]] if one.parts[0] == "bra" and way is not False else []
    stays = one.parts[0] not in ("bra", "ret") or (one.guard and way is not True)
    return [*jump, at + 1] if stays and at + 1 < len(code) else jump


def loop_heads(function: Function) -> set[int]:
    """The instructions to which a later one jumps."""
    labels: dict[str, int] = {}
    heads, at = set(), 0
    for statement in function.body:
        if isinstance(statement, Label):
            labels[statement.name] = at
        elif isinstance(statement, Instruction):
            if statement.parts[0] == "bra" and statement.operands[0] in labels:
                heads.add(labels[statement.operands[0]])
            at += 1
    return heads


def live(function: Function, ways: Ways | None = None
         ) -> tuple[list[Instruction], list[set[str]], list[set[str]]]:  # fmt: skip
    """The instructions, what is live before each, and what behind it; where `ways` says which
    way is always gone, on that way only."""
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
            behind[at] = set().union(*(before[i] for i in followers(code, labels, at, ways or {})))
            kept = behind[at] if one.guard else behind[at] - set(written(function, one))
            now = kept | set(read(function, one)) | ({one.guard} if one.guard else set())
            changed |= now != before[at]
            before[at] = now
    return code, before[:-1], behind
