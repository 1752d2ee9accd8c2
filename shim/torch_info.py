# SPDX-License-Identifier: BSD-3-Clause
"""Prints what the build must know about a torch, one value a line: its release, its directory and
its kind. A package is in the directory that is named, or belongs to this Python. It is not
imported: its headers and its version.py may be all that is there. A libtorch, which C++ programs
link, is the unpacked zip."""

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
    "none of this). Or name a libtorch for C++ programs: -Dtorch_roots=DIRECTORY"
)
INSIDE = ("libtorch", "torch")  # the directories that a zip and a wheel unpack to
LINKED = ("lib/libtorch.so", "lib/libtorch_cpu.so", "lib/libc10.so")


def of_this_python() -> str:
    """Its torch's directory, or nothing."""
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parent) if spec and spec.origin else ""


def outside_of_isolation() -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ISOLATION}
    ask = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch_info; "
    command = [sys.executable, "-c", ask + "print(torch_info.of_this_python())"]
    return subprocess.run(command, env=kept, capture_output=True, text=True).stdout.strip()


def release_in(file: Path, pattern: str) -> str:
    """Or nothing, if there is no such file."""
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except FileNotFoundError:
        return ""
    except OSError as error:
        sys.exit(f"{file} can't be read: {error}")
    if not found:
        sys.exit(f"{file} names no release of torch")
    return found[1]


def check_libtorch(root: Path) -> None:
    """Nothing else brings what programs compile against and link."""
    for part in ("include/torch", *LINKED):
        if not (root / part).exists():
            sys.exit(
                f"the libtorch in {root} has no {part}: unpack the whole zip of the shared "
                "libraries (libtorch-shared-with-deps)"
            )


def look(root: Path) -> tuple[str, str]:
    """Release and kind of what is in a directory."""
    if release := release_in(root / "version.py", r"^__version__ = ['\"](\d+\.\d+)"):
        if not (root / "include" / "torch").is_dir():
            sys.exit(f"the torch package in {root} has no headers: install torch from a wheel")
        return release, "package"
    if release := release_in(root / "build-version", r"^(\d+\.\d+)"):
        check_libtorch(root)
        return release, "libtorch"
    inside = [f"; did you mean {root / name}?" for name in INSIDE if (root / name).is_dir()]
    sys.exit(
        f"{root} is neither a torch package, which has a version.py, nor an unpacked libtorch, "
        f"which has a build-version{''.join(inside[:1])}"
    )


def main() -> None:
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    root = named or of_this_python() or outside_of_isolation()
    if not root:
        sys.exit(INSTALL.format(python=sys.executable))
    release, kind = look(Path(root))
    print(release, os.path.abspath(root), kind, sep="\n")


if __name__ == "__main__":
    main()
