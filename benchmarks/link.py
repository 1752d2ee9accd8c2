# SPDX-License-Identifier: BSD-3-Clause
"""A slow network between processes of one machine. Messages really are reduced, over gloo; what
the network would take beyond that is slept, so that the cores are free meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

Result = TypeVar("Result")


@dataclass(frozen=True)
class Network:
    """A message of m bytes takes latency_ms + ms_per_mb * m / 1e6 milliseconds."""

    latency_ms: float
    ms_per_mb: float

    def seconds(self, size: int) -> float:
        return (self.latency_ms + self.ms_per_mb * size / 1e6) / 1e3


class Link:
    """The messages of one process group, one after the other: a message begins when it has
    been sent and the one before it has arrived. What the receiver does when one has arrived
    runs on a thread of its own, and holds up no other message."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.is_slow = True  # else messages that are sent from now on take no longer than gloo
        self.buckets: list[int] = []  # bytes of the messages of the last complete pass
        self._pass: list[int] = []
        self.log: list[tuple[float, float]] = []  # of each message, when it was sent and arrived
        self._free = 0.0  # when the last message has arrived; of the wire's thread
        self._wire = ThreadPoolExecutor(1)
        self._receiver = ThreadPoolExecutor(1)

    def mean(self, buffer: Tensor) -> Future[Tensor]:
        """Completes with the buffer when the mean of all ranks is in it."""
        buffer.mul_(1.0 / dist.get_world_size())  # what DDP does without a hook
        return self.carry(dist.all_reduce(buffer, async_op=True), buffer, buffer.nbytes)

    def carry(self, work: dist.Work, result: Result, size: int) -> Future[Result]:
        """Completes with the result when this work, which has begun, and its time on the link
        are over."""
        arrived: Future[Result] = Future()
        seconds = self.network.seconds(size) if self.is_slow else 0.0
        self._wire.submit(self._carry, work, result, time.perf_counter(), seconds, arrived)
        return arrived

    def note(self, size: int, is_last: bool) -> None:
        self._pass.append(size)
        if is_last:
            self.buckets, self._pass = self._pass, []

    def close(self) -> None:
        self._wire.shutdown()
        self._receiver.shutdown()

    def _carry(
        self, work: dist.Work, result: Result, sent: float, seconds: float, arrived: Future[Result]
    ) -> None:
        due = max(sent, self._free) + seconds
        try:
            work.wait()
        except Exception as error:  # the other rank is gone
            self._receiver.submit(arrived.set_exception, error)
            return
        now = time.perf_counter()
        self._free = max(due, now)
        self.log.append((sent, self._free))
        time.sleep(self._free - now)
        self._receiver.submit(arrived.set_result, result)


# register_comm_hook() refuses annotations that are text, as here they all are.
def mean_over_link(link, bucket):
    """A communication hook for DistributedDataParallel; its state is a Link."""
    link.note(bucket.buffer().nbytes, bucket.is_last())
    return link.mean(bucket.buffer())


# register_comm_hook() refuses annotations that are text, as here they all are.
def known_over_link(link, bucket):
    """The same for ranks that train on the same batches: the mean is known, and a token is really
    reduced, so that the network takes no core."""
    link.note(bucket.buffer().nbytes, bucket.is_last())
    token = dist.all_reduce(torch.zeros(1), async_op=True)
    return link.carry(token, bucket.buffer(), bucket.buffer().nbytes)
