# SPDX-License-Identifier: BSD-3-Clause
"""Gradient accumulation in backward mode: which backward passes only add to the
gradients, and which one updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from optfuse import _scaled
from optfuse._check import OPTIMIZER, checked
from optfuse._classes import LINK, link_of
from optfuse._native import BACKWARD, Error, guard


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


@checked(optimizers=OPTIMIZER)
@contextlib.contextmanager
def accumulate(*optimizers: Optimizer) -> Iterator[None]:
    """Marks backward passes that only add to the gradients.

        with optfuse.accumulate(optimizer):
            loss_of(first_half).backward()
        loss_of(second_half).backward()
        optimizer.step()

    In backward mode the update runs in the last pass, outside of the context;
    parameters that get no gradient there are updated by step(). Without this,
    a second pass before step() raises. In forward mode, and for optimizers that
    are not fused, it does nothing. It may be nested and left by an exception.

    Raises optfuse.Error for an optimizer whose passes fuse(accumulate=n)
    counts, and in a pass of this kind that comes between the one that updated
    and step().
    """
    links = [link_of(o) for o in optimizers if LINK in o.__dict__]
    links = [link for link in links if link.mode == BACKWARD]
    for link in links:
        if link.passes.a_step != 1:
            raise Error(
                f"optfuse: this optimizer was fused with accumulate={link.passes.a_step}, which "
                "counts its backward passes; fuse it without to use optfuse.accumulate()"
            )
    for link in links:
        link.add_only(+1)
    try:
        yield
    finally:
        for link in links:
            link.add_only(-1)
