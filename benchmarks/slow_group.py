# SPDX-License-Identifier: BSD-3-Clause
"""A backend of torch.distributed, "slow": gloo, behind a Link of its own for each process group.
Whoever makes process groups of it, in Python or in C++, sends over a slow network unawares.

For processes that train on the same batches: each has the same summands, so that their sum is
known, and only a token is really reduced. A network card would take no core either."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from link import Link, Network
from torch import Tensor

NAME = "slow"


class SlowGroup(dist.ProcessGroup):
    """Only those collectives that optfuse.kfac() uses."""

    network = Network(0.0, 0.0)  # of the groups that are made from now on
    made: list[SlowGroup] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.link = Link(self.network)
        self.made.append(self)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        """The stock one asks a C++ backend."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        for tensor in tensors:
            tensor.mul_(self.size())
        token = [torch.zeros(1)]  # so that a message begins when all processes have sent it
        return self._later(self._gloo.allreduce(token, dist.AllreduceOptions()), tensors, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        return self._later(self._gloo.broadcast(tensors, options), tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], own: list[Tensor], options: Any) -> dist.Work:
        return self._later(self._gloo.allgather(outputs, own, options), outputs, own)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._later(self._gloo.barrier(opts or dist.BarrierOptions()), [], [])

    def _later(self, work: dist.Work, result: list[Any], sent: list[Tensor]) -> dist.Work:
        arrived = self.link.carry(work, result, sum(t.nbytes for t in sent))
        found: dist.Work = torch._C._distributed_c10d._create_work_from_future(arrived)
        return found


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SlowGroup:
    return SlowGroup(store, rank, size, timeout)


def register() -> None:
    """Once per process, before init_process_group("slow")."""
    dist.Backend.register_backend(NAME, _make, extended_api=False, devices=["cpu"])
