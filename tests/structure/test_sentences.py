# SPDX-License-Identifier: BSD-3-Clause
"""Docstrings and comments begin with the thing that they are about."""

from __future__ import annotations

import re

import pytest
from tree import ROOT, files, name

FOLDERS = ("benchmarks", "kernels", "plugin", "python_loader", "shim", "tests")
ENDINGS = {"", ".build", ".c", ".cpp", ".cu", ".cuh", ".def", ".h", ".hpp", ".map", ".py"}
OPENER = re.compile(r'\s*("""|/\*+|//+|#:?) *(.*)')
BEGINS = re.compile(r"(Of|What|Which|Whose) ")


def wrong_lines(text: str) -> list[int]:
    """The lines on which a docstring or a comment begins so. A comment goes on in comment lines
    with the same opener."""
    found, before = [], None
    for number, line in enumerate(text.splitlines(), 1):
        opener = OPENER.match(line)
        kind = opener and opener[1]
        if opener and kind != before and BEGINS.match(opener[2]):
            found.append(number)
        before = kind if kind in ("#", "#:", "//") else None
    return found


def test_docstrings_and_comments_name_their_subject_first() -> None:
    wrong, seen = [], 0
    for path in files():
        parts = path.relative_to(ROOT).parts
        if parts[0] in FOLDERS and path.suffix in ENDINGS:
            seen += 1
            wrong += [f"{name(path)}:{n}" for n in wrong_lines(path.read_text("utf-8"))]
    assert seen > 500
    assert not wrong, "say what it is or does, in a sentence of its own: " + ", ".join(wrong)


@pytest.mark.parametrize(
    "text, lines",
    [
        ('def f():\n    """Of a plan."""', [2]),
        ("/* Which of them. */\n", [1]),
        ("int a;\n// A plan.\n// Of one thread.\n\n// What it does.\n", [5]),
        ("#: Whose lock it is.\n# A lock.\n# Of one thread.\n", [1]),
        ('"""The options of one parameter."""\n', []),
    ],
)  # fmt: skip
def test_such_a_beginning_is_found(text: str, lines: list[int]) -> None:
    assert wrong_lines(text) == lines
