# SPDX-License-Identifier: BSD-3-Clause
"""Events of the process that concern all fused optimizers, and the work for each of them when
PyTorch does something that no single one sees."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from optfuse import _averages, _ddp
from optfuse._backward import loss_scale, recomputation
from optfuse._clipping import torch_functions, unscale
from optfuse._dtensor.local_tensors import local_of
from optfuse._library.bindings import (
    ALL_MODELS,
    BACKWARD,
    FORWARD,
    Error,
    check,
    guard,
    lib,
)
from optfuse._library.bindings import start as start_library
from optfuse._link import Link, links
from optfuse._patches import compiled, cuda_graphs, profiling, raw_memory, replacing
from optfuse._updaters.registered import running


def _each_marked(work: Callable[[Link], None]) -> None:
    if running():  # under a plan's lock; and its tensors are ready
        return
    for link in list(links.values()):
        if link.marked:
            work(link)


def keep_memory() -> None:
    """Has this process keep memory that was freed for what comes next, from here to its end.

    glibc's malloc gives blocks above 32 MB back to the system when they are freed, and a gradient
    of such a size costs a page fault for each 4 KiB in every iteration (docs/performance.md). This
    sets M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), as GLIBC_TUNABLES does for a process
    that starts. It can't be undone: memory of a model that is deleted stays with the process. Kept
    memory is not packed, so that backward mode no longer needs less of it.

    Raises optfuse.Error where malloc is not glibc's, or refuses."""
    if not lib.of_shim_keep_memory():
        raise Error(
            "optfuse: keep_memory() sets glibc's malloc, and this process has another, or one that "
            "refuses; nothing is changed; see that one's documentation for how it keeps memory"
        )


def flush_all() -> None:
    """Launches everything pending in the process, after the gradients that are on their way have
    come."""
    raw_memory.play_recorded()
    _each_marked(Link.flush)
    if running():
        return
    check(lib.of_shim_await(ALL_MODELS))
    if lib.of_any_pending():  # of an extension in C++
        check(lib.of_flush_all())


def reveal_all() -> None:
    """And computes promised gradients, for code that reads memory past the dispatcher."""
    flush_all()
    lib.of_shim_keep_promises()


def _reveal_to_compiled() -> None:
    raw_memory.play_recorded(ends=True)
    _each_marked(Link.flush_for_compiled)
    lib.of_shim_keep_promises()


def drain_all() -> None:
    """And waits until the GPUs have done it."""
    raw_memory.play_recorded()
    _each_marked(lambda link: link.flush(drain=True))


def _flush_before_fork() -> None:
    """The library does so before any fork. But from Python 3.13 on the interpreter holds a lock
    by then, without which another thread's update by a class's step() may not end."""
    if guard("fork"):
        flush_all()


def _plans_in_backward_mode() -> tuple[list[object], list[int]]:
    """And the optimizers, which keep them."""
    pairs = [(link.kept(), link.plan) for link in list(links.values()) if link.mode == BACKWARD]
    living = [pair for pair in pairs if pair[0] is not None]
    return [optimizer for optimizer, _ in living], [plan for _, plan in living]


def _swap_and_tell(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """torch.utils.swap_tensors exchanges what is behind two Python tensors; the
    plans that know one of them must look it up again."""

    @functools.wraps(swap)
    def swap_and_rebuild(a: Tensor, b: Tensor) -> None:
        concerned = [
            link
            for link in list(links.values())
            if link.slot_of(a) is not None or link.slot_of(b) is not None
        ]
        raw_memory.play_recorded()
        for link in concerned:
            link.flush()
            if link.mode != FORWARD:
                torch.ops.optfuse.detach(link.plan, [local_of(a), local_of(b)])
        try:
            swap(a, b)
        finally:
            for link in concerned:
                if (optimizer := link.kept()) is not None:
                    link.rebuild(optimizer)

    return swap_and_rebuild


_started = False


def start() -> None:
    """At the first fuse(): connects the library, PyTorch and this process."""
    global _started
    if _started:
        return
    start_library()
    replacing.warn_of_changes()
    os.register_at_fork(before=_flush_before_fork)
    raw_memory.install(reveal_all, _swap_and_tell)
    compiled.install(_reveal_to_compiled, flush_all)
    cuda_graphs.install(flush_all, drain_all)
    profiling.install(reveal_all)
    loss_scale.install()
    recomputation.install(_plans_in_backward_mode)
    unscale.install()
    torch_functions.install()
    _averages.install()
    _ddp.install()
    _started = True
