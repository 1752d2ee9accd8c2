# SPDX-License-Identifier: BSD-3-Clause
"""What `meson install` installs for C and C++ programs, as those programs use it: the examples are
compiled by pkg-config and by CMake, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bootstrap import INSTALLED, ROOT

EXAMPLES = ROOT / "docs" / "examples"
TORCH = Path(torch.__file__).parent
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion"]
STANDARD = "c++20" if torch.__version__ >= (2, 14) else "c++17"  # as shim/meson.build
QUIET = {"OMP_WAIT_POLICY": "passive"}


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


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything is installed, without optfuse's Python part being of any use there."""
    archive = INSTALLED / "shim" / "packaging" / "liboptfuse-core.a"
    if not archive.is_file():
        pytest.skip(f"{archive} is not built; tests/run builds it")
    top = tmp_path_factory.mktemp("installed")
    tags = "devel,runtime,python-runtime"
    meson = Path(sys.executable).with_name("meson")
    arguments = ["install", "--no-rebuild", "-C", INSTALLED, "--destdir", top, "--tags", tags]
    output(meson, *arguments)
    return next(top.rglob("include/optfuse")).parent.parent


def flags_of(prefix: Path, package: str) -> tuple[list[str], list[str]]:
    place = next(prefix.rglob("optfuse-core.pc")).parent
    command = ["pkg-config", f"--define-variable=prefix={prefix}", f"--with-path={place}"]
    return tuple(output(*command, what, package).split() for what in ("--cflags", "--libs"))


def check_training(program: Path, place: Path) -> None:
    """Both modes train, and train the same."""
    forward, backward = output(program, cwd=place), output(program, "backward", cwd=place)
    assert "400 updates" in forward and forward == backward
    assert (place / "net.pt").stat().st_size > 0 and (place / "opt.pt").stat().st_size > 0


def test_the_core_alone_is_found_by_pkg_config(prefix: Path, tmp_path: Path) -> None:
    compile_flags, link_flags = flags_of(prefix, "optfuse-core")
    program = tmp_path / "core"
    source = EXAMPLES / "core.c"
    output("cc", "-std=c11", *WARNINGS, source, *compile_flags, *link_flags, "-o", program)
    assert "798 of 800 updates ran at their first use" in output(program)


def test_the_installed_headers_compile_alone(prefix: Path) -> None:
    """Whichever is included first, as C and as C++."""
    flags, _ = flags_of(prefix, "optfuse-core")
    for header in (prefix / "include" / "optfuse").rglob("*.h"):
        for language in (["cc", "-xc", "-std=c11"], ["c++", "-xc++", "-std=c++17"]):
            output(*language, *WARNINGS, *flags, "-fsyntax-only", "-include", header, "/dev/null")


@pytest.mark.slow
def test_optfuse_hpp_is_found_by_pkg_config(prefix: Path, tmp_path: Path) -> None:
    compile_flags, link_flags = flags_of(prefix, "optfuse")
    program = tmp_path / "train"
    compiler = ["c++", f"-std={STANDARD}", *WARNINGS]
    output(*compiler, EXAMPLES / "train.cpp", *compile_flags, *link_flags, "-o", program)
    check_training(program, tmp_path)
    assert "libpython" not in output("ldd", program)


@pytest.mark.slow
def test_both_are_found_by_cmake(prefix: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    paths = f"-DCMAKE_PREFIX_PATH={TORCH};{prefix}"
    flags = f"-DCMAKE_CXX_FLAGS=-std={STANDARD}"
    output("cmake", "-S", EXAMPLES, "-B", tmp_path, paths, flags)
    output("cmake", "--build", tmp_path)
    output(tmp_path / "core")
    check_training(tmp_path / "train", tmp_path)


def test_cmake_says_what_is_missing(prefix: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p C)\n"
        'find_package(optfuse)\nmessage("said: ${optfuse_NOT_FOUND_MESSAGE}")\n'
    )
    said = output("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert "call find_package(Torch) before" in said
