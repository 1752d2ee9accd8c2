# SPDX-License-Identifier: BSD-3-Clause
"""Weights that two layers share, as an embedding and the head of a language model do. Each process
that has one of the layers has the weight and its state; they exchange their gradients at the end
of a group, so that both make the same update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from optfuse._library.bindings import Error
from optfuse_layers.pipeline.flow import Key
from optfuse_layers.pipeline.plan import PipelinePlan
from optfuse_layers.pipeline.shapes import spec_of
from optfuse_layers.pipeline.transport import Transport

_UNUSED = (
    "optfuse: parameter {!r} of layer {}, which shares it with another layer, has no gradient for "
    "{}; processes exchange the gradients of shared weights, so both layers must use them{}"
)
_SUMS = ' in every one, or pass shared="sums", where one for each group is enough'

MODES = ("sums", "each")


@dataclass(frozen=True)
class Tie:
    """One parameter, in two layers, each with its name there."""

    parameter: nn.Parameter
    layers: tuple[int, int]
    names: tuple[str, str]


def ties_of(module: nn.Sequential) -> list[Tie]:
    """In the order of the layers. Parameters of more than two layers are left out."""
    places: dict[int, list[tuple[int, str, nn.Parameter]]] = defaultdict(list)
    for n, layer in enumerate(module):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                places[id(parameter)].append((n, name, parameter))
    found = (place for place in places.values() if len(place) == 2)
    return [Tie(p, (n, k), (at, name)) for (n, at, p), (k, name, _) in found]


def edges_of(plan: PipelinePlan, ties: list[Tie]) -> list[tuple[int, int]]:
    """The processes that exchange gradients, both ways."""
    pairs = [tuple(plan.places[n].forward for n in tie.layers) for tie in ties]
    return sorted({p for a, b in pairs if a != b for p in ((a, b), (b, a))})


class Shared:
    """The gradients of shared weights on one process, of one group at a time. mode: "sums": each
    layer adds up the gradients of its micro-batches, and then both are added. "each": the
    gradients of each micro-batch are added, and then those sums, as in one process; a message is
    sent for each micro-batch."""

    def __init__(self, plan: PipelinePlan, ties: list[Tie], process: int, mode: str) -> None:
        self._places, self._process, self._mode = plan.places, process, mode
        self._ties = [tie for tie in ties if any(map(self._is_here, tie.layers))]
        self._names: dict[int, dict[str, Tie]] = defaultdict(dict)  # by layers
        for tie in self._ties:
            for n, name in zip(tie.layers, tie.names, strict=True):
                self._names[n][name] = tie
        self._found: dict[tuple[int, int], list[Tensor]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._ties)

    def take(self, layer: int, found: dict[str, Tensor], transport: Transport | None) -> None:
        """Takes the gradients of shared weights out of those of one micro-batch."""
        for name, tie in self._names.get(layer, {}).items():
            if name not in found and self._mode == "sums":
                continue
            if name not in found:
                raise Error(_UNUSED.format(name, layer, "a micro-batch", _SUMS))
            parts = self._found[layer, id(tie.parameter)]
            gradient = found.pop(name)
            if self._mode == "sums" and parts:
                parts[0] = parts[0] + gradient
            else:
                parts.append(gradient)
            if self._mode == "each":
                self._send(tie, layer, [gradient], transport)

    def complete(self, transport: Transport | None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The gradients of the group, once all layers of this process have theirs."""
        ties = [(tie, [self._parts(tie, n) for n in tie.layers]) for tie in self._ties]
        for tie, both in ties:
            for n, name, parts in zip(tie.layers, tie.names, both, strict=True):
                if self._is_here(n) and not parts:
                    raise Error(_UNUSED.format(name, n, "any micro-batch of a group", ""))
        if self._mode == "sums":
            for tie, both in ties:
                for n, parts in zip(tie.layers, both, strict=True):
                    self._send(tie, n, parts, transport)
        for tie, (lower, upper) in ties:
            for n, parts, others in zip(tie.layers, (lower, upper), (upper, lower), strict=True):
                if not self._is_here(n):
                    parts += self._receive(tie, n, len(others), transport)
            total: Tensor | None = None
            for a, b in zip(lower, upper, strict=True):
                total = a + b if total is None else total + (a + b)
            assert total is not None
            yield tie.parameter, total

    def _is_here(self, layer: int) -> bool:
        return self._places[layer].forward == self._process

    def _parts(self, tie: Tie, layer: int) -> list[Tensor]:
        return self._found.pop((layer, id(tie.parameter)), [])

    def _other(self, tie: Tie, layer: int) -> int:
        """The process of the other layer."""
        return self._places[sum(tie.layers) - layer].forward

    def _send(self, tie: Tie, layer: int, parts: list[Tensor], transport: Transport | None) -> None:
        to = self._other(tie, layer)
        if parts and to != self._process:
            assert transport is not None
            transport.send_shared(to, parts, f"with a weight of layer {layer}")

    def _receive(
        self, tie: Tie, layer: int, count: int, transport: Transport | None
    ) -> list[Tensor]:
        assert transport is not None
        keys = [Key("shared weight", layer, b) for b in range(count)]
        spec = spec_of(tie.parameter)
        return transport.receive_shared(self._places[layer].forward, keys, spec)
