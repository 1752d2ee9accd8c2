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
# Macros that the build defines for the headers that are compiled once per instance.
INSTANCE = ["-DOF_DTYPE=float32", "-DOF_DTYPE_FLOAT32", "-DOF_ISA=baseline"]
NARROW = ["-DOF_DTYPE=bfloat16", "-DOF_DTYPE_BFLOAT16", "-DOF_ISA=baseline"]
LOOP = ["-DOF_RULE=adam", '-DOF_RULE_HEADER="../rules/adam.h"', *INSTANCE]
OP_BY_OP = ["-DOF_RULE=rmsprop", '-DOF_RULE_HEADER="../rules/rmsprop.h"', "-DOF_ROOTS=1",
         "-DOF_N_STATE=3", *INSTANCE]  # fmt: skip
FORM = ["-DOF_FORM=rmsprop", *OP_BY_OP]
PROGRAM = ['-DOF_RULE_HEADER="../rules/programs.h"', *INSTANCE]
MACROS = {
    "kernels/cuda/program_element.h": PROGRAM,
    "kernels/cuda/op_by_op_element.h": FORM,
    "kernels/cpu/instance.h": LOOP,
    "kernels/cpu/cell.h": INSTANCE,
    "kernels/cpu/memory.h": INSTANCE,
    "kernels/cpu/narrow_array.h": INSTANCE,
    "kernels/cpu/narrow_block.h": NARROW,
    "kernels/cpu/rounded_block.h": NARROW,
    "kernels/cpu/stored.h": INSTANCE,
    "kernels/cpu/op_by_op_instance.h": OP_BY_OP,
    "kernels/cpu/op_by_op_numbers.h": OP_BY_OP,
}
TORCH = re.compile(r"#include <(torch|ATen|c10)/")
TENSOR = re.compile(r"#include <ATen/core/Tensor\.h>")
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


def compiles(paths: list[Path], compiler: list[str], *flags: str) -> None:
    wrapper = "".join(f'#include "{path}"\n' for path in paths)
    macros = [macro for path in paths for macro in MACROS.get(name(path), [])]
    done = subprocess.run(
        [*compiler, *flags, *macros, *WARNINGS, *INCLUDES, "-fsyntax-only", "-"],
        input=wrapper * 2,  # the include guards work
        capture_output=True,
        text=True,
    )
    names = ", ".join(map(name, paths))
    assert done.returncode == 0, f"{names}: does not compile alone:\n{done.stderr}"


def first_of(source: Path) -> Path | None:
    """The header of ours that a file includes before all others."""
    first = re.search(r"^#include (.*)$", source.read_text(), re.MULTILINE)
    if first is None or not first[1].startswith('"'):
        return None
    file = first[1].strip('"')
    places = (source.parent, ROOT / source.relative_to(ROOT).parts[0])
    return next((top / file for top in places if (top / file).is_file()), None)


C_HEADERS = [p for p in HEADERS if not p.is_relative_to(ROOT / "shim") or for_both(p)]
SHARED_HEADERS = [p for p in HEADERS if for_both(p)]
CPP_HEADERS = [p for p in HEADERS if p not in C_HEADERS]
# The build has compiled these alone. torch's headers take seconds to read, each time.
FIRST = {first_of(path) for path in sources("shim") if path.suffix == ".cpp"}
KNOWN = [p for p in CPP_HEADERS if p in FIRST and sees_torch(p)]
SHIM = [pytest.param(p, marks=pytest.mark.full if p in KNOWN else (), id=name(p))
        for p in CPP_HEADERS]  # fmt: skip


def test_the_public_headers_are_among_those_checked() -> None:
    shared = {name(path) for path in SHARED_HEADERS}
    wanted = {"kernels/kernels.h", "plugin/optfuse.h", "plugin/guard.h", "shim/shim.h"}
    wanted.add("shim/cxx/fused.h")
    rules = {name(path) for path in (ROOT / "kernels" / "rules").glob("*.h")}
    assert rules and wanted | rules <= shared


@pytest.mark.parametrize("header", C_HEADERS, ids=name)
def test_header_compiles_alone_as_c11(header: Path) -> None:
    cuda = cuda_flags() if sees(header, CUDA) else []
    compiles([header], CC, "-xc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", *cuda)


@pytest.mark.parametrize("header", SHARED_HEADERS, ids=name)
def test_header_compiles_alone_as_cpp17(header: Path) -> None:
    compiles([header], CXX, "-xc++", "-std=c++17")


def flags_of_the_shim(*headers: Path) -> list[str]:
    flags = ["-xc++", "-std=c++17", "-fopenmp"]
    if any(map(sees_torch, headers)):
        torch = pytest.importorskip("torch")
        include = Path(torch.__file__).parent / "include"
        flags += ["-std=c++20"] if torch.__version__ >= (2, 14) else []  # as shim/meson.build
        flags += [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
    return flags


@pytest.fixture(scope="module")
def tensor_read(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """ATen/core/Tensor.h, precompiled: reading it takes seconds."""
    header = tmp_path_factory.mktemp("read") / "tensor.h"
    header.write_text("#include <ATen/core/Tensor.h>\n")
    flags = [*flags_of_the_shim(ROOT / "shim" / "plan" / "refuse.h"), *WARNINGS, *INCLUDES]
    flags[0] = "-xc++-header"
    subprocess.run([*CXX, *flags, str(header), "-o", f"{header}.gch"], check=True)
    return ["-include", str(header)]


@pytest.mark.parametrize("header", SHIM)
def test_header_of_the_shim_compiles_alone(header: Path, request: pytest.FixtureRequest) -> None:
    """A header that includes ATen/core/Tensor.h finds it read already."""
    read = request.getfixturevalue("tensor_read") if sees(header, TENSOR) else []
    compiles([header], CXX, *flags_of_the_shim(header), *read)


def test_headers_that_sources_include_first_have_guards_and_no_warnings() -> None:
    """All at once; the build asks for fewer warnings in C++."""
    assert len(KNOWN) > 10
    compiles(KNOWN, CXX, *flags_of_the_shim(*KNOWN))
