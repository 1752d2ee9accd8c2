# SPDX-License-Identifier: BSD-3-Clause
"""`pip install .` finds what it builds with beside the Python that builds, whether that is
activated or not, and torch in the environment that pip hides from it. What is missing is named
with what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tree import LOADER, PACKAGES, ROOT, files

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
LOOK = """
import importlib, mesonpy, os, sys
sys.path.insert(0, sys.argv[1])
backend = importlib.import_module(sys.argv[2])
assert callable(backend.build_wheel) and callable(backend.build_sdist)
print(*mesonpy._get_meson_command(), mesonpy._env_ninja_command())
"""


def test_no_folder_of_a_package_is_installed_with_its_compiled_files() -> None:
    text = (LOADER / "meson.build").read_text("utf-8")
    said = re.findall(r"'(optfuse\w*)': \[([^]]*)\]", text)
    listed = {Path(package, f) for package, names in said for f in re.findall(r"'(.*?)'", names)}
    folders = {path.parent for path in files() if path.suffix == ".py"}
    within = {folder for folder in folders if set(PACKAGES) & set(folder.parents)}
    assert listed == {folder.relative_to(LOADER) for folder in within}


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


def last_words(*command: str | Path, cwd: str | None = None, **variables: str) -> str:
    """The error of a command that fails, without a traceback."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
@pytest.mark.parametrize("variables", [{}, {"CC": "true", "CXX": "ccache nowhere++"}], ids=repr)
def test_a_missing_compiler_is_named(hook: str, variables: dict[str, str]) -> None:
    run = f"import optfuse_build; optfuse_build.{hook}('/nowhere')"
    path = {"PYTHONPATH": str(ROOT / "python_loader"), "PATH": "/bin" if variables else "/nowhere"}
    said = last_words(sys.executable, "-c", run, **path, **variables)
    missing = "no C++ compiler (nowhere++)" if variables else "no C compiler (cc, gcc, clang)"
    assert missing in said and "apt install g++" in said


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_a_source_directory_that_cant_be_written_to_is_named(hook: str) -> None:
    run = f"import optfuse_build; optfuse_build.{hook}('/nowhere')"
    path = {"PYTHONPATH": str(ROOT / "python_loader")}
    said = last_words(sys.executable, "-c", run, cwd="/proc", **path)
    assert "/proc can't be written to" in said and "--config-settings=build-dir=DIR" in said


def test_a_full_disk_is_named() -> None:
    """To a build that takes more than any disk has."""
    run = (
        "import optfuse_build; optfuse_build._ROOM_MB = 1e15; optfuse_build.build_wheel('/nowhere')"
    )
    path = {"PYTHONPATH": str(ROOT / "python_loader")}
    said = last_words(sys.executable, "-c", run, cwd=str(ROOT), **path)
    assert re.search(rf"the disk of {re.escape(str(ROOT))} has \d+ MB left: make room", said)


def test_a_missing_meson_python_is_named() -> None:
    path = {"PYTHONPATH": str(ROOT / "python_loader")}
    said = last_words(sys.executable, "-S", "-c", "import optfuse_build", **path)
    assert "no mesonpy" in said and "pip install meson-python meson ninja" in said


INFO = ROOT / "shim" / "torch_info.py"


def test_an_isolated_build_finds_the_torch_that_pip_hides() -> None:
    import torch

    command = [sys.executable, "-S", str(INFO)]  # without site-packages, as in pip's isolation
    done = subprocess.run(command, capture_output=True, text=True)
    release = ".".join(torch.__version__.split(".")[:2])
    expected = [release, str(Path(torch.__file__).parent), "package"]
    assert done.stdout.split() == expected, done.stderr


def test_a_missing_torch_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    said = last_words(tmp_path / "bare" / "bin" / "python", INFO)
    assert "Install torch first" in said and "pip install --no-build-isolation ." in said


def test_a_directory_without_headers_is_named(tmp_path: Path) -> None:
    assert (
        "neither a torch package, which has a version.py, nor an unpacked libtorch"
        in last_words(sys.executable, INFO, tmp_path)
    )
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\n")
    assert "has no headers" in last_words(sys.executable, INFO, tmp_path)


def test_a_libtorch_is_told_by_its_files_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    libtorch = tmp_path / "libtorch"
    (libtorch / "include" / "torch").mkdir(parents=True)
    assert f"; did you mean {libtorch}?" in last_words(sys.executable, INFO, tmp_path)
    (libtorch / "build-version").write_text("nightly\n")
    assert "build-version names no release" in last_words(sys.executable, INFO, libtorch)
    (libtorch / "build-version").write_text("2.13.0+cpu\n")
    assert "has no lib/libtorch.so" in last_words(sys.executable, INFO, libtorch)
    (libtorch / "lib").mkdir()
    for name in ("libtorch.so", "libtorch_cpu.so", "libc10.so"):
        (libtorch / "lib" / name).touch()
    done = subprocess.run([sys.executable, INFO, libtorch], capture_output=True, text=True)
    assert done.stdout.split() == ["2.13", str(libtorch), "libtorch"], done.stderr
