# SPDX-License-Identifier: BSD-3-Clause
"""meson-python, told where the commands of this Python's meson and ninja are. It looks for them
on PATH, which has those of a virtual environment only while that is activated."""

import importlib.metadata
import os

from mesonpy import *  # noqa: F403


def _set(variable: str, package: str) -> None:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return  # then the system's is on PATH
    commands = [file.locate() for file in files if file.name == package]
    runnable = [str(path) for path in commands if os.path.isfile(path) and os.access(path, os.X_OK)]
    if runnable:
        os.environ.setdefault(variable, os.path.realpath(runnable[0]))


_set("MESON", "meson")
_set("NINJA", "ninja")
