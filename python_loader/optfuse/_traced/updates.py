# SPDX-License-Identifier: BSD-3-Clause
"""The programs that update an optimizer whose step() is traced, one for all parameters
of a group that are alike.

Parameters are alike where the class's step() would do the same to them with other data: same
group, dtype, device and counters in their state; and the same shape and strides, if it looks at
those. Of such a cohort step() runs once, on stand-ins (guide.py). What it makes of counters,
options and attributes is written down when the updates are certain."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import has_holes
from optfuse._library.bindings import lib, lib_with_gil
from optfuse._own_step import twin
from optfuse._own_step.noted import Noted
from optfuse._own_step.settings import Promise
from optfuse._own_step.twin import Entry, Group
from optfuse._traced.cohorts import (
    HOLES,
    Cohort,
    Kept,
    counts_in_place,
    filled,
    is_filled,
    is_known,
    programs_described,
    programs_shown,
    reached_slots,
    refuse_frozen,
    refuse_parts_of_tensors,
    slots_in,
)
from optfuse._traced.counting import Counting, advance, find_counters
from optfuse._traced.guide import Place
from optfuse._traced.parts import Parts
from optfuse._traced.program import MOST_STATE, Program
from optfuse._traced.recording import Recording
from optfuse._traced.standin import Made, Untraceable

State = dict[Tensor, Entry]
_kinds, _set_program = torch.ops.optfuse.kinds.default, torch.ops.optfuse.set_program.default
_hold = torch.ops.optfuse.hold.default


class Traced:
    """The programs of one plan. Knows neither the optimizer nor its parameters between two
    calls, so that it keeps none of them alive."""

    def __init__(
        self,
        plan: int,
        stock: type[Optimizer],
        promise: Promise,
        made: Made = "none",
        in_backward: bool = False,
    ) -> None:
        """in_backward: options may be changed between begin() and step()."""
        self._plan = plan
        self.recording = Recording(stock, promise, made)
        self._stock = stock
        self._in_backward = in_backward
        self.guides = 0  # at the last step
        self.untraced = 0  # steps that were the class's own
        self.why_not: tuple[type[Untraceable], str] | None = None  # the last of them
        self.noted: Noted | None = None  # backward mode: of what updates use
        self._made: dict[int, list[str]] = {}  # slot -> keys of its entry since begin()
        self.layout([])

    def layout(self, groups: list[Group]) -> None:
        """The library was told of all parameters from the start; abandon() comes before it."""
        self.recording.layout(groups)
        self._cohort_of: list[Cohort | None] = [None] * len(self.recording.group_of)
        self._done: list[Cohort] = []  # backward: of earlier passes since step()
        self._kept: Kept | None = None
        self.begun = False

    @property
    def _cohorts(self) -> list[Cohort]:
        return self.recording.cohorts

    def state_names(self) -> list[str | None]:
        """The names of all registers; None: not in use."""
        return [*self.recording.names, *(MOST_STATE - len(self.recording.names)) * [None]]

    def counters_of(self, entry: Entry) -> list[Tensor]:
        """The tensors that are in no register."""
        known = self.recording.names
        return [x for name, x in entry.items() if isinstance(x, Tensor) and name not in known]

    # ---- a step

    def begin(
        self, optimizer: Optimizer, params: list[Tensor], whole: bool, same_state: bool
    ) -> None:
        """Makes the programs of this step and tells the library. whole: gradients are still to
        come, and every parameter that requires one may get one. same_state: it has the objects
        that it had when advance() returned. Raises Untraceable, with nothing changed."""
        updated = self._set_updated_apart() if whole and self.begun else set()
        if self._made:
            self.abandon(optimizer, params)
            same_state = False
        self.recording.before = twin.attributes_of(optimizer)
        self.noted = Noted(optimizer, self._stock) if self._in_backward else None
        self._whole = whole
        by_shape = list(self.recording.by_shape)
        kept, self._kept = self._kept, None
        same = same_state and not updated and self._is_same(kept)
        if not same:
            kinds = self._kinds()
            self._taking = [slot for slot in slots_in(kinds, any(by_shape)) if slot not in updated]
        same = self.recording.record_all(optimizer, params, self._taking, same)
        for number, cohort in enumerate(self._cohorts):
            assert cohort.recorded is not None
            program = cohort.recorded.program
            if cohort.recorded.looked_at_requires_grad and not whole:
                refuse_frozen(params[slot] for slot in cohort.slots)
            if isinstance(program, Parts):
                refuse_parts_of_tensors(params[slot] for slot in cohort.slots)
                if not whole:
                    self._refuse_other_strides(optimizer, [params[slot] for slot in cohort.slots])
            self._set_program(number, None if same else cohort.slots, program)
            for slot in () if same else cohort.slots:
                self._cohort_of[slot] = cohort
        if self.recording.by_shape != by_shape:
            self._kinds()
        self.guides = len(self._cohorts)
        self.begun = True

    def _set_program(self, cohort: int, slots: list[int] | None, program: Program | Parts) -> None:
        """slots: None if they are those that the library was told for this cohort."""
        if isinstance(program, Program):
            _set_program(self._plan, cohort, slots, program.code(), program.numbers())
            return
        s = program.structure
        torch.ops.optfuse.set_program_with_calls(
            *(self._plan, cohort, slots, s.n_registers, s.touches, s.writes, program.forms),
            *(s.words, s.code, program.numbers()),
        )

    def _refuse_other_strides(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        """Operators would see that gradient or state are not like their parameter."""
        state: State = optimizer.__dict__["state"]
        names = [name for name in self.recording.names if name not in self.recording.shaped]
        for p in params:
            entry = state.get(p) or {}
            for x, what in (
                (p.grad, "a gradient"),
                *((entry.get(n), f"state {n!r}") for n in names),
            ):
                if isinstance(x, Tensor) and x.stride() != p.stride():
                    raise Untraceable(
                        f"its operators see strides, and {what} has {tuple(x.stride())}, its "
                        f"parameter {tuple(p.stride())}"
                    )

    def _set_updated_apart(self) -> set[int]:
        """Slots that earlier backward passes since step() have updated; their counters advance
        with that step()."""
        for cohort in self._cohorts:
            slots = [slot for slot in cohort.slots if lib.of_shim_is_updated(self._plan, slot)]
            if slots:
                self._done.append(Cohort(cohort.group, slots, cohort.recorded))
        return {slot for cohort in self._done for slot in cohort.slots}

    def _kinds(self) -> list[int]:
        """The kinds of the parameters that may take part: their properties that matter beside data
        and state. The library remembers it."""
        found: list[int] = _kinds(self._plan, self._whole, any(self.recording.by_shape))
        return found

    def holds_counters(self) -> bool:
        kept = self._kept
        return kept is not None and (not kept.counters or _hold(kept.counters, kept.values))

    def _is_same(self, kept: Kept | None) -> bool:
        """Whether the cohorts are those of the last step."""
        if kept is None:
            return False
        if not lib.of_shim_same_kinds(self._plan, self._whole, any(self.recording.by_shape)):
            return False
        return not kept.counters or _hold(kept.counters, kept.values)

    def make_state(self, optimizer: Optimizer, slot: int, param: Tensor) -> None:
        """The state entry that this step makes; its program fills it."""
        cohort = self._cohort_of[slot]
        assert cohort is not None and cohort.recorded is not None
        entry = optimizer.state[param]
        made = self._made.setdefault(slot, [])
        for key, value in (cohort.recorded.entry or {}).items():
            if key in entry:
                continue
            if isinstance(value, Place):
                with torch.no_grad():
                    entry[key] = _room(param, value)
            else:
                entry[key] = copy.deepcopy(value)
            made.append(key)

    def check(self, optimizer: Optimizer) -> None:
        """Raises Untraceable if the first step of all parameters would."""
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        self.layout(groups)
        self.recording.before = twin.attributes_of(optimizer)
        taking = [slot for slot, p in enumerate(params) if p.requires_grad]
        if any(has_holes(params[slot]) for slot in taking):
            raise Untraceable(HOLES)
        self.recording.record_all(optimizer, params, taking, same=False)

    def abandon(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        """State of updates that never came has no values."""
        state: State = optimizer.__dict__["state"]
        for slot, keys in self._made.items():
            if lib.of_shim_is_updated(self._plan, slot):
                continue
            entry = state.get(params[slot], {})
            for key in keys:
                entry.pop(key, None)
            if not entry:
                state.pop(params[slot], None)
        self._made.clear()
        self.begun = False

    def advance(self, optimizer: Optimizer, params: list[Tensor], same_state: bool) -> bool:
        """The updates of all parameters that have a gradient are certain: counters, options and
        attributes become what the class's step() makes of them. same_state: as begin() says.
        Returns whether the state still has the same objects."""
        self._made.clear()
        self.begun = False
        self.recording.advance_settings(optimizer)
        kept = Kept([], [])
        known = [cohort.counting for cohort in self._cohorts]
        reached = [
            (cohort, reached_slots(cohort, params, not self._whole)) for cohort in self._done
        ]
        for number, cohort in enumerate(self._cohorts):
            all_reached = not self._whole or lib.of_shim_have_gradients(self._plan, number)
            reached.append((cohort, reached_slots(cohort, params, all_reached)))
        if not same_state or not all(map(is_known, self._cohorts)):
            self._insert(optimizer.__dict__["state"], params, reached)
        for cohort, slots in reached:
            self._advance_entries(cohort, optimizer, params, same_state, slots, kept)
        if not self._done and all(map(is_known, self._cohorts)):
            self._kept = kept
        same = same_state and not self._done and all(map(counts_in_place, self._cohorts, known))
        self._done = []
        return same

    def _insert(
        self, state: State, params: list[Tensor], reached: list[tuple[Cohort, list[int]]]
    ) -> None:
        """Entries without tensors that an update fills."""
        for cohort, slots in reached:
            entry = cohort.recorded and cohort.recorded.entry
            if entry is not None and not any(filled(entry)):
                absent = [slot for slot in slots if params[slot] not in state]
                state.update((params[slot], {}) for slot in absent)
                for slot in absent:
                    lib_with_gil.of_shim_ledger_note_entry(self._plan, slot, True)

    def _advance_entries(
        self,
        cohort: Cohort,
        optimizer: Optimizer,
        params: list[Tensor],
        same_state: bool,
        reached: list[int],
        kept: Kept,
    ) -> None:
        """The entries of those parameters of a cohort that the step has reached. kept gets the
        tensors that count."""
        assert cohort.recorded is not None
        after = cohort.recorded.entry
        if after is None:
            cohort.counting = Counting([], [], {})
            return
        if not same_state:
            state: State = optimizer.__dict__["state"]
            reached = [slot for slot in reached if is_filled(state.get(params[slot]), after)]
        is_whole = len(reached) == len(cohort.slots)
        counting = cohort.counting
        if counting is None or not is_whole or not same_state or counting.keys != list(after):
            state = optimizer.__dict__["state"]
            counting = find_counters([state[params[slot]] for slot in reached], after)
        cohort.counting = counting if is_whole else None
        counters, values = advance(counting, after)
        kept.counters += counters
        kept.values += values

    def shown(self, label: Callable[[int], str]) -> str:
        """The programs of the last step. label: names a slot's parameter."""
        return programs_shown(self._cohorts, self.recording.names, label)

    def described(self) -> str:
        """In a line."""
        return programs_described(self._cohorts)


def _room(param: Tensor, place: Place) -> Tensor:
    if place.form is not None:
        return torch.empty_strided(
            *place.form, dtype=place.dtype or param.dtype, device=param.device
        )
    return torch.empty_like(param, dtype=place.dtype, memory_format=torch.preserve_format)
