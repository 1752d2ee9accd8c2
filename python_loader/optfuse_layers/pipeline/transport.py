# SPDX-License-Identifier: BSD-3-Clause
"""Messages between the processes of a pipeline, by isend and irecv of torch.distributed.

An edge goes one way, from one process to another, and is a process group of its own: NCCL works
off what two processes exchange in one group in one order, in which messages that cross could wait
for each other. Both ends know which messages come in which order (flow.py), so a message needs
no header. No send is waited for before the end, and a receive is only waited for when its task
comes: whatever the plan's order can do, this can.

A process that fails says so in the store of torch.distributed, and then closes its connections: so
do those that lose it, one after the other, and each can say which process was the first."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optfuse._library.bindings import Error
from optfuse_layers.pipeline.flow import Key
from optfuse_layers.pipeline.shapes import Spec

AHEAD = 4  # messages of an edge that are received before their task comes
TAGS = 1 << 15
CPU = torch.device("cpu")
NEVER = timedelta(days=365)  # when gloo gives a message up that _within() waits for
STORE_LOST = (
    "The store of torch.distributed is lost, too. It is on the process of rank 0, where no launcher"
    " has it: so that one may have been the first"
)


class Lost(Error):
    """Another process of the pipeline does not answer."""


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


class Arrivals:
    """Counts the messages that have come, for a process that waits for any of several."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait(self, seen: int, patience: timedelta) -> bool:
        """Until there are more than those that were seen."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count > seen, patience.total_seconds())


class Watch:
    """A thread that waits for the messages of an edge, one after the other, since a receive of
    gloo's can't be asked whether it is done."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._posted: queue.SimpleQueue[tuple[list[dist.Work], Future[None]]] = queue.SimpleQueue()
        self._arrivals = arrivals
        threading.Thread(target=self._play, daemon=True).start()

    def add(self, works: list[dist.Work]) -> Future[None]:
        done: Future[None] = Future()
        self._posted.put((works, done))
        return done

    def _play(self) -> None:
        while True:
            works, done = self._posted.get()
            try:
                for work in works:
                    work.wait(NEVER)
                done.set_result(None)
            except Exception as error:  # which whoever needs the message gets
                done.set_exception(error)
            self._arrivals.add()
            del works, done


class In:
    """The receiving end of an edge. arrivals: whom to tell of messages, if it is asked for them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        device: torch.device,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._group, self._source, self._device = group, source, device
        self._timeout = _timeout_of(group, device)
        self._watch = None if arrivals is None else Watch(arrivals)
        self._watched: dict[Key, Future[None]] = {}
        self._number = 0
        self._to_come: deque[Key] = deque()
        self._posted: dict[Key, list[tuple[dist.Work, Tensor]]] = {}

    def expect(self, keys: Iterable[Key], specs: Callable[[Key], list[Spec]]) -> None:
        """The messages of a run, in the order of the sender."""
        self._to_come.extend(keys)
        self._specs = specs
        self._post_ahead()

    def receive(self, key: Key) -> list[Tensor]:
        """Raises what torch.distributed raises, or TimeoutError."""
        while key not in self._posted:
            self._post()
        found = self._posted.pop(key)
        self._post_ahead()
        if key in self._watched:
            _result_within(self._timeout, self._watched.pop(key))
        else:
            for work, _ in found:
                work.wait()
        return [tensor for _, tensor in found]

    def is_there(self, key: Key) -> bool:
        """Whether receive() would not wait."""
        while key not in self._posted:
            self._post()
        if key in self._watched:
            return self._watched[key].done()
        return all(work.is_completed() for work, _ in self._posted[key])

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
        if self._watch is not None:
            self._watched[key] = self._watch.add([work for work, _ in works])


class Transport:
    """The edges of this process, and a group of all processes, by gloo, for what they agree on.
    All processes make it, with the same edges."""

    def __init__(
        self,
        edges: list[tuple[int, int]],
        group: dist.ProcessGroup,
        device: torch.device,
        watches: bool = False,
        shared: Iterable[tuple[int, int]] = (),
    ) -> None:
        """device: of all messages of this process. watches: for is_there(). shared: the edges of
        gradients of shared weights, which have no place in the order of the others."""
        self._group, self._device = group, device
        self._timeout = _timeout_of(group, device)
        is_gloo = group._get_backend(device).name() == "gloo"
        self._arrivals = Arrivals() if watches and is_gloo else None
        self.process = dist.get_rank(group)
        # Process 0 waits for another one while all others wait for process 0.
        self._patience = self._timeout * (2 if self.process else 1)
        self._groups: list[dist.ProcessGroup] = []
        self._out: dict[int, Out] = {}
        self.sources: dict[int, In] = {}
        self._shared_out: dict[int, Out] = {}
        self._shared_in: dict[int, In] = {}
        # Local synchronization names a group by how many groups its processes know, and
        # they wait for ever if that differs. Where all processes are here, names are counted.
        self._of_all = group.size() == dist.get_world_size()
        self._here = dist.get_process_group_ranks(group)
        self._everybody = self._made(self._here, "gloo")
        for source, to in edges:
            self._join(source, to, self._out, self.sources, self._arrivals)
        for source, to in shared:
            self._join(source, to, self._shared_out, self._shared_in, None)

    def _join(
        self,
        source: int,
        to: int,
        outs: dict[int, Out],
        ins: dict[int, In],
        arrivals: Arrivals | None,
    ) -> None:
        is_mine = self.process in (source, to)
        if not is_mine and not self._of_all:
            return
        edge = self._edge(source, to)
        if not is_mine:
            return
        first = dist.get_process_group_ranks(edge)[0]
        place = {self._here[p]: int(self._here[p] != first) for p in (source, to)}
        if self.process == source:
            outs[to] = Out(edge, place[to], self._device)
        else:
            ins[source] = In(edge, place[source], self._device, arrivals)

    def _edge(self, source: int, to: int) -> dist.ProcessGroup:
        backend = dist.get_backend_config(self._group)
        return self._made([self._here[source], self._here[to]], backend)

    def _made(self, ranks: list[int], backend: str) -> dist.ProcessGroup:
        made = dist.new_group(
            ranks,
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=not self._of_all,
        )
        if dist.get_rank() in ranks:
            self._groups.append(made)
        return made

    def send(self, to: int, tensors: Iterable[Tensor], doing: str) -> None:
        try:
            self._out[to].send(tensors)
        except RuntimeError as error:
            raise self._lost(to, doing, error) from error

    def receive(self, source: int, key: Key, doing: str) -> list[Tensor]:
        try:
            return self.sources[source].receive(key)
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(source, f"{doing}, waiting for {key}", error) from error

    def send_shared(self, to: int, tensors: Iterable[Tensor], doing: str) -> None:
        try:
            self._shared_out[to].send(tensors)
        except RuntimeError as error:
            raise self._lost(to, doing, error) from error

    def receive_shared(self, source: int, keys: list[Key], spec: Spec) -> list[Tensor]:
        """A tensor for each key."""
        edge = self._shared_in[source]
        try:
            edge.expect(keys, lambda key: [spec])
            return [tensor for key in keys for tensor in edge.receive(key)]
        except RuntimeError as error:
            raise self._lost(source, f"waiting for {keys[0]}", error) from error

    def is_there(self, source: int, key: Key) -> bool:
        """Whether receive() would not wait: the message has come, or never will."""
        return self.sources[source].is_there(key)

    def arrived(self) -> int:
        """How many messages have come, for wait_for_arrival()."""
        return self._arrivals.count if self._arrivals is not None else 0

    def wait_for_arrival(self, seen: int, source: int, key: Key) -> bool:
        """Waits for any message but those that were seen; one that is needed is that of the key.
        False: this backend does not tell."""
        if self._arrivals is None:
            return False
        if not self._arrivals.wait(seen, self._timeout):
            late = TimeoutError(f"Timed out after {self._timeout.total_seconds():g} seconds")
            raise self._lost(source, f"waiting for {key}", late)
        return True

    def gather(self, told: Any, doing: str) -> list[Any]:
        """Collects what each process reports; all call it. Process 0 hears the others one by one,
        so that the one that does not answer can be named, and tells them all."""
        if self.process > 0:
            self._tell(0, told, doing)
            return self._hear(0, doing)  # type: ignore[no-any-return]
        others = range(1, self._group.size())
        found = [told, *(self._hear(process, doing) for process in others)]
        for process in others:
            self._tell(process, found, doing)
        return found

    def _tell(self, to: int, told: Any, doing: str) -> None:
        try:
            _within(self._patience, functools.partial(_send, told, self._everybody, to))
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(to, doing, error) from error

    def _hear(self, source: int, doing: str) -> Any:
        try:
            return _within(self._patience, functools.partial(_receive, self._everybody, source))
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(source, doing, error) from error

    def fail(self, error: BaseException) -> None:
        """Ends the pipeline for all: whoever waits for this process gets an error, now or later."""
        self._first(self.process, error)
        for out in (*self._out.values(), *self._shared_out.values()):
            out.close()
        for group in self._groups:
            _abort(group, self._device)
        self._groups.clear()

    def _lost(self, process: int, doing: str, error: Exception) -> Lost:
        """The error of a process that has waited for another one."""
        first, why = self._first(process, error)
        return Lost(
            f"optfuse: process {self.process} of the pipeline has lost process {first} {doing}: "
            f"{why}. Start all processes again, from a checkpoint of Pipeline.state_dict()"
        )

    def _first(self, process: int, error: BaseException) -> tuple[int, str]:
        """The process that failed first, and why, as the first to see it has said. Whoever fails
        says so before its connections end, so who has said nothing has ended without a word."""
        why = f"{type(error).__name__}: {_first_sentence(error)}"
        seen = process, why
        store = dist.distributed_c10d._get_process_group_store(self._everybody)
        try:
            told = store.compare_set("failed", "", json.dumps(seen))
        except RuntimeError:
            return process, f"{why}. {STORE_LOST}"
        first, first_why = json.loads(told)
        if first == self.process != process:  # which was late
            return process, f"{why}; others had lost this process before: {first_why}"
        return first, first_why


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0]


def _send(told: Any, group: dist.ProcessGroup, to: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(told)), dtype=torch.uint8)
    for message in (torch.tensor(data.numel(), device=CPU), data):
        dist.isend(message, group=group, group_dst=to).wait(NEVER)


def _receive(group: dist.ProcessGroup, source: int) -> Any:
    size = torch.tensor(0, device=CPU)
    dist.irecv(size, group=group, group_src=source).wait(NEVER)
    data = bytearray(int(size))
    message = torch.frombuffer(data, dtype=torch.uint8)
    dist.irecv(message, group=group, group_src=source).wait(NEVER)
    return pickle.loads(data)


def _within(patience: timedelta, call: Callable[[], Any]) -> Any:
    """The result of a call that waits for a message. While gloo's own time-out ends all connections
    of the group, here they stay until this process has said in the store which one it has lost."""
    done: Future[Any] = Future()

    def play() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=play, daemon=True).start()
    return _result_within(patience, done)


def _result_within(patience: timedelta, done: Future[Any]) -> Any:
    try:
        return done.result(patience.total_seconds())
    except Late:
        raise TimeoutError(f"Timed out after {patience.total_seconds():g} seconds") from None


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    found: timedelta = group._get_backend(device).options._timeout  # type: ignore[attr-defined]
    return found


def _abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """gloo has no abort(): it ends all connections of a group in which a message is late."""
    if group._get_backend(device).name() != "gloo":
        group.abort()
        return
    for peer in range(group.size()):
        if peer != dist.get_rank(group):
            with contextlib.suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=TAGS)
                never.wait(timedelta(milliseconds=1))
