# SPDX-License-Identifier: BSD-3-Clause
"""Parameters on a GPU: which tensors are, and the scalars that live there."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from optfuse._library.bindings import DTYPES, lib

# A build for tests can be told to take another kind of device for a GPU.
_STAND_IN = hasattr(lib, "of_guard_enabled") and os.environ.get("OPTFUSE_TEST_DEVICE")
GPU: str = _STAND_IN or "cuda"


def is_gpu(device: torch.device) -> bool:
    if device.type == GPU:
        return True
    return bool(_STAND_IN) and device.type == torch._C._get_privateuse1_backend_name()


def current_stream(device: torch.device) -> torch.Stream | None:
    """None: the device has none that order updates, as the CPU."""
    return torch.accelerator.current_stream(device) if is_gpu(device) else None


#: Values of Slot::tried beside places: the update needs no trial; it has not passed one yet.
ANYWHERE, NOWHERE = -1, -2
_DTYPES = {getattr(torch, name): i for i, name in enumerate(DTYPES)}


def _place_of(param: Tensor) -> int:
    """Dtype and device, as the library's place_of()."""
    dtype = _DTYPES.get(param.dtype)
    if dtype is None:
        return NOWHERE
    return dtype * 256 + (param.device.index + 1 if is_gpu(param.device) else 0)


def places_of(params: list[Tensor], known: dict[int, int], tried: set[int]) -> list[int]:
    """The place (dtype and device) of each parameter whose update has passed a trial there.
    A known parameter keeps its place, since Module.to() may have moved it meanwhile. known,
    tried: parameters by their ids."""
    passed = set(known.values())
    now = {id(p): _place_of(p) for p in params}
    new = {i: at if i in tried or at in passed else NOWHERE for i, at in now.items()}
    return [known.get(i, new[i]) for i in map(id, params)]


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and is_gpu(value.device)


def lr_of(group: dict[str, Any]) -> float:
    """The learning rate as a number; 0 for one that lives on a GPU and is handed
    over as a tensor, since reading it would wait for the device."""
    return 0.0 if is_on_gpu(group["lr"]) else float(group["lr"])
