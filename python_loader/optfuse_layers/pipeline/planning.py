# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.pipeline.plan()."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optfuse._arguments.check import NETWORK, Kind, checked, need, number, one_of, optional, whole
from optfuse._library.bindings import Error
from optfuse_layers.communication import agreed, measured
from optfuse_layers.pipeline.arguments import SEQUENTIAL
from optfuse_layers.pipeline.costs import ANALYTIC, MEASURED, Seconds, layers_of
from optfuse_layers.pipeline.plan import FORWARDING, STRATEGIES, SYNCHRONOUS, PipelinePlan, placed

_MICRO_BATCHES = 4  # a process, as GPipe's paper recommends
_IN_FLIGHT = 2  # a process: half of the micro-batches that gpipe has by default


def _tensor(value: Any) -> Tensor:
    need(isinstance(value, Tensor))
    return cast(Tensor, value)


def _costs(value: Any) -> str | list[Seconds]:
    if isinstance(value, str):
        need(value in (MEASURED, ANALYTIC))
        return value
    need(isinstance(value, list | tuple))
    take = number("", 0.0).take
    need(all(isinstance(layer, list | tuple) and len(layer) == 4 for layer in value))
    found = [tuple(map(take, layer)) for layer in value]
    need(all(math.isfinite(seconds) for layer in found for seconds in layer))
    return found


@checked(
    model=SEQUENTIAL,
    example=Kind("a tensor, the input of one batch", _tensor),
    processes=whole("a number of processes, at least 1", 1, 2**31 - 1),
    strategy=one_of(*STRATEGIES),
    network=optional(NETWORK),
    costs=Kind(
        f"{MEASURED!r}, {ANALYTIC!r}, or for each layer a list of four times in seconds "
        "(forward, input gradient, weight gradient, update)",
        _costs,
    ),
    micro_batches=optional(whole("a number of micro-batches an update, at least 1", 1, 2**31 - 1)),
    in_flight=optional(whole("a number of micro-batches, or 0 for any", 0, 2**31 - 1)),
    chunk=optional(whole("a number of layers, at least 1", 1, 2**31 - 1)),
)
def plan(
    model: nn.Sequential,
    example: Tensor,
    processes: int,
    strategy: str = "layerpipe",
    *,
    network: tuple[float, float] | None = None,
    costs: str | Sequence[Seconds] = MEASURED,
    micro_batches: int | None = None,
    in_flight: int | None = None,
    chunk: int | None = None,
) -> PipelinePlan:
    """Places the entries of `model` on so many processes; each is a layer.

    example: the input of one batch, or of one micro-batch.
    strategy: docs/layerpipe.md has them all. "gpipe", "1f1b_flush", "fast_forward" and "modulo"
        keep the results of plain training, the others delay gradients by known numbers of batches.
    network: seconds a message, and a byte; None: measured between the processes of
        torch.distributed.
    costs: "measured" here and now, on copies of the layers; "analytic", by the multiply-adds of
        Linear and Conv2d; or four times in seconds for each layer.
    micro_batches: an update, of strategies without delays; None: four a process.
    in_flight: the most micro-batches that a process of "fast_forward" or "modulo" begins before it
        ends one, which bounds what it holds in memory; 0: any number; None: two a process.
    chunk: layers that "modulo" deals together; None: one.

    Where torch.distributed is initialized all processes call it, and the plan of the first one is
    everybody's. Raises optfuse.Error for a model that can't be a pipeline."""
    if micro_batches is None:
        micro_batches = _MICRO_BATCHES * processes if strategy in SYNCHRONOUS else 1
    _check(strategy, micro_batches, in_flight, chunk)
    if in_flight is None:
        in_flight = _IN_FLIGHT * processes if strategy in FORWARDING else 0
    if chunk is None:
        chunk = int(strategy == "modulo")
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if network is None:
        network = _measured_network(many, example)

    def make() -> PipelinePlan:
        layers = layers_of(model, example, costs, strategy in SYNCHRONOUS)
        sizes = micro_batches, _element_bytes(model), in_flight, chunk
        return placed(layers, strategy, processes, network, *sizes)

    return _agreed(make, example.device) if many else make()


def _check(strategy: str, micro_batches: int, in_flight: int | None, chunk: int | None) -> None:
    if micro_batches > 1 and strategy not in SYNCHRONOUS:
        raise Error(
            f"optfuse: plan() got micro_batches={micro_batches} with strategy={strategy!r}, which "
            f"updates after each batch; only {', '.join(SYNCHRONOUS)} have micro-batches"
        )
    if in_flight is not None and strategy not in FORWARDING:
        raise Error(
            f"optfuse: plan() got in_flight={in_flight} with strategy={strategy!r}, whose order "
            f"is fixed; only {' and '.join(FORWARDING)} keep to a number of batches in flight"
        )
    if chunk is not None and strategy != "modulo":
        raise Error(
            f"optfuse: plan() got chunk={chunk} with strategy={strategy!r}; only modulo deals "
            "layers in chunks"
        )


def _element_bytes(model: nn.Module) -> int:
    return next((p.element_size() for p in model.parameters()), 4)


def _measured_network(many: bool, example: Tensor) -> tuple[float, float]:
    if not many:
        raise Error(
            "optfuse: plan() measures messages between processes, and there is one; give "
            "network=(seconds a message, seconds a byte), (0, 0) for messages that cost nothing"
        )
    assert dist.group.WORLD is not None  # there are many
    return measured(dist.group.WORLD, example.device)[:2]


def _agreed(make: Callable[[], PipelinePlan], device: torch.device) -> PipelinePlan:
    """The plan of the first process. If making it fails there, all raise: the others wait for a
    word."""
    made: tuple[Any, str | None] = (None, None)
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            made = (make().state(), None)
        except Exception as error:
            made, raised = (None, str(error)), error
    state, text = agreed(made, dist.group.WORLD, device)
    if raised is not None:
        raise raised
    if text is not None:
        raise Error(f"optfuse: plan() failed in the first process: {text}")
    return PipelinePlan.from_state(state)
