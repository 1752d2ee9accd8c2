# SPDX-License-Identifier: BSD-3-Clause
"""Prints what the build must know about a torch package, one value a line: its release and its
directory. The package is in the directory that is named, or belongs to this Python. It is not
imported: its headers and its version.py may be all that is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

# pip hides the environment's packages from an isolated build by these.
ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")
INSTALL = (
    "optfuse is built for the torch of the environment that it is installed into, and {python} "
    "has none that this build can see. Install torch first. If it is there: pip install "
    "meson-python meson ninja, then pip install --no-build-isolation . (a wheel of optfuse needs "
    "none of this)"
)


def of_this_python() -> str:
    """Its torch's directory, or nothing."""
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parent) if spec and spec.origin else ""


def outside_of_isolation() -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ISOLATION}
    ask = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch_info; "
    command = [sys.executable, "-c", ask + "print(torch_info.of_this_python())"]
    return subprocess.run(command, env=kept, capture_output=True, text=True).stdout.strip()


def main() -> None:
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    root = named or of_this_python() or outside_of_isolation()
    if not root:
        sys.exit(INSTALL.format(python=sys.executable))
    try:
        text = (Path(root) / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"{root} is no torch package: {error}")
    release = re.search(r"^__version__ = ['\"](\d+\.\d+)", text, re.MULTILINE)
    if not release or not (Path(root) / "include" / "torch").is_dir():
        sys.exit(f"the torch package in {root} has no headers: install torch from a wheel")
    print(release[1], os.path.abspath(root), sep="\n")


if __name__ == "__main__":
    main()
