# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose state has tensors of another parameter's, of the same optimizer or another
one, as load_state_dict() leaves them: it copies no tensor that has the right dtype and device.

In backward mode what shares state is left to step(), which the library sees by itself. Here is
what can't be made right by that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from optfuse._native import Error

States = list[tuple[Any, ...] | None]

_TWICE = (
    "optfuse: {} and {} have a tensor of their state in common, so that each step would use it "
    "twice; nothing was updated. Give each parameter its own: optimizer.state[parameter] = "
    "copy.deepcopy(optimizer.state[parameter]), or keep the optimizer as it is"
)
_EARLY = (
    "optfuse: {} has a tensor of its state in common with {} of another optimizer, which backward "
    "fusion has updated already, before it could know: call the step() of that optimizer first. "
    "Where they are to have states of their own, give this one copies before backward(), such as "
    "load_state_dict(copy.deepcopy(other.state_dict())). This step() has updated nothing"
)


def refuse_twice(slots: list[int], states: States, labels: list[str]) -> None:
    """slots: those whose state is shared with others, of this optimizer or not."""
    owners: dict[int, int] = {}
    for slot in slots:
        for tensor in _tensors(states[slot]):
            other = owners.setdefault(id(tensor), slot)
            if other != slot:
                raise Error(_TWICE.format(labels[other], labels[slot]))


def early_updates(
    slots: list[int], states: States, labels: list[str], theirs: States, their_labels: list[str]
) -> Iterator[tuple[int, str]]:
    """The slots of another plan that use the state of one of these, and what to say if backward
    fusion has updated them already."""
    owners = {id(tensor): slot for slot in slots for tensor in _tensors(states[slot])}
    for other, state in enumerate(theirs):
        mine = [owners[id(tensor)] for tensor in _tensors(state) if id(tensor) in owners]
        if mine:
            yield other, _EARLY.format(labels[mine[0]], their_labels[other])


def _tensors(state: Iterable[Any] | None) -> Iterator[Tensor]:
    return (value for value in state or () if isinstance(value, Tensor))
