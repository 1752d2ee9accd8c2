# SPDX-License-Identifier: BSD-3-Clause
"""The exports, needs and contents of the installed library."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tree import ROOT, library, output

LIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}
SYSTEM = LIBC | {"libstdc++.so.6", "libgcc_s.so.1"}
OPENMP = re.compile(r"^(GOMP|omp)_")
SWITCHES = (b"OPTFUSE_TEST_GUARDS_OFF", b"of_guard_enabled")


def declared() -> set[str]:
    """The functions of shim.h, and of fused.h for C++ programs."""
    text = "".join((ROOT / "shim" / name).read_text() for name in ("shim.h", "cxx/fused.h"))
    return set(re.findall(r"^OF_API[^;(]*?\b(of_\w+)\(", text, re.MULTILINE))


def of_the_core() -> set[str]:
    """The functions of optfuse.h that exports.map lets out by name."""
    names = re.findall(r"^\s*(of_\w+);", (ROOT / "shim" / "exports.map").read_text(), re.MULTILINE)
    return set(names) - {"of_guard_enabled"}


def exported(path: Path) -> set[str]:
    lines = output("nm", "-D", "--defined-only", path).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def undefined(path: Path) -> set[str]:
    lines = [line.split() for line in output("nm", "-D", "-u", path).splitlines()]
    return {parts[-1].split("@")[0] for parts in lines if parts[0] == "U"}


def dynamic(tag: str, path: Path | None = None) -> set[str]:
    text = output("readelf", "-dW", path or library())
    return set(re.findall(rf"\({tag}\)[^\[]*\[([^\]]*)\]", text))


def test_the_library_exports_the_functions_of_its_headers_and_nothing_else() -> None:
    assert declared() and of_the_core(), "no declarations found"
    assert exported(library()) == declared() | of_the_core()


def test_the_library_needs_torch_cpu_and_the_system_only() -> None:
    needed = dynamic("NEEDED")
    assert "libtorch_cpu.so" in needed
    assert needed <= SYSTEM | {"libtorch_cpu.so", "libc10.so"}, sorted(needed)


def test_the_library_remembers_no_path_of_the_build_machine() -> None:
    assert not dynamic("RPATH") | dynamic("RUNPATH")
    assert str(ROOT).encode() not in library().read_bytes()


def test_every_symbol_comes_from_torch_cpu_or_the_system() -> None:
    import torch

    torch_lib = Path(torch.__file__).parent / "lib"
    missing = undefined(library())
    for name in dynamic("NEEDED"):
        path = torch_lib / name
        if not path.is_file():
            path = Path(output("cc", f"-print-file-name={name}").strip())
        missing -= exported(path)
    openmp = {name for name in missing if OPENMP.match(name)}
    assert openmp, "the shim uses no OpenMP: at::parallel_for would be serial"
    assert missing == openmp, f"nobody defines {sorted(missing - openmp)}"


def test_the_library_shares_the_openmp_runtime_of_torch() -> None:
    code = (
        "import ctypes, torch\n"
        f"ctypes.CDLL({str(library())!r})\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({part for part in maps if 'libgomp' in part or 'libiomp' in part}))"
    )
    assert output(os.sys.executable, "-c", code).strip() == "1"


def test_the_json_beside_the_library_describes_it() -> None:
    import torch

    fields = json.loads(library().with_suffix(".json").read_text())
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert fields["torch"] == release
    assert fields["cxx11_abi"] is torch.compiled_with_cxx11_abi()
    abi = int(fields["cxx11_abi"])
    assert library().name == f"liboptfuse_torch-{release}-cxx11abi{abi}-{fields['platform']}.so"


def contains_switch(path: Path) -> list[bytes]:
    code = path.read_bytes()
    return [switch for switch in SWITCHES if switch in code]


def test_the_release_library_has_no_switch_for_its_guards() -> None:
    assert not contains_switch(library())


def test_the_test_only_library_has_that_switch() -> None:
    guards = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not guards:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY is not set; tests/run sets it")
    assert SWITCHES[0] in contains_switch(Path(guards))


def test_the_library_opens_with_every_symbol_bound() -> None:
    code = f"import torch, os, ctypes; ctypes.CDLL({str(library())!r}, mode=os.RTLD_NOW)"
    done = subprocess.run([os.sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def cuda() -> Path:
    path = library().with_name("liboptfuse_cuda.so")
    return path if path.is_file() else pytest.skip("built without CUDA's compiler")


def test_the_library_of_gpu_kernels_exports_its_header_and_needs_libc_only() -> None:
    header = (ROOT / "kernels" / "cuda" / "cuda_kernels.h").read_text()
    names = set(re.findall(r"^OF_CUDA_API[^;(]*?\b(of_\w+)\(", header, re.MULTILINE))
    assert names and exported(cuda()) == names
    assert dynamic("NEEDED", cuda()) <= LIBC


def test_the_library_of_gpu_kernels_says_where_no_driver_is() -> None:
    kernels = ctypes.CDLL(str(cuda()))
    kernels.of_cuda_error.restype = ctypes.c_char_p
    status, text = kernels.of_cuda_open(), kernels.of_cuda_error().decode()
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert status == 1 and "no NVIDIA driver" in text, (status, text)
