# SPDX-License-Identifier: BSD-3-Clause
"""liboptfuse_cuda exports its C ABI and nothing else, needs libc only, and
says what is missing where there is no driver.

    library_check.py LIBRARY
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

HEADER = Path(__file__).resolve().parents[3] / "kernels" / "cuda" / "cuda_kernels.h"
NO_DRIVER = 1
# And what is part of it from glibc 2.34 on.
LIBC = {"libc.so.6", "ld-linux-x86-64.so.2", "libm.so.6", "libpthread.so.0", "libdl.so.2"}


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    path = sys.argv[1]
    declared = set(re.findall(r"^OF_CUDA_API[^;(]*?\b(of_\w+)\(", HEADER.read_text(), re.MULTILINE))
    lines = output("nm", "-D", "--defined-only", path).splitlines()
    exported = {line.split()[-1] for line in lines}
    assert declared and exported == declared, exported ^ declared
    needed = set(re.findall(r"NEEDED\)[^\[]*\[([^\]]*)", output("readelf", "-dW", path)))
    assert needed <= LIBC, needed

    library = ctypes.CDLL(path)
    library.of_cuda_error.restype = ctypes.c_char_p
    status, text = library.of_cuda_open(), library.of_cuda_error().decode()
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert status == NO_DRIVER and "no NVIDIA driver" in text, (status, text)
    print(f"{len(exported)} exports, {Path(path).stat().st_size} bytes; opening: {status} {text}")


if __name__ == "__main__":
    main()
