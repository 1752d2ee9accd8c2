# SPDX-License-Identifier: BSD-3-Clause
"""The versions and settings of this environment, found without loading the library."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optfuse import __version__
from optfuse._library import loader
from optfuse._library.machine import processor
from optfuse._library.releases import TESTED
from optfuse_tools.doctor.finding import Finding, in_words

PACKAGE = Path(loader.__file__).resolve().parent.parent
_SETTINGS = ("OPTFUSE_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_TF32", "PYTORCH_")
_PRELOADED = ("LD_PRELOAD", "MALLOC_CONF")


def _torch() -> Any:
    """None: it can't be imported, or is none."""
    try:
        torch = importlib.import_module("torch")
        return torch if hasattr(torch, "__version__") else None
    except Exception:
        return None


def versions() -> Iterator[Finding]:
    yield Finding("optfuse", f"{__version__}, for torch {TESTED[0]} to {TESTED[-1]}")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield Finding("Python", f"{python}, {sys.platform} {platform.machine()}, {_libc()}")
    torch = _torch()
    if torch is not None:
        made_with = getattr(getattr(torch, "version", None), "cuda", None)
        yield Finding(
            "torch",
            f"{torch.__version__}, {f'CUDA {made_with}' if made_with else 'without CUDA'}, "
            f"{torch.get_num_threads() if hasattr(torch, 'get_num_threads') else '?'} threads",
        )
    else:
        yield Finding("torch", "can't be imported")
    if importlib.util.find_spec("numpy") is None:
        yield Finding("NumPy", "not installed; torch and optfuse work without it")
    yield Finding("processor", processor())
    if platform.machine() != "x86_64":
        yield Finding("tested", f"{platform.machine()}: under emulation, not yet on hardware")


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "another C library than glibc"
    except (AttributeError, ValueError, OSError):
        return "another C library than glibc"


def libraries() -> Iterator[Finding]:
    """The file that would be opened; why none would is said by who loads it."""
    torch = _torch()
    try:
        here = loader.Torch(str(torch.__version__), bool(torch.compiled_with_cxx11_abi()))
        library = loader.find(here, os.environ, PACKAGE)
        fields = json.loads(library.with_suffix(".json").read_text(encoding="utf-8"))
        built = ", ".join(f"{name} {value}" for name, value in sorted(fields.items()))
        yield Finding("library", f"{library}, built for this torch", details=built)
        kernels = loader.find_cuda(library, os.environ)
        none = "none: built without nvcc, so parameters on a GPU can't be fused"
        yield Finding("CUDA kernels", str(kernels or none))
    except Exception as error:
        known = [str(path.with_suffix(".so")) for path in loader.descriptions(PACKAGE)]
        reason = in_words(error) if isinstance(error, ImportError) else "torch can't be imported"
        found = ", ".join(known) or f"none in {PACKAGE}"
        yield Finding("library", f"not found, because {reason}; there is {found}")


def _openmp() -> str:
    """Runtimes that are in this process: ours is torch's."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    paths = re.findall(r"(/.*/lib(?:g|i)?omp5?(?:[-.].*)?\.so.*)$", maps, re.MULTILINE)
    found = list(dict.fromkeys(paths))
    if len(found) > 1:
        return f"{', '.join(found)}: threads of several runtimes compete for the cores"
    return f"{found[0]}: one runtime, as it should be" if found else "none"


def environment() -> Iterator[Finding]:
    yield Finding("OpenMP", _openmp())
    named = sorted(k for k in os.environ if k.startswith(_SETTINGS) or k in _PRELOADED)
    settings = ", ".join(f"{name}={os.environ[name]}" for name in named)
    yield Finding(
        "settings", settings or "none: nothing in the environment changes how updates run"
    )
    if os.environ.get("OPTFUSE_DISABLE", "") not in ("", "0"):
        yield Finding("note", "OPTFUSE_DISABLE is set: fuse() does nothing until it is unset")
