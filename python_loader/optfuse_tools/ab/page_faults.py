# SPDX-License-Identifier: BSD-3-Clause
"""The share of page faults in the processor's time. glibc gives blocks of more than 32 MB back when
they are freed, and the kernel makes their pages anew for the next iteration."""

from __future__ import annotations

import functools
import mmap
import resource
from dataclasses import dataclass

WORTH_SAYING = 0.05  # a share
REMEDY = (
    "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
)
_PAGE = 4096
_TRIED = 64 << 20  # bytes


@dataclass
class Usage:
    """Resources that a process has used, or between two times."""

    faults: float = 0.0
    seconds: float = 0.0  # of processors
    in_kernel: float = 0.0  # a part of them

    @staticmethod
    def now() -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(used.ru_minflt, used.ru_utime + used.ru_stime, used.ru_stime)

    def add(self, before: Usage, after: Usage) -> None:
        """The difference of the two."""
        self.faults += after.faults - before.faults
        self.seconds += after.seconds - before.seconds
        self.in_kernel += after.in_kernel - before.in_kernel

    def add_since(self, before: Usage) -> None:
        self.add(before, Usage.now())


@functools.cache
def seconds_a_fault() -> float:
    """Tried on fresh memory, under the process' policy for huge pages."""
    before, used = Usage.now(), Usage()
    with mmap.mmap(-1, _TRIED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[::_PAGE] = b"1" * (_TRIED // _PAGE)
        used.add_since(before)
    return used.seconds / max(used.faults, 1.0)


def share(used: Usage) -> float:
    """Between 0 and 1, as far as this can be known: faults by what one takes, and at most the time
    in the kernel."""
    if used.seconds <= 0.0:
        return 0.0
    return min(used.faults * seconds_a_fault(), used.in_kernel) / used.seconds


def advice(found: float, where: str) -> str:
    return (
        f"page faults take about {found:.0%} of the processor's time {where}: malloc gives large "
        "blocks back and takes them again in each iteration. It keeps them, and more memory, "
        f"if Python is started with {REMEDY}, or from a call of optfuse.keep_memory() on"
    )
