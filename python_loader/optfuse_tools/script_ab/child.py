# SPDX-License-Identifier: BSD-3-Clause
"""Runs the script in a fresh process, and reads what its probe has found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optfuse_tools.run.command import HOME, environment_for

LAST_LINES = 12
LEAST_ROOM = 2**16  # bytes; below that a run's end may be that of the disk


class NoRoom(Exception):
    """For what a run writes. Its text says where, and what to do."""


@dataclass(frozen=True)
class Script:
    """The script to run."""

    name: str  # for sentences
    arguments: tuple[str, ...]  # of Python: its flags, -m, the script and what follows
    seed: int
    steps: int | None  # after which it ends; None: at its own end
    fewest_steps: int  # of which a time can be said


@dataclass(frozen=True)
class Variant:
    """How its optimizers are built."""

    name: str
    mode: str = ""  # nothing: by PyTorch
    flags: Sequence[dict[str, bool | None]] = ()  # by optimizer
    fuse: Mapping[str, Any] = field(default_factory=dict)  # as fuse_settings() gives them

    def settings(self) -> dict[str, Any]:
        if not self.mode:
            return {"session": "optfuse_tools.script_ab.probe", "alone": True, "flags": self.flags}
        fusing = {"session": "optfuse_tools.script_ab.fusing", "mode": self.mode}
        return {**fusing, **self.fuse, "flags": []}


@dataclass(frozen=True)
class Run:
    """The outcome of one run."""

    status: int  # of the process
    found: dict[str, Any] | None  # by its probe; None: it made no optimizer, or ended abruptly
    elsewhere: bool  # whether other processes train, too
    output: str  # its last lines

    def ending(self) -> str:
        if self.status < 0:
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"ended with exit status {self.status}"

    def last_words(self) -> str:
        """The last line, or all of an error of ours, in one line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        ours = [i for i, line in enumerate(lines) if line.startswith("optfuse.Error: ")]
        return " ".join(lines[max(ours[-1:] or [len(lines) - 1]) :]) or "it printed nothing"


def run(
    script: Script, variant: Variant, looks: bool, tick: Callable[[], None] = lambda: None
) -> Run:
    """looks: at the parameters after each step. Otherwise steps are timed. tick: called each second
    meanwhile."""
    with tempfile.TemporaryDirectory(prefix="optfuse-ab-", dir=_temporary()) as folder:
        out, elsewhere, output = (Path(folder, name) for name in ("found.json", "else", "output"))
        settings = {
            **variant.settings(),
            "out": str(out),
            "elsewhere": str(elsewhere),
            "parent": os.getpid(),
            "process": None,
            "said": 0,
            "looks": looks,
            "steps": script.steps,
            "seed": script.seed,
            "home": HOME,
            "prefix": sys.prefix,
        }
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *script.arguments],
                env=_environment(settings, script.seed),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            status = _wait(process, tick)
        found = json.loads(out.read_text()) if out.exists() else None
        if (status or found is None) and shutil.disk_usage(folder).free < LEAST_ROOM:
            raise NoRoom(
                f"the disk of {tempfile.gettempdir()} is full, where {script.name}'s output and "
                "times are kept while it runs: make room there, or name another folder by TMPDIR"
            )
        return Run(status, found, elsewhere.exists(), _tail(output))


def _wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    """The exit status."""
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=1.0)
            tick()
    except BaseException:
        process.kill()
        process.wait()
        raise


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:  # which names the folders that were tried
        raise NoRoom(
            f"{error.strerror}: what a run writes is kept in one of these; make room there, or "
            "name a folder that can be written to by TMPDIR"
        ) from error


def _environment(settings: dict[str, Any], seed: int) -> dict[str, str]:
    """Stock runs are stock's even if the script calls fuse()."""
    environment = environment_for(settings)
    environment.setdefault("PYTHONHASHSEED", str(seed % 2**32))
    if settings.get("alone"):
        environment["OPTFUSE_DISABLE"] = "1"
    return environment


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 10_000))
        lines = stream.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])
