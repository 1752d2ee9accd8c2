# SPDX-License-Identifier: BSD-3-Clause
"""Pages that speak of the sources: messages are the library's, tests are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from tree import ROOT, files

TROUBLES = ROOT / "docs" / "troubleshooting.md"
HAZARDS = ROOT / "docs" / "hazards.md"
LAYERS = ("kernels", "plugin", "shim", "python_loader")
# PyTorch's and pip's own, and the tests in which they are raised or kept from being.
NOT_OURS = {
    "is not a supported wheel on this platform": "test_pip_refuses_a_wheel_for_another_system",
    "one of the variables needed for gradient computation has been modified by an inplace operation"
    "": "test_retain_graph_and_backward_again_is_refused",
    "CUDA error: an illegal memory access was encountered": "test_a_rate_on_one_of_two_devices",
}


@cache
def texts() -> str:
    """The sources, with strings that go on in the next line, or argument, in one piece."""
    found = [
        path.read_text("utf-8")
        for path in files()
        if path.relative_to(ROOT).parts[0] in LAYERS
        and (path.suffix in {".c", ".cpp", ".h", ".py"} or path.name == "meson.build")
    ]
    joined = re.sub(r"""["'],?\s*\n\s*f?["']""", "", "\n".join(found))
    return joined.replace('\\"', '"')


@cache
def known_tests() -> set[str]:
    """And deeds, each of which is played by tests/python/programs/test_each.py."""
    found = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(found), re.MULTILINE))
    folder = ROOT / "tests" / "python" / "programs" / "deeds"
    deeds = [path.read_text("utf-8") for path in folder.glob("*.py")]
    return tests | set(re.findall(r"^def (\w+)\(world", "\n".join(deeds), re.MULTILINE))


def rows(page: Path) -> list[list[str]]:
    """The cells of its tables, without their heads."""
    lines = page.read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in x.strip("|").split(" | ")] for x in lines if x[:2] == "| "]
    return [row for row in cells if row[0] not in ("message", "you")]


def pieces(message: str) -> list[str]:
    """The words between a message's gaps, as they stand in the sources."""
    found = [piece.strip(" :,;()'") for piece in message.removeprefix("optfuse: ").split("...")]
    return [piece for piece in found if len(piece) > 3]


@pytest.mark.parametrize("row", rows(TROUBLES), ids=lambda row: row[0][1:50])
def test_each_message_is_in_the_sources(row: list[str]) -> None:
    message, *rest = row
    assert message[0] == message[-1] == "`" and len(rest) == 2 and all(rest), row
    if message.strip("`") in NOT_OURS:
        assert NOT_OURS[message.strip("`")] in known_tests()
        return
    missing = [piece for piece in pieces(message.strip("`")) if piece not in texts()]
    assert pieces(message.strip("`")) and not missing, f"nothing in the sources says {missing}"


def test_a_message_that_nobody_says_is_found() -> None:
    (first, second) = pieces("this optimizer is ... already melted")
    assert first in texts() and second not in texts()


@pytest.mark.parametrize("row", rows(HAZARDS), ids=lambda row: row[0][:50])
def test_each_row_names_its_tests(row: list[str]) -> None:
    if len(row) == 2:  # the words
        return
    you, _, *outcomes, named = row
    assert len(outcomes) == 2 and you and all(outcomes), row
    names = re.findall(r"`(\w+)`", named)
    assert names and set(names) <= known_tests(), f"there is no {set(names) - known_tests()}"
