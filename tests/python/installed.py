# SPDX-License-Identifier: BSD-3-Clause
"""The files that `meson install` installs for C and C++ programs, and how these are built against
it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bootstrap import INSTALLED

TORCH = Path(torch.__file__).parent
MESON = Path(sys.executable).with_name("meson")
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion"]
STANDARD = "c++20" if torch.__version__ >= (2, 14) else "c++17"  # as shim/meson.build
QUIET = {"OMP_WAIT_POLICY": "passive"}
ARCHIVE = Path("shim", "packaging", "liboptfuse-core.a")


def output(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}"
    return done.stdout


def skip_unless_built() -> None:
    if not (INSTALLED / ARCHIVE).is_file():
        pytest.skip(f"{INSTALLED / ARCHIVE} is not built; tests/run builds it")


def install(build: Path, top: Path) -> Path:
    """The prefix, below top: without optfuse's Python part being of any use there."""
    tags = "devel,runtime,python-runtime"
    output(MESON, "install", "--no-rebuild", "-C", build, "--destdir", top, "--tags", tags)
    return next(top.rglob("include/optfuse")).parent.parent


def flags_of(prefix: Path, package: str) -> tuple[list[str], list[str]]:
    """Those of the compiler, and of the linker."""
    place = next(prefix.rglob("optfuse-core.pc")).parent
    command = ["pkg-config", f"--define-variable=prefix={prefix}", f"--with-path={place}"]
    cflags, libs = (output(*command, what, package).split() for what in ("--cflags", "--libs"))
    return cflags, libs
