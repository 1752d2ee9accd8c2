# SPDX-License-Identifier: BSD-3-Clause
"""`pip install --no-build-isolation .` needs no activated environment: what it builds with
is found beside the Python that builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tree import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
LOOK = """
import importlib, mesonpy, os, sys
sys.path.insert(0, sys.argv[1])
backend = importlib.import_module(sys.argv[2])
assert callable(backend.build_wheel) and callable(backend.build_sdist)
print(*mesonpy._get_meson_command(), mesonpy._env_ninja_command())
"""


def setting(name: str) -> str:
    found = re.search(rf'^{name} = \[?"(.+?)"', PYPROJECT, re.MULTILINE)
    assert found, f"pyproject.toml has no {name}"
    return found[1]


def commands(**variables: str) -> list[str]:
    """The meson and the ninja that the backend takes where PATH has neither."""
    arguments = [str(ROOT / setting("backend-path")), setting("build-backend")]
    kept = {k: v for k, v in os.environ.items() if k not in ("MESON", "NINJA")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *arguments],
        env={**kept, "PATH": "/nowhere", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_meson_and_ninja_are_found_beside_this_python() -> None:
    for command, name in zip(commands(), ("meson", "ninja"), strict=True):
        assert os.path.basename(command) == name and os.access(command, os.X_OK)


def test_what_the_environment_names_is_taken(tmp_path: Path) -> None:
    links = [tmp_path / f"my-{name}" for name in ("meson", "ninja")]
    for link, command in zip(links, commands(), strict=True):
        link.symlink_to(command)
    mine = [str(link) for link in links]
    assert commands(MESON=mine[0], NINJA=mine[1]) == mine
