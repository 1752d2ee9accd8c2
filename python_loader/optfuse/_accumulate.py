# SPDX-License-Identifier: BSD-3-Clause
"""Gradient accumulation in backward mode: the context that marks backward passes which
only add to the gradients. The core counts passes (plugin/pass.c)."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator

from torch.optim import Optimizer

from optfuse._arguments.check import OPTIMIZER, checked
from optfuse._library.bindings import FORWARD, Error
from optfuse._link import link_of
from optfuse._options import LINK, is_disabled, owner_of

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that they are not fused


def leave_unsaid(optimizer: Optimizer) -> None:
    """It is not fused on purpose, if at all."""
    _told.add(optimizer)


def _say_unfused(optimizer: Optimizer) -> None:
    """Once for each; nothing where fuse() leaves all optimizers as they are."""
    if is_disabled() or optimizer in _told:
        return
    _told.add(optimizer)
    warnings.warn(
        f"optfuse: accumulate() does nothing for this {type(optimizer).__name__}, which is not "
        'fused: call optfuse.fuse(optimizer, mode="backward") first, or leave accumulate() out',
        stacklevel=4,  # this function, accumulate(), contextlib; then the `with`
    )


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
    a second pass before step() raises. In forward mode it does nothing, and for
    an optimizer that is not fused it warns that it does nothing. It may be nested
    and left by an exception.

    Raises optfuse.Error for an optimizer whose passes Backward(accumulate=n)
    counts, and in a pass of this kind that comes between the one that updated
    and step().
    """
    for optimizer in optimizers:
        if owner_of(optimizer) is None:
            _say_unfused(optimizer)
    links = [link_of(o) for o in optimizers if LINK in o.__dict__]
    links = [link for link in links if link.mode != FORWARD]
    for link in links:
        if link.options.accumulate != 1:
            raise Error(
                f"optfuse: this optimizer was fused with accumulate={link.options.accumulate}, "
                "which counts its backward passes; fuse it without to use optfuse.accumulate()"
            )
    for link in links:
        link.add_only(+1)
    try:
        yield
    finally:
        for link in links:
            link.add_only(-1)
