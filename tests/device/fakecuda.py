# SPDX-License-Identifier: BSD-3-Clause
"""A GPU for the tests: the torch device "fakecuda", in two copies.

It is made of libfake_cuda.so (OPTFUSE_FAKE_CUDA names it), whose operators run
on the CPU at once, and libfake_optfuse_cuda.so (OPTFUSE_CUDA_LIBRARY), optfuse's
CUDA kernels compiled for the CPU. Streams and events order nothing here; races() says
what they would have left open on a real device. Streams and events are torch's own:
torch.Stream, torch.Event, torch.accelerator."""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import types

import torch

NAME = "fakecuda"
LIBRARY, KERNELS = "OPTFUSE_FAKE_CUDA", "OPTFUSE_CUDA_LIBRARY"


def _device_module() -> types.ModuleType:
    """torch.fakecuda, as far as torch asks for it."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.device = lambda device: torch.accelerator.device_index(torch.device(device).index)
    module.current_device = torch.accelerator.current_device_index
    module.manual_seed_all = lambda seed: None  # the CPU's generator is used
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    return module


def load() -> None:
    """Makes the device; once per process."""
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(os.environ[LIBRARY])
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    if KERNELS in os.environ:
        watcher = map(ctypes.c_void_p, torch.ops.fakecuda.watcher())
        kernels = ctypes.CDLL(os.environ[KERNELS])
        kernels.fake_optfuse_watch(*watcher)
        if hasattr(kernels, "fake_optfuse_powf"):  # they are nvcc's, and so are their powers
            powers = kernels.fake_optfuse_powf, kernels.fake_optfuse_pow
            addresses = (ctypes.cast(power, ctypes.c_void_p).value for power in powers)
            torch.ops.fakecuda.set_powers(*addresses)
    # A thread of the autograd engine that still lets go of a graph when Python
    # ends would take the process down.
    atexit.register(time.sleep, 0.05)


def stream(device: int = 0) -> torch.Stream:
    """A new one."""
    return torch.Stream(torch.device(NAME, device))


def current(device: int = 0) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, device))


def synchronize(device: int = 0) -> None:
    torch.accelerator.synchronize(torch.device(NAME, device))


def round_as_cuda(on: bool = True) -> None:
    """From now on PyTorch's operators on one tensor round as its CUDA does, and not as its CPU."""
    torch.ops.fakecuda.set_rounds_as_cuda(on)


def races() -> list[str]:
    """Pairs of accesses that no stream, event or waiting host puts in order, since clear()."""
    return torch.ops.fakecuda.races()


def clear() -> None:
    torch.ops.fakecuda.clear()


def capture(stream: torch.Stream, graph: int) -> None:
    """From now on a graph of this number is being captured on the stream; 0:
    no more. A stream that waits for it meanwhile is captured, too, and has to be
    waited for by the end: races() says if it was not. Operators go on running at
    once."""
    torch.ops.fakecuda.set_capture(stream, graph)
