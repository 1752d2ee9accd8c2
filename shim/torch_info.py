# SPDX-License-Identifier: BSD-3-Clause
"""Prints what the build must know about a torch package, one value a line:
release, C++11 ABI (0 or 1), the package's directory.

Usage: torch_info.py [UNPACKED_TORCH_PACKAGE]"""

from __future__ import annotations

import os
import re
import sys


def unpacked(root: str) -> tuple[str, int]:
    with open(os.path.join(root, "version.py"), encoding="utf-8") as file:
        found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read(), re.MULTILINE)
    if found is None:
        sys.exit(f"{root}/version.py names no version")
    # Not importable, so the flag can't be asked for; every supported release
    # is built with the C++11 ABI.
    return found.group(1), 1


def installed() -> tuple[str, int, str]:
    try:
        import torch
    except ImportError as error:
        sys.exit(f"no torch: {error}")
    root = os.path.dirname(os.path.abspath(torch.__file__))
    return str(torch.__version__), int(torch.compiled_with_cxx11_abi()), root


def main() -> None:
    if len(sys.argv) > 1:
        root = os.path.abspath(sys.argv[1])
        version, abi = unpacked(root)
    else:
        version, abi, root = installed()
    release = ".".join(version.split(".")[:2])
    print(release, abi, root, sep="\n")


if __name__ == "__main__":
    main()
