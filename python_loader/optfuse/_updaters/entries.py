# SPDX-License-Identifier: BSD-3-Clause
"""State entries whose tensors have known names, as the library is told of them."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optfuse._dtensor.local_tensors import check_layout, is_dtensor, local_of
from optfuse._gpu import is_gpu
from optfuse._library import bindings
from optfuse._library.bindings import Error
from optfuse._updaters.slots import Slots, Tensors


class Found(NamedTuple):
    """The parts of an entry that the library is told of."""

    tensors: Tensors  # in the library's order
    n_like_param: int  # how many of them are sharded as their parameter
    step: Any  # None: the library counts no steps


def tell(slots: Slots, slot: int, found: Found, fresh: bool, flushed: bool) -> bool:
    """Tells the library, if it knows another state. Whether the plan is flushed now. Once does for
    many slots: a flush looks at every slot, and nothing becomes pending before the next step."""
    known, now = slots.states[slot], (*found.tensors, found.step)
    if known is not None and len(known) == len(now) and all(map(is_, known, now)):
        return flushed
    param = slots.params[slot]
    if found.step is not None and not _countable(found.step, param):
        raise Error(
            f"optfuse: state['step'] of {slots.labels[slot]} must be a 0-dim float tensor on "
            "the CPU, or a float32 one on its parameter's GPU, as torch.optim makes it, not "
            f"{found.step!r}"
        )
    replaces = known is not None and any(tensor is not None for tensor in known)
    if replaces and not flushed:  # what is pending is for the old ones
        bindings.flush(slots.plan)
    locals_ = _locals_of(slots, slot, found)
    torch.ops.optfuse.set_state(slots.plan, slot, locals_, found.step, fresh)
    slots.states[slot] = now
    if slots.sharded is not None and is_dtensor(param):
        slots.sharded.tell_state(slot, list(found.tensors))
    return flushed or replaces


def _locals_of(slots: Slots, slot: int, found: Found) -> list[Tensor | None]:
    param = slots.params[slot]
    if not is_dtensor(param):
        return list(found.tensors)
    for tensor in found.tensors[: found.n_like_param]:
        if tensor is not None:
            check_layout("the optimizer state", slots.labels[slot], param, tensor)
    return list(map(local_of, found.tensors))


def _countable(step: Any, param: Tensor) -> bool:
    if not isinstance(step, Tensor) or step.dim() != 0:
        return False
    if step.device.type == "cpu":
        return step.dtype in (torch.float32, torch.float64)
    return is_gpu(step.device) and step.device == param.device and step.dtype == torch.float32
