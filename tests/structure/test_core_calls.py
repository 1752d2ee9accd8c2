# SPDX-License-Identifier: BSD-3-Clause
"""Calls between the files of the C core go downwards, and those of planners to the core. Every
file of the core includes internal.h, so the symbols of the compiled objects say who uses what
another one defines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tree import CC, INCLUDES, ROOT, WARNINGS, output, sources

# Circles that are there for a reason: {frozenset of files: the reason}. There are none.
ALLOWED: dict[frozenset[str], str] = {}
CORE = ROOT / "plugin"
PLANNERS = "planners/"
Calls = dict[str, set[str]]


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """The names that an object defines for others, and those that it takes from them."""
    lines = [line.split()[-2:] for line in output("nm", path).splitlines()]
    defined = {name for kind, name in lines if kind.isupper() and kind != "U"}
    return defined, {name for kind, name in lines if kind == "U"}


def compiled(source: Path, folder: Path) -> Path:
    target = folder / source.relative_to(CORE).with_suffix(".o")
    target.parent.mkdir(parents=True, exist_ok=True)
    output(*CC, "-std=gnu11", "-c", *WARNINGS, *INCLUDES, source, "-o", target)
    return target


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """The other files that each file of the core and the planners uses something of."""
    folder = tmp_path_factory.mktemp("core")
    files = [path for path in sources("plugin") if path.suffix == ".c" and path.stem != "guard"]
    objects = [compiled(path, folder) for path in files]
    found = {str(path.relative_to(folder).with_suffix("")): symbols(path) for path in objects}
    home = {name: file for file, (defined, _) in found.items() for name in defined}
    return {
        file: {home[name] for name in used if name in home} - {file}
        for file, (_, used) in found.items()
    }


def reachable(calls: Calls, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for file in calls.get(waiting.pop(), set()) - seen:
            seen.add(file)
            waiting.append(file)
    return seen


def circles(calls: Calls) -> set[frozenset[str]]:
    """Files that reach each other: the strongly connected components of two and more."""
    reached = {file: reachable(calls, file) for file in calls}
    return {
        frozenset({file} | {other for other in reached[file] if file in reached[other]})
        for file in calls
        if file in reached[file]
    }


def test_a_circle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}
    assert circles(graph) == {frozenset("abc")}
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_the_core_has_no_circle_of_files(calls: Calls) -> None:
    assert sum(map(len, calls.values())) > 20, "nothing was found to be used"
    found = circles(calls)
    new = [sorted(circle) for circle in found - ALLOWED.keys()]
    assert not new, f"circles of files in plugin/: {new}; their calls: {calls}"
    assert found == ALLOWED.keys(), "a circle is written down that is not there"


def test_the_core_calls_no_planner_and_planners_only_say_that_they_failed(calls: Calls) -> None:
    planners = {file for file in calls if file.startswith(PLANNERS)}
    assert len(planners) > 10 and len(calls) - len(planners) > 15
    assert not {file for file in calls.keys() - planners if calls[file] & planners}
    assert {other for file in planners for other in calls[file]} - planners == {"error"}


def test_the_order_of_internal_h_is_that_of_the_calls(calls: Calls) -> None:
    text = (ROOT / "plugin" / "internal.h").read_text()
    named = re.findall(r"(?:^/\* |, )(\w+)\.c\b", text[text.index("From here on") :], re.MULTILINE)
    assert len(named) > 15
    place = {file: i for i, file in enumerate(named)}
    upward = [
        f"{file}.c calls {other}.c"
        for file in named
        for other in calls[file]
        if place.get(other, -1) > place[file]
    ]
    assert not upward, upward
