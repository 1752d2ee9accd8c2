# SPDX-License-Identifier: BSD-3-Clause
"""Runs nvcc, and makes of the PTX that it makes on the way one that drivers of CUDA 12.1 compile:
with their version of the language written in place of its own, in a fat binary that they read. The
kernels use no newer instruction; their arguments of more than 4 KiB are of 12.1.

    older_ptx.py OUT CHIP FATBINARY NVCC OPTIONS..."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "8.1"
LZ4 = "--compress-mode=speed"  # the other modes are newer


def lowered(text: str) -> str:
    made, many = re.subn(r"^\.version \d+\.\d+$", f".version {VERSION}", text, flags=re.MULTILINE)
    if many != 1:
        sys.exit(f"nvcc's PTX says {many} times of which version it is")
    return made


def kept(folder: Path, chip: str) -> Path:
    """The chip's PTX among the files that nvcc has kept."""
    target = re.compile(rf"^\.target sm_{chip}$", re.MULTILINE)
    found = [path for path in folder.glob("*.ptx") if target.search(path.read_text("utf-8"))]
    if not found:
        sys.exit(f"nvcc kept no PTX of compute capability {chip}")
    return found[0]


def main() -> None:
    out, chip, fatbinary, *nvcc = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([*nvcc, "--keep", "--keep-dir", name], check=True)
        ptx = kept(Path(name), chip)
        ptx.write_text(lowered(ptx.read_text("utf-8")), "utf-8")
        image = f"--image3=kind=ptx,sm={chip},file={ptx}"
        subprocess.run([fatbinary, f"--create={out}", "-64", LZ4, image], check=True)


if __name__ == "__main__":
    main()
