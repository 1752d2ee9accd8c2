# SPDX-License-Identifier: BSD-3-Clause
"""The GPUs, and whether there are kernels for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from optfuse._library.bindings import lib
from optfuse._library.loader import find_cuda
from optfuse_tools.doctor.finding import Finding


def findings() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use: models train on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        chip = f"compute capability {found.major}.{found.minor}"
        yield Finding("GPU", f"{index}: {found.name}, {chip}, {found.total_memory >> 20} MiB")
    if find_cuda(Path(lib._name), os.environ) is None:
        yield Finding(
            "GPU",
            "this build has no CUDA kernels, so fuse() refuses parameters on a GPU: build it "
            "with `pip install --no-build-isolation .` where nvcc is installed",
            is_problem=True,
        )
