# SPDX-License-Identifier: BSD-3-Clause
"""A Python with torch for AArch64 under emulation: torch's wheel from the package index, which is
a CUDA build. Of CUDA two real libraries are needed; of the others symbols that do nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import emulation
from emulation import BUILD, ROOT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python_loader"))

import bootstrap

SITE, STUBS, SHIM = BUILD / "site", BUILD / "stubs", BUILD / "shim"
LIBRARIES = f"{SITE / 'nvidia/cu13/lib'}:{STUBS}"  # that torch's own need
TARGET = "shim/liboptfuse_torch-2.13-cxx11abi1-linux_aarch64.so"
LIBRARY = SHIM / TARGET
PACKAGES = [*emulation.PACKAGES, "python3"]
WHEELS = [bootstrap.TORCH, "nvidia-cuda-runtime>=13.0,<13.1", "nvidia-cuda-cupti>=13.0,<13.1"]
WHEELS += ["filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"]
WHEELS += ["typing-extensions"]
# QEMU is slow where threads spin.
THREADS = ["OMP_NUM_THREADS=2", "OMP_WAIT_POLICY=passive"]
GLIBC = range(17, 29)  # minor versions that wheels may name
# The processor that torch reads of, an Arm Neoverse V1; without it torch fails at once.
CPUINFO = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""
MIDR = "0x00000000411fd401\n"
UNVERSIONED = "libnccl.so.2"  # where symbols without a version are put
NOT_NAMED = {"NVSHMEM": "libnvshmem_host.so.3"}  # versions that are no library's name
DECOYS = {"libcufile.so.0", "libcurand.so.10", "libcusparseLt.so.0"}  # that may lack any symbol


def interpreter() -> Path:
    names = (ROOT / "usr/bin").glob("python3.*")
    return next(path for path in names if path.name.removeprefix("python3.").isdigit())


def command(*arguments: str) -> list[str]:
    """That Python, with this checkout's package."""
    package = bootstrap.ROOT / "python_loader"
    variables = {
        "LD_LIBRARY_PATH": LIBRARIES,
        "PYTHONPATH": f"{package}:{SITE}",
        "PYTHONHOME": str(ROOT / "usr"),
    }
    variables |= {"OPTFUSE_LIBRARY": str(LIBRARY)}
    told = [*(f"{name}={text}" for name, text in variables.items()), *THREADS]
    told = [word for text in told for word in ("-E", text)]
    return ["qemu-aarch64-static", "-L", str(ROOT), *told, str(interpreter()), *arguments]


def _download() -> None:
    if (SITE / "torch" / "version.py").is_file():
        return
    bootstrap.say("downloading torch for AArch64")
    version = interpreter().name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version", version]
    pip += [word for i in GLIBC for word in ("--platform", f"manylinux_2_{i}_aarch64")]
    bootstrap.run([*pip, "--dest", str(BUILD / "wheels"), *WHEELS])
    for wheel in sorted(
        (BUILD / "wheels").glob("*.whl"), key=lambda path: path.name[:5] == "torch"
    ):
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(SITE)


def _symbols(library: Path) -> list[tuple[str, str, bool]]:
    """Name, version, and whether others have to define it."""
    read = ["readelf", "--wide", "--dyn-syms", str(library)]
    text = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"(GLOBAL|WEAK|UNIQUE)\s+\S+\s+(\S+) (\S+)", text)
    found = []
    for binding, section, symbol in rows:
        name, _, version = symbol.partition("@")
        if section != "UND" or binding == "GLOBAL":
            found.append((name, version.lstrip("@"), section == "UND"))
    return found


def _missing() -> dict[str, set[str]]:
    """By version, the symbols of torch's libraries that nobody here defines."""
    of_torch = sorted((SITE / "torch" / "lib").glob("*.so*"))
    others = [interpreter(), *(SITE / "nvidia/cu13/lib").glob("*.so*")]
    for folder in (ROOT / "lib/aarch64-linux-gnu", ROOT / "usr/lib/aarch64-linux-gnu"):
        others += [path for path in folder.glob("*.so*") if path.is_file()]
    asked: set[tuple[str, str]] = set()
    defined: set[str] = set()
    for library in of_torch + others:
        for name, version, is_asked in _symbols(library):
            if not is_asked:
                defined.add(name)
            elif library in of_torch:
                asked.add((name, version))
    found: dict[str, set[str]] = defaultdict(set)
    for name, version in asked:
        if name not in defined:
            found[version].add(name)
    return found


def _make_stub(library: str, version: str, names: set[str]) -> None:
    source, script = STUBS / "stub.c", STUBS / "stub.map"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(names)) or "int x;\n")
    script.write_text(f"{version} {{ global: *; }};\n")
    compiler = ["aarch64-linux-gnu-gcc", "-w", "-fno-builtin", "-shared", "-fPIC", str(source)]
    versioned = [f"-Wl,--version-script={script}"] if version else []
    bootstrap.run([*compiler, *versioned, f"-Wl,-soname,{library}", "-o", str(STUBS / library)])


def _make_stubs() -> None:
    if (STUBS / UNVERSIONED).is_file():
        return
    STUBS.mkdir(parents=True, exist_ok=True)
    for library in DECOYS:
        _make_stub(library, "", set())
    for version, names in _missing().items():
        _make_stub(NOT_NAMED.get(version, version or UNVERSIONED), version, names)


def make() -> None:
    _download()
    _make_stubs()
    midr = ROOT / "sys/devices/system/cpu/cpu0/regs/identification/midr_el1"
    for path, text in ((ROOT / "proc/cpuinfo", CPUINFO), (midr, MIDR)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
