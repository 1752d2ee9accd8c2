# SPDX-License-Identifier: BSD-3-Clause
"""The values that a plan's tasks need and make, hence which messages go between processes.

A value is named by a Key. What a task makes is used on its own process, or sent once to each
other process that has a task that needs the value. Every process finds the same messages, in the
same order, from the plan alone."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from optfuse._library.bindings import Error
from optfuse_layers.pipeline.plan import PipelinePlan, Task

BACKWARD = ("input_gradient", "second_input_gradient", "weight_gradient")
PARTS = BACKWARD[:2]  # of the gradient of a layer's input


class Key(NamedTuple):
    """kind: "output" of the layer's forward pass, which the next layer gets; its "input", for a
    dW elsewhere; "weights" (columns of part) for a dX elsewhere; "input_gradient", by parts,
    where `layer` may be the number of layers: the gradient of the loss; "gradients" of the
    layer's parameters."""

    kind: str
    layer: int
    batch: int
    part: int = 0

    def __str__(self) -> str:
        return f"the {self.kind.replace('_', ' ')} of layer {self.layer}, batch {self.batch}"


class Flow:
    """behind: (layer, part) -> how many updates of groups before its own a dX does not see yet;
    None: as many as the forward pass."""

    def __init__(
        self, plan: PipelinePlan, behind: dict[tuple[int, int], int] | None = None
    ) -> None:
        self.plan = plan
        self.n = len(plan.layers)
        trained = [n for n, layer in enumerate(plan.layers) if layer.parameters]
        self.first_trained = trained[0] if trained else self.n
        self.behind = behind
        self.groups = [plan.micro_batches * place.replicas for place in plan.places]
        self.multiple = math.lcm(*self.groups)  # after which groups of all layers begin together

    def has(self, kind: str, layer: int) -> bool:
        if kind == "forward":
            return True
        if kind == "input_gradient":
            return self.first_trained < layer < self.n
        if kind == "second_input_gradient":
            return self.has("input_gradient", layer) and self.plan.places[layer].split is not None
        return self.plan.layers[layer].parameters > 0

    def process(self, kind: str, layer: int, batch: int) -> int:
        place = self.plan.places[layer]
        if place.replicas > 1:
            return place.forward + batch % place.replicas
        if kind == "second_input_gradient":
            assert place.second_input_gradient is not None
            return place.second_input_gradient
        at = {"input_gradient": place.input_gradient, "weight_gradient": place.weight_gradient}
        return at.get(kind, place.forward)

    def is_on(self, layer: int, process: int) -> bool:
        """Whether the process owns the layer's weights."""
        place = self.plan.places[layer]
        return place.forward <= process < place.forward + place.replicas

    def is_divided(self, layer: int) -> bool:
        """Whether some of its tasks run on another process than its forward pass."""
        place = self.plan.places[layer]
        return any(
            self.has(kind, layer) and self.process(kind, layer, 0) != place.forward
            for kind in BACKWARD
            if place.replicas == 1
        )

    def columns(self, layer: int, part: int) -> slice:
        """Input channels or features of a part of dX."""
        split = self.plan.places[layer].split
        return slice(None) if split is None else (slice(split), slice(split, None))[part]

    def parts(self, layer: int) -> list[int]:
        return [n for n, kind in enumerate(PARTS) if self.has(kind, layer)]

    def gradient(self, layer: int, batch: int) -> list[Key]:
        """The gradient of the layer's input, by parts; layer n: that of the loss."""
        parts = self.parts(layer) if layer < self.n else [0]
        return [Key("input_gradient", layer, batch, part) for part in parts]

    def is_far(self, kind: str, layer: int) -> bool:
        """Whether this task of a divided layer runs on another process than the forward pass."""
        place = self.plan.places[layer]
        if place.replicas > 1 or not self.has(kind, layer):
            return False
        return self.process(kind, layer, 0) != place.forward

    def first_of_group(self, layer: int, batch: int) -> int:
        return batch // self.groups[layer] * self.groups[layer]

    def group_of(self, layer: int, batch: int, batches: int) -> range:
        """The batches that share the update of this one, in a run of so many."""
        first = self.first_of_group(layer, batch)
        return range(first, min(first + self.groups[layer], batches))

    def needs(self, task: Task) -> list[Key]:
        """The values that a task takes; for an update see group_of()."""
        kind, n, batch = task
        if kind == "forward":
            return [Key("output", n - 1, batch)] if n else []
        found = self.gradient(n + 1, batch)
        if kind in PARTS and self.is_far(kind, n):
            found.append(Key("weights", n, batch, PARTS.index(kind)))
        if kind == "weight_gradient" and self.is_far(kind, n):
            found.append(Key("input", n, batch))
        return found

    def makes(self, task: Task) -> list[Key]:
        kind, n, batch = task
        if kind == "forward":
            return self._forward_makes(n, batch)
        if kind in PARTS:
            return [Key("input_gradient", n, batch, PARTS.index(kind))]
        if kind == "weight_gradient":
            return [Key("gradients", n, batch)]
        return [
            Key("weights", n, batch + 1 + late, part)
            for part in self._far_parts(n)
            if (late := self._behind(n, part)) < self.plan.delays[n]
        ]

    def _forward_makes(self, n: int, batch: int) -> list[Key]:
        last = n == self.n - 1
        found = [Key("input_gradient", self.n, batch)] if last else [Key("output", n, batch)]
        if self.is_far("weight_gradient", n):
            found.append(Key("input", n, batch))
        for part in self._far_parts(n):  # those that no update of this run makes
            late = self._behind(n, part)
            if late == self.plan.delays[n] or batch <= late:
                found.append(Key("weights", n, batch, part))
        return found

    def _behind(self, layer: int, part: int) -> int:
        late = self.plan.delays[layer]
        return late if self.behind is None else self.behind.get((layer, part), late)

    def _far_parts(self, layer: int) -> list[int]:
        return [n for n, kind in enumerate(PARTS) if self.is_far(kind, layer)]

    def users(self, key: Key, batches: int) -> Iterator[tuple[Task, int]]:
        """The tasks that need the value, with their processes."""
        n, batch = key.layer, key.batch
        if batch >= batches:
            return
        tasks: Iterable[Task]
        if key.kind == "output":
            tasks = [Task("forward", n + 1, batch)]
        elif key.kind == "input":
            tasks = [Task("weight_gradient", n, batch)]
        elif key.kind == "weights":
            tasks = [Task(PARTS[key.part], n, batch)]
        elif key.kind == "gradients":
            tasks = self._updates(n, batch, batches)
        else:
            tasks = [Task(kind, n - 1, batch) for kind in BACKWARD if self.has(kind, n - 1)]
        for task in tasks:
            yield task, self.process(task.kind, task.layer, task.batch)

    def _updates(self, layer: int, batch: int, batches: int) -> list[Task]:
        """One a group, named by its last batch; of replicas, one each, named by its own batch, or
        by the one that it would have in an incomplete last group."""
        replicas = self.plan.places[layer].replicas
        if replicas == 1:
            return [Task("update", layer, self.group_of(layer, batch, batches)[-1])]
        first = self.first_of_group(layer, batch)
        return [Task("update", layer, first + n) for n in range(replicas)]

    def source(self, key: Key) -> int:
        """The process that makes the value."""
        n, batch = key.layer, key.batch
        if key.kind == "gradients":
            return self.process("weight_gradient", n, batch)
        if key.kind != "input_gradient":
            return self.process("forward", n, batch)
        if n == self.n:
            return self.process("forward", n - 1, batch)
        return self.process(PARTS[key.part], n, batch)

    def goes_to(self, key: Key, process: int, batches: int) -> list[int]:
        """The other processes that need what this one has made."""
        found = dict.fromkeys(to for _, to in self.users(key, batches))
        return [to for to in found if to != process]

    def uses(self, key: Key, process: int, batches: int) -> int:
        """How many tasks of this process need the value."""
        return sum(at == process for _, at in self.users(key, batches))


class Order:
    """The tasks of every process for so many batches, checked to come to an end."""

    def __init__(self, flow: Flow, batches: int) -> None:
        self.flow, self.batches = flow, batches
        self.tasks = [flow.plan.tasks(p, batches) for p in range(flow.plan.processes)]

    def sent(self, source: int, to: int) -> Iterator[Key]:
        """The messages that a process sends to another, in this order."""
        for task in self.tasks[source]:
            for key in self.flow.makes(task):
                if to in self.flow.goes_to(key, source, self.batches):
                    yield key

    def edges(self) -> list[tuple[int, int]]:
        pairs = {
            (source, to)
            for source, tasks in enumerate(self.tasks)
            for task in tasks
            for key in self.flow.makes(task)
            for to in self.flow.goes_to(key, source, self.batches)
        }
        return sorted(pairs)


def behind(plan: PipelinePlan) -> dict[tuple[int, int], int]:
    """(layer, part) -> how many updates (of groups) the plan leaves between what a dX can see for
    sure and its own group: the updates that come before it, on its process or because messages
    say so. Where a layer has no dX, its products with weights run in dW, which counts as part 0.

    The largest number over the batches of a run that is long enough for the pipeline to fill.
    Raises optfuse.Error if the tasks can never end."""
    flow = Flow(plan)
    batches = flow.multiple * (2 * (max(plan.delays, default=0) + plan.processes) + 4)
    return dict(_behind(Order(flow, batches)))


def _behind(order: Order) -> dict[tuple[int, int], int]:
    """Runs the tasks in any possible order, each process with what it knows: of each layer, how
    many groups have been updated. A message brings what its sender knew."""
    found: dict[tuple[int, int], int] = {}
    known = [[0] * order.flow.n for _ in order.tasks]
    made: dict[Key, list[int]] = {}
    queues = [deque(tasks) for tasks in order.tasks]
    while any(queues):
        before = sum(map(len, queues))
        for process, queue in enumerate(queues):
            while queue and all(key in made for key in _inputs(order, queue[0])):
                _play(order, queue.popleft(), known[process], made, found)
        if sum(map(len, queues)) == before:
            stuck = next(queue[0] for queue in queues if queue)
            raise Error(
                f"optfuse: this plan never ends: its {stuck.kind} of layer {stuck.layer}, batch "
                f"{stuck.batch}, waits for what comes after it; make it by optfuse.pipeline.plan()"
            )
    return found


def _inputs(order: Order, task: Task) -> list[Key]:
    """With the forward pass of its own layer, which every dX and dW needs."""
    if task.kind == "update":
        group = order.flow.group_of(task.layer, task.batch, order.batches)
        return [Key("gradients", task.layer, b) for b in group]
    found = order.flow.needs(task)
    if task.kind in BACKWARD:
        found = [key for key in found if key.kind == "input_gradient"]
        found.append(Key("forward", task.layer, task.batch))
    return found


def _play(
    order: Order,
    task: Task,
    known: list[int],
    made: dict[Key, list[int]],
    found: dict[tuple[int, int], int],
) -> None:
    flow = order.flow
    for key in _inputs(order, task):
        known[:] = map(max, known, made[key])
    group = task.batch // flow.groups[task.layer]
    inner = task.kind == "weight_gradient" and not flow.has("input_gradient", task.layer)
    if task.kind in PARTS or inner:
        at = task.layer, PARTS.index(task.kind) if task.kind in PARTS else 0
        found[at] = max(found.get(at, 0), group - known[task.layer])
    if task.kind == "update":
        known[task.layer] = group + 1
    for key in (*flow.makes(task), Key(task.kind, task.layer, task.batch)):
        made[key] = list(known)


@functools.lru_cache(maxsize=8)
def ordered(flow: Flow, batches: int) -> Order:
    return Order(flow, batches)
