# SPDX-License-Identifier: BSD-3-Clause
"""reorder(schedule="auto"): the first forward pass with gradients runs the tasks of each layer some
times more, for the sake of their time. When it has ended, the k of "reverse_first" is taken with
which the simulator (plugin/planners/reorder/simulate.c) finds iterations shortest, or stock's
order. So the first backward pass has the order by which DistributedDataParallel makes its buckets,
which it does once."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from optfuse._layers import communication
from optfuse._library.bindings import Error


@dataclass(frozen=True)
class Times:
    """Simulated, of an iteration, in seconds."""

    k: int  # 0: stock's order
    iteration: float
    compute: float  # of the layers
    exposed: float  # communication that compute waits for
    stock: float  # iteration in stock's order

    def __str__(self) -> str:
        if self.k == 0:
            return f"stock's order is best here: simulated, {1e3 * self.stock:.3g} ms an iteration"
        gain = self.stock / self.iteration
        return (
            f"k={self.k}: simulated, {1e3 * self.iteration:.3g} ms an iteration, {gain:.2f} times "
            f"as fast as stock's order ({1e3 * self.stock:.3g} ms)"
        )


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that train this model together; None: one alone."""
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    return dist.group.WORLD if dist.is_initialized() else None


def buckets_of(model: nn.Module) -> tuple[int, int]:
    """Bytes of DistributedDataParallel's buckets, and of the first."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if dist.is_available() else 1 << 20
    cap = model.bucket_bytes_cap if isinstance(model, DistributedDataParallel) else 25 << 20
    return int(cap), min(first, int(cap))


def network_of(group: dist.ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Seconds a message, and a byte. All processes call it."""
    if group is None:
        raise Error(
            'optfuse: reorder() with schedule="auto" measures messages between processes, and '
            "there is one; give network=(seconds a message, seconds a byte)"
        )
    return communication.measured(group, device)[:2]


def bytes_before(model: nn.Module, weights: Collection[Tensor]) -> int:
    """Bytes of the gradients that come with the last dX: of parameters in front of the first of
    these layers, as those of an embedding are."""
    ours = set(map(id, weights))
    found: dict[int, int] = {}
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        if any(id(p) in ours for p in own):
            break
        if not getattr(module, "sparse", False):
            found |= {id(p): p.nbytes for p in own if p.requires_grad}
    return sum(found.values())


def best_k(
    handle: int,
    model: nn.Module,
    network: tuple[float, float],
    awaits: bool,
    before: int,
    memory: int | None,
) -> Times:
    found = torch.ops.optfuse.best_k(
        handle, *network, *buckets_of(model), awaits, before, -1 if memory is None else memory
    )
    return Times(*found)


# When the first forward pass has ended


class Undecided(Protocol):
    def choose(self) -> None:
        """After a forward pass with gradients; all processes call it."""


#: With the hook that each has on the model. A model that is saved or copied meanwhile has only the
#: function below.
_undecided: weakref.WeakKeyDictionary[nn.Module, dict[Undecided, RemovableHandle]]
_undecided = weakref.WeakKeyDictionary()


def choose_after_forward(model: nn.Module, of: Undecided) -> None:
    _undecided.setdefault(model, {})[of] = model.register_forward_hook(_after_forward)


def leave_off(model: nn.Module | None, of: Undecided) -> None:
    hook = _undecided.get(model, {}).pop(of, None) if model is not None else None
    if hook is not None:
        hook.remove()


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if traced or not torch.is_grad_enabled():
        return
    for of in tuple(_undecided.get(module, ())):
        of.choose()
