# SPDX-License-Identifier: BSD-3-Clause
"""AArch64 on this machine: Debian's cross compilers, QEMU, and a folder with Debian's packages
for that processor, in which programs find their libraries. Nothing of the host is changed but
for the tools that `install_tools` adds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bootstrap

BUILD = bootstrap.BUILD / "aarch64"
ROOT = BUILD / "root"
TOOLS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "pkg-config": "pkg-config",
}
PACKAGES = ["check", "libc6", "libstdc++6"]
# The processors that QEMU plays. The length of SVE vectors is in bytes.
NEON = "max,sve=off"
SVE = {length: f"max,sve-default-vector-length={length}" for length in (16, 32, 64)}


def missing_tools() -> list[str]:
    return [package for tool, package in TOOLS.items() if not shutil.which(tool)]


def install_tools() -> None:
    """With apt-get, if this user may."""
    packages = missing_tools()
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for command in (["apt-get", "update", "-qq"], install):
        if not packages or subprocess.run([*sudo, *command]).returncode != 0:
            break
    if missing_tools():
        bootstrap.fail(f"needed (Debian): apt-get install {' '.join(missing_tools())}")


def emulated(program: Path, *arguments: str) -> list[str]:
    return ["qemu-aarch64-static", "-L", str(ROOT), str(program), *arguments]


def _apt(folder: Path) -> list[str]:
    """apt-get for AArch64, with a state of its own: it knows of no package that is installed."""
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
        "Dir::State": str(folder),
        "Dir::State::status": str(folder / "status"),
        "Dir::Cache": str(folder),
    }
    return ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]


def make_root(packages: Iterable[str]) -> None:
    """The packages and what they need, unpacked into ROOT; again only if more are asked for."""
    asked, stamp = " ".join(sorted(packages)), ROOT / ".packages"
    if stamp.is_file() and set(asked.split()) <= set(stamp.read_text().split()):
        return
    bootstrap.say(f"packages for AArch64: {asked}")
    folder = BUILD / "apt"
    apt = _apt(folder)
    bootstrap.run([*apt, "update"])
    bootstrap.run([*apt, "install", "--yes", "--download-only", *asked.split()])
    ROOT.mkdir(parents=True, exist_ok=True)
    for package in sorted((folder / "archives").glob("*.deb")):
        bootstrap.run(["dpkg-deb", "--extract", str(package), str(ROOT)])
    stamp.write_text(asked)
