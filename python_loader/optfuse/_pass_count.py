# SPDX-License-Identifier: BSD-3-Clause
"""Which backward passes of a step only add to the gradients, in backward mode."""

from __future__ import annotations

import torch

from optfuse import _scaled
from optfuse._native import Error, guard


class Passes:
    """What a plan knows about the passes of one step."""

    def __init__(self, a_step: int) -> None:
        self.a_step = a_step  # as fuse(accumulate=) said
        self.depth = 0  # of accumulate() contexts
        self._begun: dict[int, None] = {}  # passes since step(), counted if a_step is not 1

    def restart(self) -> None:
        self._begun = {}

    def next_adds(self) -> bool:
        """A pass begins that no context marks: whether it only adds. Threads may have
        passes of their own, and one pass may begin on the threads of several GPUs."""
        if self.a_step == 1:
            return False
        if guard("nested") and _scaled.is_nested():
            raise Error(
                "optfuse: fuse(accumulate=...) counts backward passes, and this one runs inside "
                "another (reentrant checkpointing), so that the count would be wrong; use "
                "checkpoint(use_reentrant=False), or mark the passes that only add with "
                "optfuse.accumulate(optimizer). Nothing was updated"
            )
        begun = self._begun
        task = torch._C._current_graph_task_id()
        begun.setdefault(task)
        return list(begun).index(task) + 1 < self.a_step
