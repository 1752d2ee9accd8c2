# SPDX-License-Identifier: BSD-3-Clause
"""Layer pipelines: plans of who computes what (docs/layerpipe.md)."""

from optfuse._pipeline.plan import Layer, Place, Plan, Simulated, Task
from optfuse._pipeline.planning import plan

__all__ = ["Layer", "Place", "Plan", "Simulated", "Task", "plan"]
