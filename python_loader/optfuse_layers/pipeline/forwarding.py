# SPDX-License-Identifier: BSD-3-Clause
"""Gradient fast-forwarding (arXiv 2110.00929) on one process: forwards and dX run in the order of
the plan, so that all processes know the order of messages; a dW runs when the next of those can't,
because its message has not come, or because too many batches are open. Whatever the times, the
gradients of a layer are added up in the order of their batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from optfuse_layers.pipeline.flow import BACKWARD, Flow, Key
from optfuse_layers.pipeline.plan import Task
from optfuse_layers.pipeline.transport import Transport


class Forwarding:
    """Plays one process's tasks, each of which `run` runs. waits: updates are made when the last
    layer of a group has its gradients. is_kept: whether this process has made the value and still
    has it."""

    def __init__(
        self,
        flow: Flow,
        process: int,
        tasks: list[Task],
        transport: Transport | None,
        waits: bool,
        is_kept: Callable[[Key], bool],
        run: Callable[[Task], None],
    ) -> None:
        self._flow, self._process, self._transport = flow, process, transport
        self._waits, self._is_kept, self._run = waits, is_kept, run
        kinds = {
            kind: [t for t in tasks if t.kind == kind] for kind in ("weight_gradient", "update")
        }
        self._late = {task: place for place, task in enumerate(kinds["weight_gradient"])}
        # Those that may be ready: after a dX; the next one of a layer without dX, of which there
        # is one at most.
        self._after_dx: set[Task] = set()
        self._without_dx = deque(t for t in self._late if not flow.has("input_gradient", t.layer))
        self._trained = {t.layer for t in self._late}
        self._updates = {(t.layer, t.batch): t for t in kinds["update"]}
        self._urgent = [t for t in tasks if t.kind not in kinds]
        self._left = Counter(t.batch for t in tasks if t.kind in BACKWARD)  # gradients of a batch
        self._open: set[int] = set()  # batches begun and not ended
        self._added = Counter[int]()  # of each layer, the dW that have run

    def play(self) -> None:
        for task in self._urgent:
            self._run_late_until(task)
            self._play(task)
        while self._late:
            self._play(self._next_late() or self._first_late())

    def _run_late_until(self, task: Task) -> None:
        """Runs dW while the task can't run, and waits only where no dW can, either."""
        seen = self._arrived()
        while self._late and not self._may_run(task):
            late = self._next_late()
            if late is None and self._wait(seen, task):
                seen = self._arrived()
                continue
            if late is None and self._may_begin(task):
                return
            self._play(late or self._first_late())

    def _arrived(self) -> int:
        return self._transport.arrived() if self._transport else 0

    def _wait(self, seen: int, task: Task) -> bool:
        """False: nothing tells this process of messages, so that it waits where it takes one."""
        needed = self._flow.needs(task if self._may_begin(task) else self._first_late())
        missing = next((key for key in needed if not self._is_here(key)), None)
        if missing is None:  # has come meanwhile
            return True
        assert self._transport is not None
        return self._transport.wait_for_arrival(seen, self._flow.source(missing), missing)

    def _play(self, task: Task) -> None:
        self._run(task)
        if task.kind == "forward":
            if self._left[task.batch]:
                self._open.add(task.batch)
            return
        self._left[task.batch] -= 1
        if not self._left[task.batch]:
            self._open.discard(task.batch)
        if task.kind == "weight_gradient":
            self._end_late(task)
            self._added[task.layer] += 1
            update = self._updates.get((task.layer, task.batch))
            if update is not None:
                self._run(update)
        elif (late := Task("weight_gradient", task.layer, task.batch)) in self._late:
            self._after_dx.add(late)

    def _end_late(self, task: Task) -> None:
        del self._late[task]
        self._after_dx.discard(task)
        if not self._flow.has("input_gradient", task.layer):
            self._without_dx.popleft()

    def _may_run(self, task: Task) -> bool:
        return self._may_begin(task) and all(map(self._is_here, self._flow.needs(task)))

    def _may_begin(self, task: Task) -> bool:
        """For a forward the updates of the groups before have been made, and its batch is open or
        may be."""
        kind, n, batch = task
        if kind != "forward":
            return True
        if self._flow.has("weight_gradient", n):
            first = self._flow.first_of_group(n, batch)
            trained = self._trained if self._waits else (n,)
            if any(self._added[layer] < first for layer in trained):
                return False
        most = self._flow.plan.in_flight
        return not most or batch in self._open or len(self._open) < most

    def _next_late(self) -> Task | None:
        """The first in the plan of those that can run."""
        return min(self._ready(), key=self._late.__getitem__, default=None)

    def _ready(self) -> list[Task]:
        """The dW that can run: after their layer's dX, which has the same dY; without one, as soon
        as dY is here."""
        found = list(self._after_dx)
        if self._without_dx and all(map(self._is_here, self._flow.needs(self._without_dx[0]))):
            found.append(self._without_dx[0])
        return found

    def _first_late(self) -> Task:
        return next(iter(self._late))

    def _is_here(self, key: Key) -> bool:
        source = self._flow.source(key)
        if self._is_kept(key):
            return True
        if source == self._process:
            return False
        assert self._transport is not None
        return self._transport.is_there(source, key)
