# SPDX-License-Identifier: BSD-3-Clause
"""Plans of a layer pipeline: which process runs which task of which layer, and in which order.
What is decided here is decided by the core (plugin/pipeline.h)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

#: In the order of of_strategy of plugin/pipeline.h.
STRATEGIES = ("gpipe", "1f1b", "pipedream_replicated", "intra", "layerpipe")
#: In the order of of_task_kind there.
KINDS = ("forward", "input_gradient", "second_input_gradient", "weight_gradient", "update")


class Task(NamedTuple):
    kind: str  # of KINDS
    layer: int
    batch: int


@dataclass(frozen=True)
class Layer:
    """What an entry of the model costs, for one batch (a micro-batch of "gpipe")."""

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
class Plan:
    """What optfuse.pipeline.plan() returns. Equal if all values are. str() is a table."""

    strategy: str  # of STRATEGIES
    processes: int
    micro_batches: int  # batches an update; 1 but for "gpipe"
    network: tuple[float, float]  # seconds a message, and a byte
    element_bytes: int
    layers: tuple[Layer, ...]
    places: tuple[Place, ...]
    #: D(l): with g = micro_batches * replicas batches an update, the forward of batch b sees the
    #: updates of all batches of the groups < b // g - D(l).
    delays: tuple[int, ...]

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or another process; see from_state()."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Plan:
        """The plan with this state()."""
        made = dict(state)
        made["network"] = tuple(made["network"])
        made["layers"] = tuple(Layer(**layer) for layer in made["layers"])
        made["places"] = tuple(Place(**place) for place in made["places"])
        made["delays"] = tuple(made["delays"])
        return cls(**made)
