# SPDX-License-Identifier: BSD-3-Clause
"""Reads PTX: the functions of a file, their registers and their statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "f32": 32, "b64": 64, "f64": 64}
HEAD = re.compile(r"(?:\.visible |\.weak )?\.(entry|func)\b(.*?)([;{])", re.DOTALL)
POINTER = r"(?:\.ptr (?:\.\w+ )?\.align \d+ )?"
PARAMETER = re.compile(rf"\.param (?:\.align (\d+) )?\.([bfsu])(\d+) {POINTER}(\w+)(?:\[(\d+)\])?")
SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]")
# Shared memory of which the launch says how much there is.
DYNAMIC = re.compile(r"^\.extern \.shared \.align \d+ \.b8 (\w+)\[\];$", re.MULTILINE)
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
IGNORED = (".pragma", ".loc")


class PtxError(Exception):
    pass


@dataclass(frozen=True)
class Parameter:
    name: str
    bytes: int
    align: int


@dataclass(frozen=True)
class Instruction:
    line: int
    op: str
    operands: tuple[str, ...]
    guard: str = ""  # the predicate's register
    negated: bool = False

    @property
    def parts(self) -> list[str]:
        return self.op.split(".")


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Local:
    """A variable of a call's arguments; alive in the scope around it."""

    name: str


@dataclass(frozen=True)
class Scope:
    opens: bool


Statement = Instruction | Label | Local | Scope


@dataclass
class Function:
    name: str
    kernel: bool
    parameters: list[Parameter]
    result: str = ""
    registers: dict[str, str] = field(default_factory=dict)  # name: type
    shared: dict[str, int] = field(default_factory=dict)  # name: place
    shared_bytes: int = 0
    dynamic: list[str] = field(default_factory=list)  # names of the launch's shared memory
    body: list[Statement] = field(default_factory=list)


def operands(text: str) -> tuple[str, ...]:
    """Splits at commas outside of brackets."""
    found = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,{\[(])+", text)
    return tuple(part.strip() for part in found if part.strip())


def pieces(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Statements without their semicolons, labels with their colons, and braces."""
    token = re.compile(r"\s*(\{|\}|\$?\w+:(?!:)|[^;{}]*(?:\{[^}]*\}[^;{}]*)*;)")
    at = 0
    while match := token.match(text, at):
        line += text.count("\n", at, match.start(1))
        yield line, match[1].removesuffix(";").strip()
        line += match[1].count("\n")
        at = match.end()
    if text[at:].strip():
        raise PtxError(f"line {line}: {text[at:].strip()[:80]!r}")


def declare_registers(function: Function, text: str) -> None:
    match = re.match(r"\.reg \.(\w+)\s+(.*)", text, re.DOTALL)
    if not match or match[1] not in WIDTHS:
        raise PtxError(f"unknown registers: {text}")
    for name in (word.strip() for word in match[2].split(",")):
        many = re.fullmatch(r"(%\w+?)<(\d+)>", name)
        names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        for one in names:
            if function.registers.setdefault(one, match[1]) != match[1]:
                raise PtxError(f"{function.name}: {one} has two types")


def declare_shared(function: Function, text: str) -> None:
    match = SHARED.match(text)
    if not match:
        raise PtxError(f"unknown declaration: {text}")
    align = int(match[1])
    place = (function.shared_bytes + align - 1) // align * align
    function.shared[match[2]] = place
    function.shared_bytes = place + int(match[3])


def add(function: Function, line: int, piece: str) -> None:
    if piece in "{}":
        function.body.append(Scope(piece == "{"))
    elif piece.endswith(":"):
        function.body.append(Label(piece[:-1]))
    elif piece.startswith(".reg"):
        declare_registers(function, piece)
    elif piece.startswith(".shared"):
        declare_shared(function, piece)
    elif piece.startswith(".param"):
        function.body.append(Local(piece.split()[-1]))
    elif not piece.startswith(IGNORED):
        match = STATEMENT.fullmatch(piece)
        if not match:
            raise PtxError(f"line {line}: {piece!r}")
        guard, negated = match[2] or "", match[1] == "!"
        function.body.append(Instruction(line, match[3], operands(match[4]), guard, negated))


def end_of(text: str, at: int) -> int:
    """Behind the brace that closes the one before `at`."""
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def parameters(head: str) -> list[Parameter]:
    return [
        Parameter(name, int(width) // 8 * int(count or 1), int(align or int(width) // 8))
        for align, _, width, name, count in PARAMETER.findall(head)
    ]


def functions(text: str) -> list[Function]:
    """All that have a body."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    dynamic = DYNAMIC.findall(text)
    text = DYNAMIC.sub("", text)
    found: list[Function] = []
    at = 0
    while match := HEAD.search(text, at):
        if re.search(r"^\.(global|const|extern)", text[at : match.start()], re.MULTILINE):
            raise PtxError("variables of a module")
        at = match.end()
        if match[3] == ";":
            continue
        head = re.fullmatch(r"\s*(?:\((.*?)\))?\s*(\w+)\s*(?:\((.*?)\))?.*", match[2], re.DOTALL)
        if not head:
            raise PtxError(f"a function's head: {match[2]!r}")
        made = Function(head[2], match[1] == "entry", parameters(head[3] or ""))
        made.result = parameters(head[1])[0].name if head[1] else ""
        end = end_of(text, at)
        words = set(re.findall(r"\w+", text[at:end]))
        made.dynamic = [name for name in dynamic if name in words]
        for line, piece in pieces(text[at : end - 1], text.count("\n", 0, at) + 1):
            add(made, line, piece)
        found.append(made)
        at = end
    return found
