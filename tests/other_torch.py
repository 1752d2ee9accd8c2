# SPDX-License-Identifier: BSD-3-Clause
"""tests/run --torch: the same tests under another release of PyTorch or another Python, in
an environment that lies outside of the tree and is kept for the next time.

It is made by pip, as pip is configured: from PyPI a CUDA build of about 5 GB, which needs
no GPU. bootstrap.py learns about it from two variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bootstrap

ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optfuse"


def run(release: str, python: str | None, environments: Path, arguments: list[str]) -> None:
    """Does not return."""
    if not re.fullmatch(r"\d+\.\d+", release):
        bootstrap.fail(f"--torch takes a release such as {bootstrap.RELEASES[-1]}, not {release!r}")
    executable = find_python(python)
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run([executable, "-c", ask], capture_output=True, text=True).stdout.strip()
    where = environments.resolve() / f"torch-{release}-python{version}"
    if not version or where.is_relative_to(bootstrap.ROOT):
        bootstrap.fail(f"{executable} does not run" if not version else f"{where} is in the tree")
    where.parent.mkdir(parents=True, exist_ok=True)
    bootstrap.say(f"torch {release} and Python {version}, in {where}")
    told = {"OPTFUSE_ENVIRONMENT": str(where), "OPTFUSE_TORCH": release}
    script = str(Path(sys.argv[0]).resolve())
    os.execve(executable, [executable, script, *arguments], os.environ | told)


def find_python(asked: str | None) -> str:
    """A version such as 3.12, or a path; none: this one."""
    if asked is None:
        return sys.executable
    found = shutil.which(asked) or shutil.which(f"python{asked}")
    if found is None:
        bootstrap.fail(f"there is no {asked} and no python{asked}: --python takes one that is")
    return str(found)
