# SPDX-License-Identifier: BSD-3-Clause
"""Messages between the processes of a group: how long they take, and a decision that all processes
share. Plans of communication need both."""

from __future__ import annotations

import time
from typing import TypeVar

import torch
import torch.distributed as dist

Decision = TypeVar("Decision")

_SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)  # bytes of the messages that are timed
_ROUNDS = 8


def measured(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float, float]:
    """Seconds a message, and a byte: the link a + b m that fits the shortest times of all-reduces
    of several sizes m, in bytes, best. Then the processor's seconds a message, by the same fit to
    the shortest times for which the threads of this process were busy. All processes of the group
    call it; messages are on the device."""
    messages = [torch.zeros(size // 4, device=device) for size in _SIZES]
    # In turn, and the shortest of each: what comes from outside only adds.
    rounds = [[_seconds(group, message) for message in messages] for _ in range(_ROUNDS)]
    of_each = list(zip(*rounds, strict=True))
    took, busy = ([min(times[i] for times in of) for of in of_each] for i in range(2))
    latency, per_byte = torch.ops.optfuse.fit_network_link(list(_SIZES), took)
    processor, _ = torch.ops.optfuse.fit_network_link(list(_SIZES), busy)
    return latency, per_byte, processor


def _seconds(group: dist.ProcessGroup, message: torch.Tensor) -> tuple[float, float]:
    """Until the message is through; and of the processor, on all threads, but for waiting."""
    dist.barrier(group)
    busy, began = time.process_time(), time.perf_counter()
    work = dist.all_reduce(message, group=group, async_op=True)
    waits = time.thread_time()
    work.wait()
    message[:1].cpu()  # waits for a GPU
    took, waited = time.perf_counter() - began, time.thread_time() - waits  # it may spin
    return took, max(0.0, time.process_time() - busy - waited)


def agreed(decision: Decision, group: dist.ProcessGroup | None, device: torch.device) -> Decision:
    """The decision of the group's first process, whatever the others have found: anything that can
    be pickled. All processes of the group call it, None is one alone; messages are on the
    device."""
    if group is None:
        return decision
    said = [decision]
    dist.broadcast_object_list(said, group=group, group_src=0, device=device)
    return said[0]
