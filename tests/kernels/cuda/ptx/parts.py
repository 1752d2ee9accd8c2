# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the programs of this directory that a script builds."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[3] / "kernels"
sys.path.append(str(HERE.parents[3] / "benchmarks"))
from summary_text import as_text  # noqa: E402

__all__ = ["FLAGS", "HERE", "SOURCES", "as_text", "linked"]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-ffp-contract=off", "-Wno-overflow"]
FLAGS += ["-Werror=implicit-function-declaration"]
FLAGS += [f"-I{path}" for path in (HERE, HERE.parent, HERE.parent.parent, KERNELS)]
# Beside the kernels and the yardstick.
SOURCES = [HERE / f"{name}.c" for name in ("machine", "powers", "install")]
SOURCES += [HERE.parent / f"{name}.c" for name in ("batch", "host_driver", "launch_ranges")]
SOURCES += [HERE.parent.parent / f"{name}.c" for name in ("arrays", "random_program")]
LAUNCHER = ["driver", "launch", "common", "images", "advance", "asgd_next", "capture", "code"]
SOURCES += [KERNELS / "cuda" / f"{name}.c" for name in (*LAUNCHER, "draw", "packing")]


def linked(libraries: list[str]) -> list[str]:
    return ["-Wl,--start-group", *libraries, "-Wl,--end-group", "-lpthread", "-lm"]
