# SPDX-License-Identifier: BSD-3-Clause
"""reorder(schedule="auto"): times a few iterations in stock's order, then takes the k of
"reverse_first" with which the simulator (plugin/reorder_simulate.c) finds them shortest."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optfuse._native import Error

WARM_UP, TIMED = 2, 4  # steps
_SIZES = (1 << 10, 1 << 18, 1 << 20, 1 << 22)  # bytes of the messages that are timed
_ROUNDS = 8


@dataclass(frozen=True)
class Times:
    """Simulated, of an iteration, in seconds."""

    k: int
    iteration: float
    compute: float
    exposed: float  # communication that compute waits for


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that train this model together; None: one alone."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    return dist.group.WORLD if dist.is_initialized() else None


def buckets_of(model: nn.Module) -> tuple[int, int]:
    """Bytes of DistributedDataParallel's buckets, and of the first."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if dist.is_available() else 1 << 20
    cap = model.bucket_bytes_cap if isinstance(model, DistributedDataParallel) else 25 << 20
    return int(cap), min(first, int(cap))


def _seconds(group: dist.ProcessGroup, message: torch.Tensor) -> float:
    dist.barrier(group)
    began = time.perf_counter()
    dist.all_reduce(message, group=group)
    message[:1].cpu()  # waits for a GPU
    return time.perf_counter() - began


def measured_network(
    group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Seconds a message, and a byte: the link a + b m that fits the shortest times of messages of
    several sizes from this device best. All processes call it."""
    if group is None:
        raise Error(
            'optfuse: reorder() with schedule="auto" measures messages between processes, and '
            "there is one; give network=(seconds a message, seconds a byte)"
        )
    messages = [torch.zeros(size // 4, device=device) for size in _SIZES]
    # In turn, and the shortest of each: what comes from outside only adds.
    rounds = [[_seconds(group, message) for message in messages] for _ in range(_ROUNDS)]
    shortest = [min(times) for times in zip(*rounds, strict=True)]
    latency, per_byte = torch.ops.optfuse.fit_link(list(_SIZES), shortest)
    return latency, per_byte


def best_k(
    handle: int, model: nn.Module, network: tuple[float, float], awaits: bool, memory: int | None
) -> Times:
    found = torch.ops.optfuse.best_k(
        handle, *network, *buckets_of(model), awaits, -1 if memory is None else memory
    )
    return Times(*found)


def agreed(k: int, group: dist.ProcessGroup | None) -> int:
    """That of the group's first process. All processes call it."""
    if group is None:
        return k
    said = torch.tensor([k])
    dist.broadcast(said, dist.get_global_rank(group, 0), group)
    return int(said.item())
