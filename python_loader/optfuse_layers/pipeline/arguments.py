# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of values that Pipeline() takes for each argument."""

from __future__ import annotations

from typing import Any

from torch import nn

from optfuse._arguments.check import (
    FUNCTION,
    OPTIMIZER,
    PROCESS_GROUP,
    Kind,
    Unfit,
    need,
    one_of,
    optional,
)
from optfuse_layers.pipeline.plan import PipelinePlan
from optfuse_layers.pipeline.shared_weights import MODES as SHARED
from optfuse_layers.pipeline.versions import MODES


def _plan(value: Any) -> PipelinePlan:
    need(isinstance(value, PipelinePlan), "optfuse.pipeline.plan() makes one")
    return value  # type: ignore[no-any-return]


def _sequential(value: Any) -> nn.Sequential:
    if not isinstance(value, nn.Sequential):
        raise Unfit("write a model as nn.Sequential(...), with blocks as entries")
    return value


def _loss(value: Any) -> Any:
    return value if isinstance(value, nn.Module) else FUNCTION.take(value)


LOSSES = ("sum", "mean")  # of the batches that share an update
SEQUENTIAL = Kind("an nn.Sequential", _sequential)
KINDS = {
    "plan": Kind("a plan", _plan),
    "module": SEQUENTIAL,
    "loss_fn": Kind("a function of an output and a target", _loss),
    "optimizer": OPTIMIZER,
    "weights": one_of(*MODES),
    "losses": one_of(*LOSSES),
    "shared": one_of(*SHARED),
    "process_group": optional(PROCESS_GROUP),
}
