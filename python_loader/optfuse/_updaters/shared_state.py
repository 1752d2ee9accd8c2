# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose state has tensors of another parameter's, of the same optimizer or another
one, as load_state_dict() leaves them: it copies no tensor that has the right dtype and device.

In backward mode the library leaves parameters that share state to step(). This module refuses the
cases in which that gives other results than stock."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from optfuse._library.bindings import Error, guard
from optfuse._updaters.slots import Slots

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


#: Fused optimizers, by their ids.
fused: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def shares_with_others(optimizer: Any) -> bool:
    """Whether another fused optimizer has an entry or a tensor of its state."""
    others = [other for other in list(fused.values()) if other is not optimizer]
    if not others or not guard("shared_state"):
        return False
    mine = _parts(optimizer)
    return any(not mine.isdisjoint(_parts(other)) for other in others)


def _parts(optimizer: Any) -> set[int]:
    entries = [x for x in optimizer.state.values() if isinstance(x, dict)]
    tensors = (id(x) for entry in entries for x in entry.values() if isinstance(x, Tensor))
    return {*map(id, entries), *tensors}


def refuse_twice(mine: Slots, shared: Iterable[int]) -> None:
    """shared: the slots whose state others have, too, of this optimizer or not."""
    owners: dict[int, int] = {}
    for slot in shared:
        for tensor in _tensors(mine, slot):
            other = owners.setdefault(id(tensor), slot)
            if other != slot:
                raise Error(_TWICE.format(mine.labels[other], mine.labels[slot]))


def early(
    mine: Slots, shared: Iterable[int], others: Iterable[tuple[Slots, Callable[[int], bool]]]
) -> str:
    """Why the next step() can't be taken yet: one of the others' slots that have some of the state
    is ahead, as is_ahead(slot) says. Empty: it can."""
    owners = {id(tensor): slot for slot in shared for tensor in _tensors(mine, slot)}
    for theirs, is_ahead in others if guard("early_state") else ():
        for slot in range(len(theirs)):
            found = next((owners[id(x)] for x in _tensors(theirs, slot) if id(x) in owners), None)
            if found is not None and is_ahead(slot):
                return _EARLY.format(mine.labels[found], theirs.labels[slot])
    return ""


def _tensors(slots: Slots, slot: int) -> Iterator[Tensor]:
    return (value for value in slots.states[slot] or () if isinstance(value, Tensor))
