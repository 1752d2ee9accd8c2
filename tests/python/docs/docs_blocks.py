# SPDX-License-Identifier: BSD-3-Clause
"""The code blocks of README.md and docs/, and what kind each of them is.

A fence names its language. An indented block is commands if each line begins with one, Python if
Python can parse it, else text. So formulas that look like Python stand in a ```text fence."""

import ast
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("pip ", "python -m ", "torchrun ", "benchmarks/run", "tests/run", "tests/gpu/run")
FENCE = "```"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def command(self):
        """How a script of its own is started: its first line, a comment. Or nothing."""
        first = self.text.splitlines()[0]
        is_script = re.fullmatch(r"# (torchrun .*|\w+)\.py", first)
        return first.removeprefix("# ") if is_script else ""


def _kind_of(text):
    """The kind of an indented block."""
    if all(line.startswith(COMMANDS) for line in text.splitlines()):
        return "sh"
    try:
        ast.parse(text)
    except SyntaxError:
        return "text"
    return "python"


def _blocks(page):
    name = str(page.relative_to(ROOT))
    lines = [*page.read_text("utf-8").splitlines(), ""]
    at = 0
    while at < len(lines):
        start = at
        at += 1
        if lines[start].lstrip().startswith(FENCE):
            while not lines[at].lstrip().startswith(FENCE):
                at += 1
            text = textwrap.dedent("\n".join(lines[start + 1 : at]))
            yield Block(name, start + 2, lines[start].strip()[len(FENCE) :], text)
            at += 1
        elif lines[start].startswith("    ") and not lines[start - 1].strip():
            while lines[at].startswith("    ") or "".join(lines[at : at + 2]).startswith("    "):
                at += 1
            text = textwrap.dedent("\n".join(lines[start:at]))
            yield Block(name, start + 1, _kind_of(text), text)


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _words(command):
    """A form such as [--mode backward] with its options."""
    return shlex.split(re.sub(r"[\[\]]", "", command), comments=True)


def commands():
    """Those of blocks and of the prose, as lists of words, by where they stand."""
    for block in BLOCKS:
        if block.kind == "sh":
            yield from ((str(block), _words(line)) for line in block.text.splitlines())
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", page.read_text("utf-8")):
            if code.startswith(COMMANDS):
                yield page.name, _words(code)
