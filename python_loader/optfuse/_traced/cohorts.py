# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that are alike: those to which a step() would do the same with other data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._own_step.twin import CONSTANT, Entry
from optfuse._traced.counting import Counting
from optfuse._traced.guide import Place, Recorded
from optfuse._traced.standin import Untraceable

_HOLES = 1 << 23  # in a word of kinds()
HOLES = (
    "a parameter has holes between its elements, or they overlap: PyTorch computes some of its "
    "operators there by code that rounds otherwise"
)


@dataclass
class Cohort:
    """Parameters that are alike."""

    group: int
    slots: list[int]
    recorded: Recorded | None = None  # of this step
    counting: Counting | None = None  # if it is known which entries of the state are theirs


@dataclass
class Kept:
    """The objects by which the cohorts of the last step are known to be those of this one, too, if
    the library finds the same kinds, and the state's entries and what is in them are the same."""

    counters: list[Tensor]
    values: list[Tensor]


def reached_slots(cohort: Cohort, params: list[Tensor], all_reached: bool) -> list[int]:
    """The slots with a gradient. all_reached: each is known to have one."""
    if all_reached:
        return cohort.slots
    return [slot for slot in cohort.slots if params[slot].grad is not None]


def filled(entry: Entry) -> list[str]:
    """The keys whose tensors an update fills."""
    return [key for key, value in entry.items() if isinstance(value, Place)]


def is_filled(entry: Entry | None, after: Entry) -> bool:
    """Whether it has what the update filled: not if somebody has thrown it away since."""
    return entry is not None and all(key in entry for key in filled(after))


def refuse_frozen(params: Iterable[Tensor]) -> None:
    if not all(param.requires_grad for param in params):
        raise Untraceable("it looks at requires_grad, and a parameter with a gradient has it off")


def refuse_parts_of_tensors(params: Iterable[Tensor]) -> None:
    if any(map(is_dtensor, params)):
        raise Untraceable(
            "it calls operators that are not elementwise, and of a DTensor parameter they would "
            "see this process's part only"
        )


def kind_of_shape(param: Tensor) -> Any:
    """PyTorch's operators go another way by it even where step() asks for no shape: without
    dimensions a parameter takes part in how a result's dtype is chosen, and whether flatten() and
    the like are views or copies depends on strides."""
    if param.dim() == 0:
        return None
    return True if param.is_contiguous() else -param.dim()  # 1 equals True


def slots_in(kinds: list[int], by_shape: bool) -> Iterator[int]:
    """Those in an answer of the library's kinds()."""
    i = 0
    while i < len(kinds):
        if kinds[i] & _HOLES:
            raise Untraceable(HOLES)
        yield kinds[i] >> 32
        i += 1 + (2 * (kinds[i] & 127) if by_shape else 0)


def is_known(cohort: Cohort) -> bool:
    """Whether its entries are, with nothing in them that could change unseen."""
    entry = (cohort.recorded and cohort.recorded.entry) or {}
    known = (Place, Tensor, *CONSTANT)
    return cohort.counting is not None and all(isinstance(v, known) for v in entry.values())


def counts_in_place(cohort: Cohort, known: Counting | None) -> bool:
    """Whether advance() has only written into the tensors that were known to count."""
    entry = (cohort.recorded and cohort.recorded.entry) or {}
    return cohort.counting is known is not None and all(
        isinstance(value, Place | Tensor) for value in entry.values()
    )


def mark_of(value: Any) -> Any:
    """The part of a value in a state entry that may lead step() another way and is no data."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), float(value) if value.dim() == 0 else None
    return type(value), value if isinstance(value, CONSTANT) else repr(value)


def programs_shown(cohorts: list[Cohort], names: list[str], label: Callable[[int], str]) -> str:
    """The programs of the last step. names: the state tensors; label: names a slot's parameter."""
    if not cohorts:
        return "traced, but it has taken no step yet"
    parts = [programs_described(cohorts)]
    for cohort in cohorts:
        if cohort.recorded is None:
            continue
        n = len(cohort.slots) - 1
        others = f" and {n} more" if n else ""
        parts.append(f"\n{label(cohort.slots[0])}{others}:")
        parts.append(cohort.recorded.program.shown(names))
    return "\n".join(parts)


def programs_described(cohorts: list[Cohort]) -> str:
    """In a line."""
    if not cohorts:
        return "traced"
    sizes = [len(c.recorded.program) for c in cohorts if c.recorded]
    guides = f"{len(sizes)} guide{'s' if len(sizes) > 1 else ''} a step"
    return f"traced: {max(sizes, default=0)} operators, {guides}"
