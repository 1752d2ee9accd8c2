# SPDX-License-Identifier: BSD-3-Clause
"""Prints what the build must know about this Python's torch, one value a line: release,
C++11 ABI (0 or 1), the package's directory."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        import torch
    except ImportError as error:
        sys.exit(f"no torch: {error}")
    release = ".".join(torch.__version__.split(".")[:2])
    abi = int(torch.compiled_with_cxx11_abi())
    print(release, abi, os.path.dirname(os.path.abspath(torch.__file__)), sep="\n")


if __name__ == "__main__":
    main()
