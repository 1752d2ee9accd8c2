# SPDX-License-Identifier: BSD-3-Clause
"""Pytest in interpreters that have torch imported already, as have those that its tests start.
All are forks of two processes, so that a run of all sections imports torch twice, where each
section imported it twice. The differences to an interpreter that was started are those of
forked_python.py."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

import forked_python

# As `python -m pytest ...`.
PYTEST = """
import os, runpy, sys
sys.path[0], sys.argv[1:] = os.getcwd(), {arguments!r}
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""


class Interpreters:
    def __init__(self, python: Path, environment: dict[str, str]) -> None:
        """All sections share the variables that torch reads when it is imported."""
        self._name = f"optfuse-tests-{os.getpid()}"
        self._lock = threading.Lock()  # guards the number
        self._number = 0
        self._roots = [
            forked_python.begin(f"{self._name}-pytest", python, environment),
            forked_python.begin(
                f"{self._name}-scripts", python, environment | forked_python.ONE_THREAD
            ),
        ]

    def pytest(
        self, arguments: list[str], cwd: Path, environment: dict[str, str]
    ) -> tuple[int, str, float]:
        """Its status, what it printed, and the seconds of processors that it, its tests'
        interpreters, and the processes they have waited for took."""
        with self._lock:
            self._number += 1
            name = f"{self._name}-{self._number}"
        scripts = _Scripts(forked_python.serving(name, cwd, environment), f"{self._name}-scripts")
        there = environment | {forked_python.GIVEN: name}
        code = PYTEST.format(arguments=arguments)
        child, output = _started(forked_python.coded(code, cwd, there), f"{self._name}-pytest")
        with open(output, errors="replace") as lines:
            printed = lines.read()
        status = child.wait()
        return status, printed, child.seconds + scripts.end()

    def end(self) -> None:
        for root in self._roots:
            root.stdin.close()
            root.wait()


class _Scripts:
    """A process that forks the interpreters of one section's tests."""

    def __init__(self, request: dict[str, object], root: str) -> None:
        read, self._input = os.pipe()
        self._child, output = _started(request, root, read)
        os.close(read)
        os.read(output, 1)  # it listens
        os.close(output)

    def end(self) -> float:
        os.close(self._input)
        self._child.wait()
        return self._child.seconds


def _started(
    request: dict[str, object], root: str, stdin: int | None = None
) -> tuple[forked_python.Child, int]:
    """A fork of the root, and the end of a pipe that has its output."""
    output, written = os.pipe()
    with open(os.devnull) as nothing:
        files = [nothing.fileno() if stdin is None else stdin, written, written]
        child = forked_python.Child(request, files, forked_python.address_of(root))
    os.close(written)
    return child, output
