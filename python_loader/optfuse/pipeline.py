# SPDX-License-Identifier: BSD-3-Clause
"""Layer pipelines: plans of who computes what, and their runs (docs/layerpipe.md)."""

from optfuse._pipeline.plan import Layer, Place, Plan, Simulated, Task
from optfuse._pipeline.planning import plan
from optfuse._pipeline.runtime import Pipeline

__all__ = ["Layer", "Pipeline", "Place", "Plan", "Simulated", "Task", "plan"]
