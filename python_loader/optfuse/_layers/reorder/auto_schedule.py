# SPDX-License-Identifier: BSD-3-Clause
"""reorder(schedule="auto"): times a few iterations in stock's order, then takes the k of
"reverse_first" with which the simulator (plugin/planners/reorder/simulate.c) finds them
shortest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optfuse._layers import communication
from optfuse._library.bindings import Error

WARM_UP, TIMED = 2, 4  # steps


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


def network_of(group: dist.ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Seconds a message, and a byte. All processes call it."""
    if group is None:
        raise Error(
            'optfuse: reorder() with schedule="auto" measures messages between processes, and '
            "there is one; give network=(seconds a message, seconds a byte)"
        )
    return communication.measured(group, device)[:2]


def best_k(
    handle: int, model: nn.Module, network: tuple[float, float], awaits: bool, memory: int | None
) -> Times:
    found = torch.ops.optfuse.best_k(
        handle, *network, *buckets_of(model), awaits, -1 if memory is None else memory
    )
    return Times(*found)
