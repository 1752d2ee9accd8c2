# SPDX-License-Identifier: BSD-3-Clause
"""Messages between the processes of a pipeline, by isend and irecv of torch.distributed.

An edge goes one way, from one process to another, and is a process group of its own: NCCL works
off what two processes exchange in one group in one order, in which messages that cross could wait
for each other. Both ends know which messages come in which order (flow.py), so a message needs
no header. No send is waited for before the end, and a receive is only waited for when its task
comes: whatever the plan's order can do, this can."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from optfuse._native import Error
from optfuse._pipeline.flow import Key
from optfuse._pipeline.shapes import Spec

AHEAD = 4  # messages of an edge that are received before their task comes
TAGS = 1 << 15


class Lost(Error):
    """Another process of the pipeline does not answer."""


def lost(group: dist.ProcessGroup | None, process: int, doing: str, error: Exception) -> Lost:
    """The error of a process that has waited for another one."""
    whole = str(error).strip().splitlines()
    return Lost(
        f"optfuse: process {dist.get_rank(group)} of the pipeline has lost process {process} "
        f"{doing}: {whole[0] if whole else type(error).__name__}. The weights are in the middle "
        "of a batch: start all processes again, from a checkpoint of Pipeline.state_dict()"
    )


class Out:
    """The sending end of an edge. What is on its way is held until it has been received: a thread
    of gloo's waits for that, since a send of gloo's can't be asked whether it is done."""

    def __init__(self, group: dist.ProcessGroup, to: int, device: torch.device) -> None:
        self._group, self._to = group, to
        self._number = 0
        self._way: deque[tuple[dist.Work, Tensor]] = deque()
        self._waits = group._get_backend(device).name() == "gloo"
        self._queue: queue.SimpleQueue[tuple[dist.Work, Tensor] | None] = queue.SimpleQueue()
        if self._waits:
            threading.Thread(target=_reap, args=(self._queue,), daemon=True).start()

    def send(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._number += 1
            whole = tensor.detach().contiguous()
            work = dist.isend(whole, group=self._group, group_dst=self._to, tag=self._number % TAGS)
            if self._waits:
                self._queue.put((work, whole))
            else:
                self._way.append((work, whole))
        while self._way and self._way[0][0].is_completed():
            self._way.popleft()

    def close(self) -> None:
        self._queue.put(None)


def _reap(sent: queue.SimpleQueue[tuple[dist.Work, Tensor] | None]) -> None:
    while (item := sent.get()) is not None:
        try:
            item[0].wait()
        except Exception:  # its process has gone, which whoever waits for that one finds out
            return
        del item


class In:
    """The receiving end of an edge."""

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._number = 0
        self._to_come: deque[Key] = deque()
        self._posted: dict[Key, list[tuple[dist.Work, Tensor]]] = {}

    def expect(self, keys: Iterable[Key], specs: Callable[[Key], list[Spec]]) -> None:
        """The messages of a run, in the order of the sender."""
        self._to_come.extend(keys)
        self._specs = specs
        self._post_ahead()

    def receive(self, key: Key) -> list[Tensor]:
        """Raises what torch.distributed raises."""
        while key not in self._posted:
            self._post()
        found = self._posted.pop(key)
        self._post_ahead()
        for work, _ in found:
            work.wait()
        return [tensor for _, tensor in found]

    def _post_ahead(self) -> None:
        while self._to_come and len(self._posted) < AHEAD:
            self._post()

    def _post(self) -> None:
        key = self._to_come.popleft()
        works = []
        for shape, dtype in self._specs(key):
            self._number += 1
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(
                tensor, group=self._group, group_src=self._source, tag=self._number % TAGS
            )
            works.append((work, tensor))
        self._posted[key] = works


class Transport:
    """The edges of this process. All processes make it, with the same edges."""

    def __init__(
        self, edges: list[tuple[int, int]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """device: of all messages of this process."""
        self._group = group
        self._timeout = timeout_of(group, device)
        self.process = dist.get_rank(group)
        self._groups: list[dist.ProcessGroup] = []
        self._out: dict[int, Out] = {}
        self.sources: dict[int, In] = {}
        # What local synchronization calls a group depends on how many its processes know, and
        # they wait for ever if that differs. Where all processes are here, names are counted.
        self._of_all = group.size() == dist.get_world_size()
        for source, to in edges:
            is_mine = self.process in (source, to)
            if not is_mine and not self._of_all:
                continue
            edge = self._edge(source, to)
            if not is_mine:
                continue
            first = dist.get_process_group_ranks(edge)[0]
            here = dist.get_process_group_ranks(group)
            place = {here[p]: int(here[p] != first) for p in (source, to)}
            if self.process == source:
                self._out[to] = Out(edge, place[to], device)
            else:
                self.sources[source] = In(edge, place[source], device)

    def _edge(self, source: int, to: int) -> dist.ProcessGroup:
        here = dist.get_process_group_ranks(self._group)
        made = dist.new_group(
            [here[source], here[to]],
            timeout=self._timeout,
            backend=dist.get_backend_config(self._group),
            use_local_synchronization=not self._of_all,
        )
        if self.process in (source, to):
            self._groups.append(made)
        return made

    def send(self, to: int, tensors: Iterable[Tensor], doing: str) -> None:
        try:
            self._out[to].send(tensors)
        except RuntimeError as error:
            raise lost(self._group, to, doing, error) from error

    def receive(self, source: int, key: Key, doing: str) -> list[Tensor]:
        try:
            return self.sources[source].receive(key)
        except RuntimeError as error:
            raise lost(self._group, source, f"{doing}, waiting for {key}", error) from error

    def close(self) -> None:
        """Ends the edges: whoever waits at their other end gets an error."""
        for out in self._out.values():
            out.close()
        groups, self._groups = self._groups, []
        for group in groups:
            group.abort()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    return group._get_backend(device).options._timeout  # type: ignore[no-any-return]
