# SPDX-License-Identifier: BSD-3-Clause
"""Layer pipelines: plans of who computes what, and their runs (docs/layerpipe.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optfuse._layers.pipeline.plan import Layer, Place, Plan, Simulated, Task
from optfuse._layers.pipeline.planning import plan

if TYPE_CHECKING:
    from optfuse._layers.pipeline.runtime import Pipeline

__all__ = ["Layer", "Pipeline", "Place", "Plan", "Simulated", "Task", "plan"]


def __getattr__(name: str) -> Any:
    """Who never uses Pipeline does without torch.distributed.pipelining, which registers
    operators when it is imported."""
    if name != "Pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from optfuse._layers.pipeline.runtime import Pipeline

    return Pipeline
