# SPDX-License-Identifier: BSD-3-Clause
"""Finds the compiled library that belongs to this torch and opens it.

One library serves one torch release, one C++ ABI and one platform. The JSON
beside it says which. Everything is compared before the library is opened, so
that the wrong torch gets a sentence and not an unresolved symbol."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from optfuse._library.releases import TESTED, is_too_old, release_of

ABI = 7  # of the C functions that the loader calls
PLATFORM = f"linux_{platform.machine()}"
_STEM = "liboptfuse_torch-"
INSTALL = f"pip install 'torch=={TESTED[-1]}.*'"
REBUILD = (
    "build it with `pip install --no-build-isolation .` in the environment that has this torch"
)


@dataclass(frozen=True)
class Build:
    """The torch, ABI and platform that a library was built for, as its JSON says."""

    library: Path
    torch: str
    cxx11_abi: bool
    platform: str
    abi: int


@dataclass(frozen=True)
class Torch:
    """The torch of this process."""

    version: str
    cxx11_abi: bool

    @property
    def release(self) -> str:
        return release_of(self.version)


def check_platform(
    system: str, machine: str, libc: str, implementation: str, gil: bool, main_interpreter: bool
) -> None:
    """Raises ImportError where the library can't run at all."""
    if system != "linux" or machine not in ("x86_64", "aarch64"):
        raise ImportError(f"optfuse runs on Linux x86-64 and AArch64, not on {system} {machine}")
    if libc != "glibc":
        raise ImportError(f"optfuse needs glibc; this Python uses {libc or 'another C library'}")
    if implementation != "cpython":
        raise ImportError(f"optfuse needs CPython, not {implementation}")
    if not gil:
        raise ImportError(
            "optfuse needs Python's global interpreter lock; this is a free-threaded build: "
            "use the usual build of the same Python version"
        )
    if not main_interpreter:
        raise ImportError(
            "optfuse can't be imported in a subinterpreter: import it in the main interpreter"
        )


def check_release(torch: Torch) -> None:
    """Raises ImportError for a torch release that is too old. One that is too new is not
    known: a library that was built for it will do."""
    if is_too_old(torch.release):
        raise ImportError(
            f"optfuse supports torch {TESTED[0]} to {TESTED[-1]}; this is torch "
            f"{torch.version}: install a supported release, such as by `{INSTALL}`; an optfuse "
            "that was built from source is then built again by `pip install "
            "--no-build-isolation .`"
        )


def read_build(description: Path) -> Build:
    """The JSON beside a library. Raises ImportError if it says nothing usable."""
    try:
        fields = json.loads(description.read_text(encoding="utf-8"))
        return Build(
            library=description.with_suffix(".so"),
            torch=str(fields["torch"]),
            cxx11_abi=bool(fields["cxx11_abi"]),
            platform=str(fields["platform"]),
            abi=int(fields["abi"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(
            f"optfuse can't read {description}, which says what the library beside it was "
            f"built for ({type(error).__name__}: {error}): {REBUILD}"
        ) from error


def mismatch(build: Build, torch: Torch) -> str | None:
    """Why this library can't serve this torch, or None."""
    built = f"built for torch {build.torch} with C++11 ABI {int(build.cxx11_abi)}"
    here = f"torch {torch.version} with C++11 ABI {int(torch.cxx11_abi)}"
    if build.platform != PLATFORM:
        return f"built for {build.platform}, but this is {PLATFORM}"
    if build.torch != torch.release or build.cxx11_abi != torch.cxx11_abi:
        return f"{built}, but this is {here}"
    if build.abi != ABI:
        return f"of ABI {build.abi}, but this loader needs ABI {ABI}"
    if not build.library.is_file():
        return "missing, though the JSON that describes it is there"
    return None


def descriptions(package: Path) -> list[Path]:
    """The JSON files to consider: those in the package, or, in a source
    checkout, those of its build directories. Test-only builds are left out."""
    pattern = f"{_STEM}*.json"
    found = sorted(package.glob(pattern))
    checkout = package.parent.parent
    if not found and (checkout / "meson.build").is_file():
        found = sorted(checkout.glob(f"build*/shim/{pattern}"))
        found += sorted(checkout.glob(f"build*/*/shim/{pattern}"))
    return [path for path in found if not path.stem.endswith("-guards")]


def choose(candidates: Iterable[Path], torch: Torch, package: Path) -> Path:
    """The first library that serves this torch. Raises ImportError that says
    what was found instead."""
    builds = [read_build(description) for description in candidates]
    if not builds:
        raise ImportError(f"optfuse has no compiled library in {package}: {REBUILD}")
    for_release = [build for build in builds if build.torch == torch.release]
    if not for_release:
        raise ImportError(_no_release(builds, torch))
    reasons = []
    for build in for_release:
        reason = mismatch(build, torch)
        if reason is None:
            return build.library
        reasons.append(f"{build.library} is {reason}")
    raise ImportError(f"optfuse can't be loaded: {'; '.join(reasons)}: {REBUILD}")


def _no_release(builds: Iterable[Build], torch: Torch) -> str:
    """Where all libraries are for other releases; a single one was compiled for the torch that was
    there."""
    releases = [build.torch for build in builds]
    one = f"`pip install 'torch=={releases[-1]}.*'`"
    if len(releases) == 1:
        return (
            f"torch was exchanged under optfuse, which is built for torch {releases[0]}, and this "
            f"is torch {torch.version}. To keep this torch build optfuse again: {REBUILD}. To get "
            f"the other back: {one}, from the index that it came from. To keep torch from now on "
            "install other packages with `pip install -c torch.txt`, where torch.txt has the line "
            f"torch=={torch.version}"
        )
    return (
        f"optfuse is built for torch {', '.join(releases)}, and this is torch {torch.version}: "
        f"{one} installs a torch that it is built for. Or install an optfuse that is built for "
        f"torch {torch.release}, or {REBUILD}"
    )


def find(torch: Torch, environment: Mapping[str, str], package: Path) -> Path:
    """The library to open: the one OPTFUSE_LIBRARY names, else the package's."""
    check_release(torch)
    named = environment.get("OPTFUSE_LIBRARY")
    if not named:
        return choose(descriptions(package), torch, package)
    library = Path(named).resolve()
    if not library.is_file():
        raise ImportError(f"OPTFUSE_LIBRARY names {named}, which is not a file")
    return choose([library.with_suffix(".json")], torch, package)


def opened() -> Path | None:
    """The library that this process has opened, for an extension in C++ that was imported
    before."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if _STEM in line}
    return next((Path(path) for path in sorted(paths) if path.endswith(".so")), None)


def share(found: Path, before: Path | None, torch: Torch) -> Path:
    """The one library of this process. Two would not know of each other's pending updates, and
    PyTorch ends the process where the operators of both are registered."""
    if before is None or before == found or before.samefile(found):
        return found
    reason = mismatch(read_build(before.with_suffix(".json")), torch)
    if reason is None and not os.environ.get("OPTFUSE_LIBRARY"):
        return before
    raise ImportError(
        f"optfuse can't use {found}: this process has opened {before}, for an extension in C++, "
        f"which is {reason or 'not what OPTFUSE_LIBRARY names'}, and there can be one only. Import "
        "optfuse before the extension, or build the extension with the library that Python uses"
    )


def find_cuda(library: Path, environment: Mapping[str, str]) -> Path | None:
    """The library of CUDA kernels that belongs to `library`: the one that
    OPTFUSE_CUDA_LIBRARY names, else the one beside it, or in its build
    directory. None: it was built without. It is opened at the first GPU tensor."""
    named = environment.get("OPTFUSE_CUDA_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise ImportError(f"OPTFUSE_CUDA_LIBRARY names {named}, which is not a file")
        return Path(named).resolve()
    name = "liboptfuse_cuda.so"
    for place in (library.parent, library.parent.parent / "kernels" / "cuda"):
        if (place / name).is_file():
            return place / name
    return None


def _libc() -> str:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return ""
    return "glibc" if version else ""


def _has_gil() -> bool:
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def _in_main_interpreter() -> bool:
    api = ctypes.pythonapi
    current, main = api.PyInterpreterState_Get, api.PyInterpreterState_Main
    current.restype = main.restype = ctypes.c_void_p
    return bool(current() == main())


def _broken_torch(error: Exception) -> str:
    return f"optfuse needs torch, which can't be imported: {error}: repair it, or {INSTALL}"


def here() -> Path:
    """The library for this process's torch. Raises ImportError that says what to do."""
    check_platform(
        system=sys.platform,
        machine=platform.machine(),
        libc=_libc(),
        implementation=sys.implementation.name,
        gil=_has_gil(),
        main_interpreter=_in_main_interpreter(),
    )
    try:
        import torch  # first: the library's symbols come from what it loads
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise ImportError(_broken_torch(error)) from error
        raise ImportError(f"optfuse needs torch, and this Python has none: {INSTALL}") from error
    except (ImportError, OSError) as error:  # OSError: a library of its own can't be opened
        raise ImportError(_broken_torch(error)) from error

    its = Torch(str(torch.__version__), bool(torch.compiled_with_cxx11_abi()))
    return share(find(its, os.environ, Path(__file__).resolve().parent.parent), opened(), its)


def load() -> ctypes.CDLL:
    """Opens the library, its operators registered with torch."""
    path = str(here())
    import torch

    torch.ops.load_library(path)
    opened = ctypes.CDLL(path)
    opened.of_shim_set_cuda_library.argtypes = [ctypes.c_char_p]
    opened.of_shim_set_cuda_library(os.fsencode(find_cuda(Path(path), os.environ) or ""))
    return opened
