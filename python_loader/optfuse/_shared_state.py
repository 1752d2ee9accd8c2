# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose state has tensors of another parameter's, of the same optimizer or another
one, as load_state_dict() leaves them: it copies no tensor that has the right dtype and device.

In backward mode the library leaves parameters that share state to step(). This module refuses the
cases in which that gives other results than stock."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from optfuse._library.bindings import Error, guard

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
    entries = [x for x in optimizer.__dict__["state"].values() if isinstance(x, dict)]
    tensors = (id(x) for entry in entries for x in entry.values() if isinstance(x, Tensor))
    return {*map(id, entries), *tensors}


class Holder(Protocol):
    """A fused optimizer's link."""

    @property
    def slot_states(self) -> Sequence[tuple[Any, ...] | None]:
        """The state tensors and counters of each slot."""

    def label(self, slot: int) -> str: ...

    def is_ahead(self, slot: int) -> bool: ...


class Order:
    """Updates of other optimizers, made by backward fusion, that the next step() of one optimizer
    must not precede."""

    def __init__(self) -> None:
        self._after: list[tuple[weakref.ref[Holder], int, str]] = []

    def look(self, mine: Holder, slots: Iterable[int], others: Iterable[Holder]) -> None:
        """slots: those whose state is shared."""
        owners = {id(tensor): slot for slot in slots for tensor in _tensors(mine.slot_states[slot])}
        self._after = []
        for other in others if owners and guard("early_state") else ():
            for slot, state in enumerate(other.slot_states):
                found = next((owners[id(x)] for x in _tensors(state) if id(x) in owners), None)
                if found is not None:
                    text = _EARLY.format(mine.label(found), other.label(slot))
                    self._after.append((weakref.ref(other), slot, text))

    def check(self) -> None:
        """An error's frames keep no other optimizer's link."""
        texts = [text for ref, slot, text in self._after if _is_ahead(ref(), slot)]
        if texts:
            raise Error(texts[0])
        self._after = []

    def is_open(self) -> bool:
        """Whether check() could find something."""
        return bool(self._after)


def _is_ahead(holder: Holder | None, slot: int) -> bool:
    return holder is not None and holder.is_ahead(slot)


def refuse_twice(mine: Holder, slots: Iterable[int]) -> None:
    """slots: those whose state is shared with others, of this optimizer or not."""
    owners: dict[int, int] = {}
    for slot in slots:
        for tensor in _tensors(mine.slot_states[slot]):
            other = owners.setdefault(id(tensor), slot)
            if other != slot:
                raise Error(_TWICE.format(mine.label(other), mine.label(slot)))


def _tensors(state: Iterable[Any] | None) -> Iterator[Tensor]:
    return (value for value in state or () if isinstance(value, Tensor))
