# SPDX-License-Identifier: BSD-3-Clause
"""Layer pipelines: plans of who computes what, and their runs (docs/layerpipe.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optfuse import _names

if TYPE_CHECKING:
    from optfuse_layers.pipeline.plan import PipelinePlan, Place, PlannedLayer, Simulated, Task
    from optfuse_layers.pipeline.planning import plan
    from optfuse_layers.pipeline.runtime import Pipeline
else:
    __getattr__ = _names.resolver_of(__name__)

__all__ = ["PlannedLayer", "Pipeline", "Place", "PipelinePlan", "Simulated", "Task", "plan"]


def __dir__() -> list[str]:
    return __all__
