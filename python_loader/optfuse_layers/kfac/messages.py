# SPDX-License-Identifier: BSD-3-Clause
"""In which order factors are sent to the other processes, and which of them in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optfuse_layers.kfac.layers import Preconditioned

#: of_fusion of plugin/planners/kfac/messages.h, in its order.
FUSIONS = ("each", "all", "threshold", "paper", "planned")


@dataclass(frozen=True)
class Arrangement:
    """Slot 2 l is A of layer l, slot 2 l + 1 is G."""

    order: list[int]  # slots, as they are sent
    group: list[int]  # the number of the message of each, in that order

    @property
    def messages(self) -> int:
        return self.group[-1] + 1


def first(layers: int) -> Arrangement:
    """Before anything was measured: A as in the forward pass, G as in the backward pass."""
    order = [2 * n for n in range(layers)] + [2 * n + 1 for n in reversed(range(layers))]
    return Arrangement(order, list(range(2 * layers)))


def arrange(
    fusion: str,
    threshold: int,
    layers: Sequence[Preconditioned],
    itemsize: int,
    complete: Sequence[float],
    costs: tuple[float, ...],
) -> Arrangement:
    """complete: of each slot, when it was, in seconds of any clock. costs: seconds a message, a
    byte, and of the processor a message."""
    sizes = [d for layer in layers for d in layer.sizes]
    order = sorted(range(len(sizes)), key=lambda slot: (complete[slot], slot))
    ready = [complete[slot] - complete[order[0]] for slot in order]
    size = [itemsize * sizes[slot] * (sizes[slot] + 1) // 2 for slot in order]
    group = torch.ops.optfuse.fuse_messages(FUSIONS.index(fusion), ready, size, *costs, threshold)
    return Arrangement(order, group)
