# SPDX-License-Identifier: BSD-3-Clause
"""Where things are, for the tests in this directory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LOADER = ROOT / "python_loader"
PACKAGES = [LOADER / name for name in ("optfuse", "optfuse_layers", "optfuse_tools")]
CC = os.environ.get("CC", "cc").split()
CXX = os.environ.get("CXX", "c++").split()
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion"]
INCLUDES = [f"-I{ROOT / layer}" for layer in ("kernels", "plugin", "shim")]


SOURCES = {".c", ".h", ".cpp", ".hpp", ".cu"}  # endings


def sources(*layers: str) -> list[Path]:
    """The C and C++ files of these directories."""
    return sorted(
        path for layer in layers for path in (ROOT / layer).rglob("*") if path.suffix in SOURCES
    )


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files() -> list[Path]:
    """Every file that is part of the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]


def modules() -> list[Path]:
    """Those of our packages."""
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


def package() -> Path:
    """The installed package, without importing it."""
    spec = importlib.util.find_spec("optfuse")
    assert spec is not None and spec.submodule_search_locations, "optfuse is not installed"
    return Path(spec.submodule_search_locations[0])


def library() -> Path:
    found = sorted(package().glob("liboptfuse_torch-*.so"))
    assert len(found) == 1, f"one library is expected in {package()}, found {found}"
    return found[0]


def output(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed: {done.stderr}"
    return done.stdout
