# SPDX-License-Identifier: BSD-3-Clause
"""Plans of a layer pipeline: which process runs which task of which layer, and in which order.
Planners in C decide (plugin/planners/pipeline/pipeline.h)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, NamedTuple

from optfuse._arguments.check import argument, whole
from optfuse._table import aligned
from optfuse_layers.pipeline import planner
from optfuse_layers.pipeline.gantt import Bar, draw

#: In the order of of_strategy of plugin/planners/pipeline/pipeline.h.
STRATEGIES = (
    "gpipe",
    "1f1b",
    "pipedream_replicated",
    "intra",
    "layerpipe",
    "1f1b_flush",
    "fast_forward",
    "modulo",
)
#: Those that schedule by what is ready: dX, else a forward, else dW.
FORWARDING = ("fast_forward", "modulo")
#: Those whose batches may share an update that the next forwards see: D = 0.
SYNCHRONOUS = ("gpipe", "1f1b_flush", *FORWARDING)
#: In the order of of_task_kind there.
KINDS = ("forward", "input_gradient", "second_input_gradient", "weight_gradient", "update")
SPLIT_MULTIPLE = 16  # OF_SPLIT_MULTIPLE there
_BATCHES = whole("a number of batches, at least 1", 1, 2**31 - 1)


class Task(NamedTuple):
    kind: str  # of KINDS
    layer: int
    batch: int


@dataclass(frozen=True)
class PlannedLayer:
    """The costs of one entry of the model, for one batch (a micro-batch of SYNCHRONOUS)."""

    name: str
    forward: float  # seconds
    input_gradient: float
    weight_gradient: float
    update: float
    in_elements: int
    out_elements: int
    parameters: int  # elements that are trained; 0: no weight gradient and no update
    movable: bool  # dX and dW may run elsewhere than the forward, dX on two processes
    channels: int  # of the input, or features: what `split` divides; 0 if not movable


@dataclass(frozen=True)
class Place:
    """The processes of a layer's tasks. The update runs on `forward`'s, which owns the weight."""

    forward: int
    weight_gradient: int
    input_gradient: int
    second_input_gradient: int | None = None
    split: int | None = None  # input channels of the first part of dX, a multiple of 16
    #: The layer is on so many processes from `forward` on, and batch b on forward + b % replicas.
    replicas: int = 1


@dataclass(frozen=True)
class Simulated:
    """The times of a simulated run. Messages don't wait for each other."""

    makespan: float  # seconds of all batches
    period: float  # seconds a batch, away from both ends; 0: too few batches
    busy: float  # share of the makespan, mean over processes
    messages: float  # a batch
    bytes: float  # a batch
    in_flight: int  # the most batches that a process had begun and not ended
    #: The most that a process held for gradients to come: inputs of its layers, and gradients of
    #: their outputs.
    held_bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """A plan that optfuse.pipeline.plan() returns. Equal if all values are. str() is a table."""

    strategy: str  # of STRATEGIES
    processes: int
    micro_batches: int  # batches an update; 1 but for SYNCHRONOUS
    network: tuple[float, float]  # seconds a message, and a byte
    element_bytes: int
    layers: tuple[PlannedLayer, ...]
    places: tuple[Place, ...]
    #: D(l): with g = micro_batches * replicas batches an update, the forward of batch b sees the
    #: updates of all batches of the groups < b // g - D(l).
    delays: tuple[int, ...]
    #: The most batches that a process begins before it ends one, of FORWARDING; 0: any number.
    in_flight: int = 0
    chunk: int = 0  # layers that "modulo" deals together

    def tasks(self, process: int, batches: int) -> tuple[Task, ...]:
        """The tasks of this process for so many batches, in this order. The update of a group of
        batches is that of its last batch; the last group may be smaller."""
        return tuple(
            Task(KINDS[task.kind], task.layer, task.batch)
            for task in _scheduled(self, batches)
            if task.process == process
        )

    def simulated(self, batches: int) -> Simulated:
        """A simulated run of so many batches, by the layers' seconds and the network."""
        return simulated(self, batches, _scheduled(self, batches))

    def gantt(self, path: str | PathLike[str], batches: int = 8) -> None:
        """Draws the simulated run of so many batches into a file, whose ending says how (.png,
        .svg). Raises optfuse.Error where matplotlib is not installed."""
        tasks = _scheduled(self, batches)
        simulated(self, batches, tasks)
        bars = [
            Bar(task.process, KINDS[task.kind], task.batch, task.start, task.end) for task in tasks
        ]
        draw(path, f"{self.strategy}, {batches} batches", self.processes, bars)

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or another process; see from_state()."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PipelinePlan:
        """The plan with this state()."""
        made = dict(state)
        made["network"] = tuple(made["network"])
        made["layers"] = tuple(PlannedLayer(**layer) for layer in made["layers"])
        made["places"] = tuple(Place(**place) for place in made["places"])
        made["delays"] = tuple(made["delays"])
        return cls(**made)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "F", "dX", "dW", "D", "ms: F", "dX", "dW", "update")
        ]
        planned = zip(self.layers, self.places, self.delays, strict=True)
        for i, (layer, place, delay) in enumerate(planned):
            where = _where(layer, place, self._has_input_gradient(i))
            rows.append((layer.name, *where, str(delay), *_ms(layer)))
        return "\n".join([*aligned(rows), self._bottom_line()])

    def _bottom_line(self) -> str:
        batches = 12 * self.processes * self.micro_batches
        found = self.simulated(batches)
        return (
            f"{self.strategy} on {self.processes} processes, simulated: {1e3 * found.period:.3g} "
            f"ms a batch; {found.bytes:,.0f} bytes in {found.messages:.1f} messages a batch; at "
            f"most {found.in_flight} in flight, {found.held_bytes:,} bytes held"
        )

    def _has_input_gradient(self, index: int) -> bool:
        return any(layer.parameters for layer in self.layers[:index])


def _where(layer: PlannedLayer, place: Place, has_input_gradient: bool) -> tuple[str, str, str]:
    """The processes of F, dX and dW."""
    last = place.forward + place.replicas - 1
    if last > place.forward:
        both = f"{place.forward}-{last}"
        return both, both if has_input_gradient else "-", both if layer.parameters else "-"
    dx = str(place.input_gradient)
    if place.split is not None:
        dx += f" [0, {place.split}), {place.second_input_gradient}"
    weight = str(place.weight_gradient) if layer.parameters else "-"
    return str(place.forward), dx if has_input_gradient else "-", weight


def _ms(layer: PlannedLayer) -> tuple[str, ...]:
    times = layer.forward, layer.input_gradient, layer.weight_gradient, layer.update
    return tuple(f"{1e3 * seconds:.3g}" for seconds in times)


def _pipeline(
    layers: Sequence[PlannedLayer],
    strategy: str,
    processes: int,
    micro_batches: int,
    element_bytes: int,
    in_flight: int,
    chunk: int,
) -> planner.Pipeline:
    """Without places."""
    costs = [
        planner.LayerCosts(
            *(la.forward, la.input_gradient, la.weight_gradient, la.update),
            *(n * element_bytes for n in (la.in_elements, la.out_elements, la.parameters)),
            la.channels,
            la.movable,
        )
        for la in layers
    ]
    n = len(costs)
    numbers = STRATEGIES.index(strategy), processes, micro_batches, in_flight, chunk
    return planner.Pipeline(*numbers, (planner.LayerCosts * n)(*costs), None, n)


def of_plan(plan: PipelinePlan) -> planner.Pipeline:
    """The plan as the planner takes it."""
    options = plan.micro_batches, plan.element_bytes, plan.in_flight, plan.chunk
    made = _pipeline(plan.layers, plan.strategy, plan.processes, *options)
    made.places = (planner.Place * made.n)(*map(_row, plan.places))
    return made


def _row(place: Place) -> tuple[int, ...]:
    second = place.second_input_gradient
    own = place.forward, place.weight_gradient, place.input_gradient
    return *own, planner.NO_PROCESS if second is None else second, place.split or 0, place.replicas


def _place(row: planner.Place) -> Place:
    own = row.forward, row.weight_gradient, row.input_gradient
    if not row.split:
        return Place(*own, replicas=row.replicas)
    return Place(*own, row.second_input_gradient, row.split, row.replicas)


def _scheduled(plan: PipelinePlan, batches: int) -> Array[planner.Task]:
    batches = argument("PipelinePlan", "batches", batches, _BATCHES)
    return planner.schedule(of_plan(plan), plan.network, batches)


def simulated(plan: PipelinePlan, batches: int, tasks: Array[planner.Task]) -> Simulated:
    """Writes the tasks' times."""
    found = planner.simulate(of_plan(plan), plan.network, batches, tasks)
    times = found.makespan, found.period, found.busy
    return Simulated(*times, found.messages, found.bytes, found.in_flight, int(found.held_bytes))


def placed(
    layers: Sequence[PlannedLayer],
    strategy: str,
    processes: int,
    network: tuple[float, float],
    micro_batches: int = 1,
    element_bytes: int = 4,
    in_flight: int = 0,
    chunk: int = 0,
) -> PipelinePlan:
    """The plan of these layers; of_pipeline_place_layers() says how they are placed."""
    options = micro_batches, element_bytes, in_flight, chunk
    of = _pipeline(layers, strategy, processes, *options)
    return PipelinePlan(
        strategy,
        processes,
        micro_batches,
        network,
        element_bytes,
        tuple(layers),
        tuple(map(_place, planner.place(of, network))),
        tuple(planner.delays(of)),
        in_flight,
        chunk,
    )
