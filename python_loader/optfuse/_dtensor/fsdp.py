# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 (fully_shard): what else uses a sharded parameter's memory, and when the gradients of
a group of parameters have been reduced."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from optfuse._patches.listed import DISTRIBUTED
from optfuse._patches.nested_passes import is_part_of_a_node
from optfuse._patches.replacing import find, replace, warn_of_changes

_FSDP = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_COLLECTIVES = f"{_FSDP}._fsdp_collectives"

FLAT = "_sharded_param_data"  # of a unit: the first of aliases_of()


class Listener(Protocol):
    """An owner of parameters that FSDP2 reduces the gradients of."""

    fresh: list[int]

    def complete(self, units: Iterable[Any], only_kept: bool) -> None: ...


_noting: list[weakref.ref[Any]] = []  # listeners, called by the reduction that is under way
_listening = False


def _groups() -> Iterable[Any]:
    """All groups of parameters of the process."""
    module = sys.modules.get("torch.distributed._composable_state")
    states = getattr(module, "_module_state_mapping", {})
    for reference in list(states.values()):
        state = reference()
        found = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on
        yield from [getattr(state, "_fsdp_param_group", None)] if found is None else found


def units_of(params: Iterable[Tensor]) -> dict[int, Any]:
    """The FSDP2 units of these parameters, by the parameters' ids."""
    wanted = set(map(id, params))
    units = [unit for group in _groups() if group is not None for unit in group.fsdp_params]
    return {id(u.sharded_param): u for u in units if id(u.sharded_param) in wanted}


def _candidates(unit: Any, local: Tensor) -> list[Tensor | None]:
    flat = unit._sharded_param_data
    return [flat, flat._base, local._base]


def aliases_of(unit: Any, local: Tensor) -> list[Tensor]:
    """Tensors that FSDP2 holds of the memory of this local tensor, and that it reads."""
    return [tensor for tensor in _candidates(unit, local) if tensor is not None]


def await_gradient(unit: Any) -> None:
    """Up to torch 2.12 FSDP2 copies a gradient that has hooks, too, into pinned memory of the CPU
    without waiting, and waits when backward() ends."""
    if unit.grad_offload_event is not None:
        unit.grad_offload_event.synchronize()


@contextlib.contextmanager
def on(stream: torch.Stream | None) -> Iterator[None]:
    """Makes the stream current on which FSDP2 reduces gradients, for their updates. The one before
    waits for them when backward() ends, as it does for the reductions."""
    if stream is None:
        yield
        return
    with stream:
        yield
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_join, stream))


def _join(stream: torch.Stream) -> None:
    torch.accelerator.current_stream(stream.device).wait_stream(stream)


def _reduces_alone(group: Any) -> bool:
    """Whether nobody but FSDP2 gets to see the output of a reduction: no collective of the
    user's allocates it, and no hook of the user's is called with it."""
    by_fsdp = type(group._reduce_scatter_comm).__module__ == _COLLECTIVES
    return by_fsdp and group._all_reduce_hook is None


def gradients_of(units: Iterable[Any]) -> list[Tensor]:
    grads = (unit.sharded_param.grad for unit in units)
    return [grad._local_tensor for grad in grads if grad is not None]


def _tell(group: Any) -> None:
    noting = _noting[:]
    _noting.clear()
    for reference in noting:
        listener: Listener | None = reference()
        if listener is not None and listener.fresh:
            listener.complete(group.fsdp_params, _reduces_alone(group))


def _reduced(post_backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(post_backward)
    def post_backward_and_tell(self: Any, *unused: Any) -> Any:
        done = post_backward(self, *unused)
        _tell(self)
        return done

    is_part_of_a_node(post_backward_and_tell)
    return post_backward_and_tell


def note(listener: Listener, slot: int) -> None:
    """Notes a gradient. When those of its group have been reduced complete() is called, once: with
    the units whose gradients share their memory, and whether whoever else may have that memory only
    keeps it."""
    if not listener.fresh:
        _noting.append(weakref.ref(listener))
    listener.fresh.append(slot)


def listen() -> None:
    """From here on note() is heard."""
    global _listening
    if _listening:
        return
    warn_of_changes(DISTRIBUTED)
    group = find(_GROUP)
    reduced = _reduced(group.post_backward)
    replace(group, "post_backward", reduced, DISTRIBUTED)
    _listening = True
