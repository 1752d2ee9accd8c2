# SPDX-License-Identifier: BSD-3-Clause
"""The demands of a library on a system: versions of its symbols, and the size of its pages."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

Version = tuple[int, ...]
#: The newest that systems of manylinux_2_28 have.
ALLOWED = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8,)}
PAGE = 64 << 10  # bytes, of some of AArch64's systems


_NUMBERED = r"(\w+)_([\d.]+)"


def _needs(library: Path) -> list[str]:
    """Names of versions, such as GLIBC_2.17."""
    command = ["readelf", "--version-info", "--wide", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needs = text[text.index("Version needs section") :] if "Version needs section" in text else ""
    return re.findall(r"Name: (\S+)", needs)


def asked(library: Path) -> dict[str, Version]:
    """The newest version of each family, such as {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 21)}."""
    found: dict[str, Version] = {}
    for name in _needs(library):
        if numbered := re.fullmatch(_NUMBERED, name):
            family, numbers = numbered[1], tuple(map(int, numbered[2].split(".")))
            found[family] = max(found.get(family, ()), numbers)
    return found


def newest(libraries: Iterable[Path]) -> dict[str, Version]:
    found: dict[str, Version] = {}
    for library in libraries:
        for family, version in asked(library).items():
            found[family] = max(found.get(family, ()), version)
    return found


def too_new(library: Path, allowed: dict[str, Version]) -> dict[str, Version]:
    """The versions that a library asks for beyond `allowed`; a family that is missing there allows
    none."""
    return {f: v for f, v in asked(library).items() if v > allowed.get(f, ())}


def complaints(library: Path) -> str:
    """The features that keep a library of AArch64 from systems of manylinux_2_28."""
    found = [f"{f} {'.'.join(map(str, v))}" for f, v in too_new(library, ALLOWED).items()]
    found += [name for name in _needs(library) if not re.fullmatch(_NUMBERED, name)]
    read = ["readelf", "--wide", "--segments", str(library)]
    text = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    steps = {int(step, 16) for step in re.findall(r"LOAD .* (0x[0-9a-f]+)$", text, re.MULTILINE)}
    found += [f"segments {step} bytes apart" for step in steps if step % PAGE]
    return ", ".join(found)
