# SPDX-License-Identifier: BSD-3-Clause
"""Programs in C++ without Python, compiled against torch's wheel for AArch64: the tests of
optfuse.hpp, and the example of docs/."""

from __future__ import annotations

from pathlib import Path

import bootstrap
import emulation
from emulated_torch import LIBRARIES, LIBRARY, SITE, THREADS
from emulation import BUILD

TESTS = BUILD / "test_cxx"
EXAMPLE = BUILD / "train"
PROGRAMS = {
    "tests of optfuse.hpp": [TESTS],
    "random programs with optfuse.hpp": [TESTS, "hazard", "100"],
    "example in C++": [EXAMPLE],
}
_INCLUDE = BUILD / "include"


def compile_command(source: Path, program: Path) -> list[str]:
    torch, shim = SITE / "torch", bootstrap.ROOT / "shim" / "cxx"
    installed = _INCLUDE / "optfuse"
    if not installed.is_symlink():
        _INCLUDE.mkdir(exist_ok=True)
        installed.symlink_to(shim)
    folders = [shim, _INCLUDE, torch / "include", torch / "include/torch/csrc/api/include"]
    folders += [bootstrap.ROOT / name for name in ("plugin", "kernels", "tests/cxx")]
    libraries = [LIBRARY, torch / "lib/libtorch_cpu.so", torch / "lib/libc10.so"]
    command = ["aarch64-linux-gnu-g++", "-std=c++20", "-w", str(source), "-o", str(program)]
    command += [f"-I{folder}" for folder in folders]
    # The libraries that these need are found when the program runs.
    return [*command, *map(str, libraries), "-Wl,--allow-shlib-undefined"]


def _tests_in_one() -> Path:
    """One source, since torch's headers take longer to read than these files."""
    tests = bootstrap.ROOT / "tests" / "cxx"
    source = BUILD / "test_cxx.cpp"
    names = [*tests.glob("*.cpp"), *tests.glob("hazard/*.cpp"), tests.parent / "device" / "cxx.cpp"]
    source.write_text("".join(f'#include "{name}"\n' for name in sorted(names)))
    return source


def compile_commands() -> dict[str, list[str]]:
    example = bootstrap.ROOT / "docs" / "examples" / "train.cpp"
    return {
        "tests of optfuse.hpp compiled": compile_command(_tests_in_one(), TESTS),
        "example in C++ compiled": compile_command(example, EXAMPLE),
    }


def command(program: Path, *arguments: str) -> list[str]:
    """In BUILD, since the example saves files where it is started."""
    variables = [f"LD_LIBRARY_PATH={LIBRARIES}:{SITE / 'torch/lib'}:{LIBRARY.parent}", *THREADS]
    told = [word for text in variables for word in ("-E", text)]
    emulated = ["qemu-aarch64-static", "-L", str(emulation.ROOT), *told, str(program), *arguments]
    return ["env", f"--chdir={BUILD}", *emulated]
