# SPDX-License-Identifier: BSD-3-Clause
"""reorder(schedule="auto"): the first forward pass with gradients runs the tasks of each layer some
times more, for the sake of their time. When it has ended, the k of "reverse_first" is taken with
which the simulator (plugin/planners/reorder/simulate.c) finds iterations shortest, or stock's
order. So the first backward pass has the order by which DistributedDataParallel makes its buckets,
which it does once."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optfuse._library.bindings import Error
from optfuse_layers import communication


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


#: A module's __call__() runs this attribute in the place of its own code, as Module.compile() sets
#: it. It stays out of copies, files and scripts, which a forward hook would be in.
_CALL = "_compiled_call_impl"


class _Call:
    """The __call__() of a module about which somebody is undecided."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._before = module._compiled_call_impl
        self.undecided: dict[Undecided, None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module() if torch.compiler.is_compiling() else self._called()
        assert module is not None
        output = (self._before or module._call_impl)(*args, **kwargs)
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or module is not self._module():
            return output
        self._choose()
        return output

    def _called(self) -> nn.Module | None:
        """The module whose __call__() this is. A replica that nn.DataParallel makes has all
        attributes of its module, this one as well, and other weights."""
        caller = sys._getframe(2).f_locals.get("self")
        is_its = isinstance(caller, nn.Module) and caller.__dict__.get(_CALL) is self
        return caller if is_its else self._module()

    def _choose(self) -> None:
        if torch.is_grad_enabled():
            for of in tuple(self.undecided):
                of.choose()

    def end(self, module: nn.Module) -> None:
        del module._compiled_call_impl
        if self._before is not None:
            module._compiled_call_impl = self._before

    def __reduce__(self) -> Any:
        """None, in copies of classes that have a __getstate__() of their own."""
        return type(None), ()


def choose_after_forward(model: nn.Module, of: Undecided) -> None:
    ignored: list[str] = torch.jit._recursive.ignored_attributes  # by TorchScript
    if _CALL not in ignored:
        ignored.append(_CALL)
    if not isinstance(model._compiled_call_impl, _Call):
        model._compiled_call_impl = _Call(model)
    model._compiled_call_impl.undecided[of] = None


def leave_off(model: nn.Module | None, of: Undecided) -> None:
    call = None if model is None else model._compiled_call_impl
    if model is None or not isinstance(call, _Call):
        return
    call.undecided.pop(of, None)
    if not call.undecided:
        call.end(model)
