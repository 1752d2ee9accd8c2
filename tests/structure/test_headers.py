# SPDX-License-Identifier: BSD-3-Clause
"""Every header compiles alone, in each language whose files include it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tree import CC, CXX, INCLUDES, ROOT, WARNINGS, name, output, sources

HEADERS = [path for path in sources("kernels", "plugin", "shim") if path.suffix in (".h", ".hpp")]
# What the build defines for the headers that are compiled once per instance.
INSTANCE = ["-DOF_DTYPE=float32", "-DOF_DTYPE_FLOAT32", "-DOF_ISA=baseline"]
LOOP = ["-DOF_RULE=adam", '-DOF_RULE_HEADER="../rules/adam.h"', *INSTANCE]
OP_BY_OP = ["-DOF_RULE=rmsprop", '-DOF_RULE_HEADER="../rules/rmsprop.h"', "-DOF_ROOTS=1",
         "-DOF_N_STATE=3", *INSTANCE]  # fmt: skip
FORM = ["-DOF_FORM=rmsprop", *OP_BY_OP]
PROGRAM = ['-DOF_RULE_HEADER="../rules/traced.h"', *INSTANCE]
MACROS = {
    "kernels/cuda/program_element.h": PROGRAM,
    "kernels/cuda/op_by_op_element.h": FORM,
    "kernels/cpu/instance.h": LOOP,
    "kernels/cpu/memory.h": INSTANCE,
    "kernels/cpu/narrow_array.h": INSTANCE,
    "kernels/cpu/stored.h": INSTANCE,
    "kernels/cpu/op_by_op_instance.h": OP_BY_OP,
    "kernels/cpu/op_by_op_numbers.h": OP_BY_OP,
}
TORCH = re.compile(r"#include <(torch|ATen|c10)/")
CUDA = re.compile(r"#include <cuda")


def sees(path: Path, pattern: re.Pattern[str]) -> bool:
    """Directly, or through another header of its layer."""
    text = path.read_text()
    included = re.findall(r'#include "([^"]+)"', text)
    places = (path.parent, ROOT / path.relative_to(ROOT).parts[0])
    ours = [top / file for file in included for top in places if (top / file).is_file()]
    return bool(pattern.search(text)) or any(sees(file, pattern) for file in ours)


def sees_torch(path: Path) -> bool:
    return sees(path, TORCH)


def cuda_flags() -> list[str]:
    """Where the toolkit's headers are."""
    nvcc = shutil.which("nvcc") or pytest.skip("no CUDA toolkit")
    info = ROOT / "kernels" / "cuda" / "cuda_info.py"
    top = output(sys.executable, info, nvcc).splitlines()[1]
    return [f"-isystem{top}/include"]


def for_both(path: Path) -> bool:
    """C, but included from C++ too."""
    return "__cplusplus" in path.read_text() or path.parent.name == "rules"


def compiles(path: Path, compiler: list[str], *flags: str) -> None:
    wrapper = f'#include "{path}"\n#include "{path}"\n'  # twice: the include guard works
    done = subprocess.run(
        [
            *compiler,
            *flags,
            *MACROS.get(name(path), []),
            *WARNINGS,
            *INCLUDES,
            "-fsyntax-only",
            "-",
        ],
        input=wrapper,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{name(path)} does not compile alone:\n{done.stderr}"


C_HEADERS = [p for p in HEADERS if not p.is_relative_to(ROOT / "shim") or for_both(p)]
SHARED_HEADERS = [p for p in HEADERS if for_both(p)]
CPP_HEADERS = [p for p in HEADERS if p not in C_HEADERS]


def test_the_public_headers_are_among_those_checked() -> None:
    shared = {name(path) for path in SHARED_HEADERS}
    wanted = {"kernels/kernels.h", "plugin/optfuse.h", "plugin/guard.h", "shim/shim.h"}
    wanted.add("shim/cxx/fused.h")
    rules = {name(path) for path in (ROOT / "kernels" / "rules").glob("*.h")}
    assert rules and wanted | rules <= shared


@pytest.mark.parametrize("header", C_HEADERS, ids=name)
def test_header_compiles_alone_as_c11(header: Path) -> None:
    cuda = cuda_flags() if sees(header, CUDA) else []
    compiles(header, CC, "-xc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", *cuda)


@pytest.mark.parametrize("header", SHARED_HEADERS, ids=name)
def test_header_compiles_alone_as_cpp17(header: Path) -> None:
    compiles(header, CXX, "-xc++", "-std=c++17")


@pytest.mark.parametrize("header", CPP_HEADERS, ids=name)
def test_header_of_the_shim_compiles_alone(header: Path) -> None:
    flags = ["-xc++", "-std=c++17", "-fopenmp"]
    if sees_torch(header):
        torch = pytest.importorskip("torch")
        include = Path(torch.__file__).parent / "include"
        flags += ["-std=c++20"] if torch.__version__ >= (2, 14) else []  # as shim/meson.build
        flags += [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
    compiles(header, CXX, *flags)
