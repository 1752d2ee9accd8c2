# SPDX-License-Identifier: BSD-3-Clause
"""The files that `meson install` installs for C and C++ programs, as those programs use them: the
examples are compiled by pkg-config and by CMake, and run. Against the torch of this Python, and
against a libtorch that no Python knows."""

from __future__ import annotations

import json
import re
import shutil
import venv
from pathlib import Path

import pytest
import torch
from installed import (
    ARCHIVE,
    INSTALLED,
    MESON,
    STANDARD,
    TORCH,
    WARNINGS,
    flags_of,
    install,
    output,
    skip_unless_built,
)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples"
RELEASE = ".".join(torch.__version__.split(".")[:2])
LIBRARY = f"liboptfuse_torch-{RELEASE}-cxx11abi1-linux_x86_64.so"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_unless_built()
    return install(INSTALLED, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def libtorch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the zip unpacks: the same files as in a wheel, beside others, and no version.py."""
    root = tmp_path_factory.mktemp("unpacked") / "libtorch"
    root.mkdir()
    for name in ("include", "lib", "share"):
        (root / name).symlink_to(TORCH / name)
    (root / "build-version").write_text(f"{torch.__version__}\n")
    return root


@pytest.fixture(scope="module")
def build_of_libtorch(libtorch: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configured by a Python that has no torch. What is compiled comes from the other build."""
    skip_unless_built()
    folder = tmp_path_factory.mktemp("of_libtorch")
    venv.create(folder / "bare", symlinks=True)
    options = ["-Dshim=enabled", "-Dtests=false", "-Dcuda=disabled", f"-Dtorch_roots={libtorch}"]
    options += [f"-Dtorch_python={folder / 'bare' / 'bin' / 'python'}", "--prefix=/opt/optfuse"]
    output(MESON, "setup", folder / "build", ROOT, *options)
    return folder / "build"


@pytest.fixture(scope="module")
def prefix_of_libtorch(build_of_libtorch: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for file in (ARCHIVE, Path("shim", LIBRARY)):
        shutil.copy(INSTALLED / file, build_of_libtorch / file)
    return install(build_of_libtorch, tmp_path_factory.mktemp("installed"))


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


def build_examples_by_cmake(prefix: Path, torch_root: Path, place: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    if torch.version.cuda is not None:
        pytest.skip("the CMake files of a CUDA build of torch ask for CUDA's toolkit")
    paths = f"-DCMAKE_PREFIX_PATH={torch_root};{prefix}"
    output("cmake", "-S", EXAMPLES, "-B", place, paths)
    output("cmake", "--build", place)
    output(place / "core")
    check_training(place / "train", place)


@pytest.mark.slow
def test_both_are_found_by_cmake_beside_a_libtorch(
    prefix_of_libtorch: Path, libtorch: Path, tmp_path: Path
) -> None:
    build_examples_by_cmake(prefix_of_libtorch, libtorch, tmp_path)
    assert str(libtorch / "lib") in output("readelf", "-d", tmp_path / "train")


@pytest.mark.slow
def test_cmake_finds_it_by_pkg_config_without_the_files_of_torch(
    prefix: Path, tmp_path: Path
) -> None:
    """Those of a CUDA build of torch, which here are played, end CMake."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    torch_files = tmp_path / "Torch"
    torch_files.mkdir()
    (torch_files / "TorchConfig.cmake").write_text('message(FATAL_ERROR "no CUDA libraries")')
    place = next(prefix.rglob("optfuse.pc")).parent
    arguments = [f"-DTorch_DIR={torch_files}", f"-DCMAKE_PREFIX_PATH={prefix}"]
    with pytest.raises(AssertionError, match="no CUDA libraries"):
        output("cmake", "-S", EXAMPLES, "-B", tmp_path / "stopped", *arguments)
    arguments += ["-DBY_PKG_CONFIG=ON", f"-DPKG_CONFIG_ARGN=--with-path={place}"]
    arguments[-1] += f";--define-variable=prefix={prefix}"
    output("cmake", "-S", EXAMPLES, "-B", tmp_path, *arguments)
    output("cmake", "--build", tmp_path)
    check_training(tmp_path / "train", tmp_path)


@pytest.mark.slow
def test_the_shim_is_compiled_with_the_headers_of_the_libtorch(
    build_of_libtorch: Path, libtorch: Path
) -> None:
    """One file of it; the others differ in nothing that concerns the place."""
    commands = json.loads((build_of_libtorch / "compile_commands.json").read_text())
    named = re.compile(rf"shim/{re.escape(LIBRARY)}\.p/.*\.cpp\.o")
    command = next(c["command"] for c in commands if named.fullmatch(c["output"]))
    words = [word.strip("'\"") for word in command.split()]
    words = words[: words.index("-MD")]
    compiler = words.index(next(word for word in words if word.startswith("-I")))
    source = ROOT / "shim" / "cxx" / "classes.cpp"
    command = ["c++", *words[compiler:], "-fsyntax-only", source]
    assert f"{libtorch}/include" in command and str(TORCH) not in " ".join(map(str, command))
    output(*command, cwd=build_of_libtorch)


def test_of_a_libtorch_the_library_is_beside_others_and_there_is_no_python_part(
    prefix_of_libtorch: Path, libtorch: Path
) -> None:
    _, link_flags = flags_of(prefix_of_libtorch, "optfuse")
    library = next(prefix_of_libtorch.rglob(LIBRARY))
    assert f"-L{library.parent}" in link_flags and f"-Wl,-rpath,{libtorch}/lib" in link_flags
    assert library.parent == next(prefix_of_libtorch.rglob("liboptfuse-core.a")).parent
    assert library.with_suffix(".json").is_file()
    assert not list(prefix_of_libtorch.rglob("*.py"))


def test_cmake_says_what_is_missing(prefix: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p C)\n"
        'find_package(optfuse)\nmessage("said: ${optfuse_NOT_FOUND_MESSAGE}")\n'
        "set(Torch_FOUND TRUE)\nset(Torch_VERSION 2.1.3)\n"
        'find_package(optfuse)\nmessage("said: ${optfuse_NOT_FOUND_MESSAGE}")\n'
    )
    said = output("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert "call find_package(Torch) before" in said
    assert f"is for torch {RELEASE}, and find_package(Torch) has found 2.1.3" in said
