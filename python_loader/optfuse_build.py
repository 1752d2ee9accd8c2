# SPDX-License-Identifier: BSD-3-Clause
"""meson-python, told where the commands of this Python's meson and ninja are: it looks for them
on PATH, which has those of a virtual environment only while that is activated. What a build
needs and this machine has not is named before meson starts."""

import importlib.metadata
import os
import shutil
import sys
import tempfile

try:
    import mesonpy
    from mesonpy import *  # noqa: F403
except ModuleNotFoundError as missing:
    sys.exit(
        f"optfuse is built with meson-python, and {sys.executable} has no {missing.name}: "
        "pip install meson-python meson ninja, or leave out --no-build-isolation"
    )

_ROOM_MB = 100  # a build takes half of it
_COMPILERS = {"CC": ("C", "cc", "gcc", "clang"), "CXX": ("C++", "c++", "g++", "clang++")}


def _set(variable: str, package: str) -> None:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return  # then the system's is on PATH
    commands = [file.locate() for file in files if file.name == package]
    runnable = [str(path) for path in commands if os.path.isfile(path) and os.access(path, os.X_OK)]
    if runnable:
        os.environ.setdefault(variable, os.path.realpath(runnable[0]))


def _check_compilers() -> None:
    for variable, (language, *names) in _COMPILERS.items():
        named = os.environ.get(variable, "").split()
        # A variable such as CC="ccache gcc" names the compiler in its last word that is no option.
        names = [word for word in named if not word.startswith("-")][-1:] or names
        if not any(map(shutil.which, names)):
            sys.exit(
                f"optfuse is compiled, and there is no {language} compiler ({', '.join(names)}): "
                "install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++). "
                "A wheel of optfuse needs none"
            )


def _check_checkout(settings):
    """The build directory is in it, if no other is named."""
    if {"build-dir", "builddir"} & set(settings or ()):
        return
    try:
        tempfile.TemporaryDirectory(prefix=".mesonpy-", dir=".").cleanup()
    except OSError as error:
        sys.exit(
            f"optfuse is compiled in its source directory, and {os.getcwd()} can't be written to "
            f"({error.strerror}): copy the directory to where you may write, or name another place "
            "for the build by --config-settings=build-dir=DIR. A wheel of optfuse needs neither"
        )
    _check_room(os.getcwd(), tempfile.gettempdir())  # of the compilers' files


def _check_room(*directories):
    """A build that runs into a full disk ends with a traceback of meson's."""
    for directory in directories:
        free_mb = shutil.disk_usage(directory).free // 10**6
        if free_mb < _ROOM_MB:
            sys.exit(
                f"optfuse is compiled, which takes {_ROOM_MB} MB in the source directory and in "
                f"TMPDIR, and the disk of {directory} has {free_mb} MB left: make room, or copy "
                "the directory to, and set TMPDIR to, where there is some. A wheel of optfuse "
                "takes less"
            )


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _check_compilers()
    _check_checkout(config_settings)
    return mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _check_compilers()
    _check_checkout(config_settings)
    return mesonpy.build_editable(wheel_directory, config_settings, metadata_directory)


_set("MESON", "meson")
_set("NINJA", "ninja")
