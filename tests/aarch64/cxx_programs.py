# SPDX-License-Identifier: BSD-3-Clause
"""Programs in C++ without Python, compiled against torch's wheel for AArch64: the tests of
optfuse.hpp, and the example of docs/, which has to be refused where PyTorch takes SVE256."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import bootstrap
import emulation
from emulated_torch import LIBRARIES, LIBRARY, SITE
from emulation import BUILD, NEON, SVE

TESTS = BUILD / "test_cxx"
EXAMPLE = BUILD / "train"
REFUSAL = "set ATEN_CPU_CAPABILITY=default before the program starts"
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


def command(program: Path, *variables: str) -> list[str]:
    found = f"LD_LIBRARY_PATH={LIBRARIES}:{SITE / 'torch/lib'}:{LIBRARY.parent}"
    told = [word for text in (found, "OMP_NUM_THREADS=2", *variables) for word in ("-E", text)]
    return ["qemu-aarch64-static", "-L", str(emulation.ROOT), *told, str(program)]


def _output_of_example(processor: str, *variables: str) -> str:
    environment = os.environ | {"QEMU_CPU": processor}
    done = subprocess.run(
        command(EXAMPLE, *variables), env=environment, cwd=BUILD, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def complaints() -> str:
    """Wrong outputs of the example, which should train on NEON and refuse SVE256, whose roundings
    the kernels do not have."""
    wide = SVE[32]
    expected = {
        (NEON,): "loss",
        (wide,): REFUSAL,
        (wide, "ATEN_CPU_CAPABILITY=default"): "loss",
    }
    outputs = {run: _output_of_example(*run) for run in expected}
    wrong = [run for run, words in expected.items() if words not in outputs[run]]
    return "".join(f"on {', '.join(run)}: {outputs[run]}" for run in wrong)
