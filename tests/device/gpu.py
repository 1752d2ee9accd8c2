# SPDX-License-Identifier: BSD-3-Clause
"""The GPU of these tests: one that the CPU plays, the torch device "fakecuda", in two copies; or
the machine's own, where OPTFUSE_TEST_ON is "cuda".

The played one is made of libfake_cuda.so (OPTFUSE_FAKE_CUDA names it), whose operators run
on the CPU at once, and libfake_optfuse_cuda.so (OPTFUSE_CUDA_LIBRARY), optfuse's
CUDA kernels compiled for the CPU. Streams and events order nothing there; races() says
what they would have left open on a real device. Streams and events are torch's own:
torch.Stream, torch.Event, torch.accelerator. A test that asks what only the played one
tells is skipped on a real one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

IS_REAL = os.environ.get("OPTFUSE_TEST_ON") == "cuda"
NAME = "cuda" if IS_REAL else "fakecuda"
LIBRARY, KERNELS = "OPTFUSE_FAKE_CUDA", "OPTFUSE_CUDA_LIBRARY"
A_MILLISECOND = 2_000_000  # cycles


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
    """Makes the device, if it is to be played; once per process."""
    if IS_REAL:
        make_repeatable()
        return
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


def make_repeatable() -> None:
    """Stock must give the same bits twice, or there is nothing to compare with."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or streams differ
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.init()


def second() -> str:
    """The name of a second one."""
    if torch.accelerator.device_count() < 2:
        only_played()
    return f"{NAME}:1"


def stream(device: int = 0) -> torch.Stream:
    """A new one."""
    return torch.Stream(torch.device(NAME, device))


def current(device: int = 0) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, device))


def synchronize(device: int = 0) -> None:
    torch.accelerator.synchronize(torch.device(NAME, device))


def synchronize_all() -> None:
    for device in range(torch.accelerator.device_count()):
        synchronize(device)


def settle() -> None:
    """Nothing is under way, and no race is known."""
    synchronize_all()
    clear()


def keep_busy() -> None:
    """A real one works for a while on the current stream: who forgets to wait reads old values."""
    if IS_REAL:
        torch.cuda._sleep(A_MILLISECOND)


def only_played() -> None:
    if IS_REAL:
        pytest.skip("only the GPU that the CPU plays tells, or is there twice")


def only_real() -> None:
    if not IS_REAL:
        pytest.skip("the GPU that the CPU plays can't do it")


def round_as_cuda(on: bool = True) -> None:
    """From now on PyTorch's operators on one tensor round as its CUDA does, and not as its CPU."""
    if not IS_REAL:
        torch.ops.fakecuda.set_rounds_as_cuda(on)


def races() -> list[str]:
    """Pairs of accesses that no stream, event or waiting host puts in order, since clear()."""
    return [] if IS_REAL else torch.ops.fakecuda.races()


def clear() -> None:
    if not IS_REAL:
        torch.ops.fakecuda.clear()


@contextlib.contextmanager
def captured(stream: torch.Stream, graph: int = 7) -> Iterator[None]:
    """A graph of this number is being captured on the stream, which is current meanwhile.
    A stream that waits for it is captured, too, and has to be
    waited for by the end: races() says if it was not. Operators go on running at
    once."""
    only_played()
    torch.ops.fakecuda.set_capture(stream, graph)
    try:
        with stream:
            yield
    finally:
        torch.ops.fakecuda.set_capture(stream, 0)


#: torch.accelerator has graphs from torch 2.12 on, and only those does the played one replay.
REPLAYS = IS_REAL or hasattr(torch.accelerator, "Graph")


def graph_of(work: Callable[[], object]) -> Any:
    """The work, captured on another stream: nothing runs before its replay()."""
    if IS_REAL:
        real = torch.cuda.CUDAGraph()
        with torch.cuda.graph(real):
            work()
        return real
    graph, side = torch.accelerator.Graph(), stream()
    side.wait_stream(current())
    with side:
        graph.capture_begin()  # what `with graph` does besides needs an allocator of PyTorch's kind
        try:
            work()
        finally:
            graph.capture_end()
    current().wait_stream(side)
    return graph


def launches(work: Callable[[], object]) -> list[tuple[str, str]]:
    """The kernels and operators of `work`, and the streams that they ran on."""
    only_played()
    torch.ops.fakecuda.set_logging(True)
    try:
        work()
        return [tuple(text.rsplit(" on ", 1)) for text in torch.ops.fakecuda.launches()]
    finally:
        torch.ops.fakecuda.set_logging(False)


def bytes_moved(work: Callable[[], object]) -> int:
    """How many the launches of `work` read and write."""
    only_played()
    before = torch.ops.fakecuda.bytes_moved()
    work()
    return torch.ops.fakecuda.bytes_moved() - before


def operators(work: Callable[[], object]) -> list[str]:
    """The names of launches()."""
    return [name.split()[0] for name, _ in launches(work)]


def kernels(work: Callable[[], object]) -> list[str]:
    """Those of ours."""
    return [name for name in operators(work) if name.startswith("of_cuda_")]


def bytes_in_use(device: int = 0) -> int:
    return (
        torch.cuda.memory_allocated(device)
        if IS_REAL
        else torch.ops.fakecuda.bytes_of(device, False)
    )


def bytes_reserved(device: int = 0) -> int:
    """Taken from the device by the allocator, in use or not."""
    return (
        torch.cuda.memory_reserved(device) if IS_REAL else torch.ops.fakecuda.bytes_of(device, True)
    )
