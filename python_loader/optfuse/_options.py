# SPDX-License-Identifier: BSD-3-Clause
"""The options of fuse(), by its caller and by the environment, and where it says that it was
called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import FORWARD, Error

LINK = "_optfuse_link"  # the attribute of a fused optimizer that holds its Link
RECORDED = "_optfuse_recorded"  # of one whose step() is recorded: its Step
MADE = "_optfuse_made"  # and of one that has been made and fused, but Python calls __init__() again
DELAYED = "optfuse_delay"  # the key in state_dict() of what Delayed keeps

AUTO, OFF, FORCED = "auto", "off", "force"


def is_fused(optimizer: Optimizer) -> bool:
    return LINK in optimizer.__dict__


def is_recorded(optimizer: Optimizer) -> bool:
    return RECORDED in optimizer.__dict__


def owner_of(optimizer: Optimizer) -> Any:
    """Its Link or its Step, as fuse() has given it; or None."""
    return optimizer.__dict__.get(LINK) or optimizer.__dict__.get(RECORDED)


def is_disabled() -> bool:
    return os.environ.get("OPTFUSE_DISABLE", "") not in ("", "0")


def products_asked() -> str:
    """The answer of OPTFUSE_PRODUCTS where fuse(products=...) is not given. Raises
    optfuse.Error."""
    asked = os.environ.get("OPTFUSE_PRODUCTS") or AUTO
    if asked not in (AUTO, OFF, FORCED):
        raise Error(f'optfuse: OPTFUSE_PRODUCTS={asked} is none of "{AUTO}", "{OFF}", "{FORCED}"')
    return asked


class Reduction(Protocol):
    """Who reduces gradients between processes in backward mode."""

    def takes(self, param: Tensor) -> bool: ...

    def add(self, link: Any) -> None: ...

    def finish(self) -> None: ...


class Delayed(Protocol):
    """The parameters of a fused optimizer whose updates arrive late."""

    def step(self, optimizer: Optimizer, link: Any) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def state(self, optimizer: Optimizer) -> dict[str, Any]: ...

    def check(self, optimizer: Optimizer, state: Mapping[str, Any] | None) -> None: ...

    def load(self, state: Mapping[str, Any] | None) -> None: ...

    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Options:
    """The options of fuse() and of its mode."""

    mode: int = FORWARD
    eager: tuple[Tensor, ...] = ()
    bucket_bytes: int = 0  # 0: the library's own
    side_stream: bool = False
    accumulate: int = 1
    max_grad_norm: float | None = None
    strict: bool = False
    fold: bool = True  # clipping and unscaling by GradScaler into the update
    reduction: Reduction | None = None  # of a DistributedDataParallel model
    delays: Any = None  # of parameters whose updates arrive late: begin() makes a Delayed
    products: str = "off"  # or AUTO or FORCED: gradients of linear layers may be promises
    recorded: bool = True  # a class's own step(), which else is called as it is
