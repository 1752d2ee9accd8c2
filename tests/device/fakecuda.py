# SPDX-License-Identifier: BSD-3-Clause
"""A GPU for the tests: the torch device "fakecuda", in two copies.

It is made of libfake_cuda.so (OPTFUSE_FAKE_CUDA names it), whose operators run
on the CPU at once, and libfake_optfuse_cuda.so (OPTFUSE_CUDA_LIBRARY), optfuse's
CUDA kernels compiled for the CPU. Streams and events order nothing here; races()
says what they would have left open on a real device. Streams and events are
torch's own: torch.Stream, torch.Event, torch.accelerator."""

from __future__ import annotations

import ctypes
import os
import sys
import types

import torch

NAME = "fakecuda"
LIBRARY, KERNELS = "OPTFUSE_FAKE_CUDA", "OPTFUSE_CUDA_LIBRARY"


def _device_module() -> types.ModuleType:
    """torch.fakecuda, as far as torch asks for it."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.manual_seed_all = lambda seed: None  # the CPU's generator is used
    module._is_in_bad_fork = lambda: False
    return module


def load() -> None:
    """Makes the device; once per process."""
    if NAME in sys.modules.get("torch").__dict__:
        return
    torch.ops.load_library(os.environ[LIBRARY])
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    kernels = os.environ.get(KERNELS)
    if kernels:
        ctypes.CDLL(kernels).fake_optfuse_watch(ctypes.c_void_p(torch.ops.fakecuda.watch()))


def stream(device: int = 0) -> torch.Stream:
    """A new one."""
    return torch.Stream(torch.device(NAME, device))


def current(device: int = 0) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, device))


def synchronize(device: int = 0) -> None:
    torch.accelerator.synchronize(torch.device(NAME, device))


def races() -> list[str]:
    """What no stream, event or waiting host puts in order, since clear()."""
    return torch.ops.fakecuda.races()


def clear() -> None:
    torch.ops.fakecuda.clear()
