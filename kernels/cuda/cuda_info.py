# SPDX-License-Identifier: BSD-3-Clause
"""Prints an nvcc's release, its toolkit's directory and the chips it knows."""

from __future__ import annotations

import re
import subprocess
import sys


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main() -> None:
    nvcc = sys.argv[1]
    release = re.search(r"release (\d+\.\d+)", output(nvcc, "--version"))
    top = re.search(r"^#\$ TOP=(.*)$", output(nvcc, "--dryrun", "-c", "none.cu"), re.MULTILINE)
    if not release or not top:
        sys.exit(f"{nvcc} does not say its release or its directory")
    chips = re.findall(r"sm_(\d+)\b", output(nvcc, "--list-gpu-code"))
    print(release[1], top[1], ",".join(sorted(set(chips), key=int)), sep="\n")


if __name__ == "__main__":
    main()
