# SPDX-License-Identifier: BSD-3-Clause
"""What the updates of an optimizer run whose step() is traced: programs, one for all parameters
of a group that are alike.

Parameters are alike where the class's step() would do the same to them with other data: same
group, dtype, device and counters in their state; and the same shape and strides, if it looks at
those. Of such a cohort step() runs once, on stand-ins (guide.py). What it makes of counters,
options and attributes is written down when the updates are certain."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import has_holes, is_dtensor
from optfuse._library.bindings import lib
from optfuse._own_step import twin
from optfuse._own_step.noted import Noted
from optfuse._own_step.settings import Copies, Promise, Settings, fresh
from optfuse._own_step.twin import CONSTANT, Entry, Group
from optfuse._traced.counting import Counting, advance, find_counters
from optfuse._traced.guide import Place, Recorded, like, place_of, record
from optfuse._traced.parts import Parts
from optfuse._traced.program import MOST_STATE, Program
from optfuse._traced.replay import Replay, learn
from optfuse._traced.standin import ForeignTensor, Made, Untraceable
from optfuse._trials.compare import difference

State = dict[Tensor, Entry]
_kinds, _set_program = torch.ops.optfuse.kinds.default, torch.ops.optfuse.set_program.default
_hold = torch.ops.optfuse.hold.default
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
    replay: Replay | None = None  # of the step before
    learned: int = 0  # how many replays there have been
    played: int = 0  # how often they were right

    def is_worth_learning(self, before: Recorded | None) -> bool:
        """Whether the steps are alike, as far as is known. before: of the step before."""
        now = self.recorded
        if before is None or now is None or self.learned > 2 + self.played // 8:
            return False
        was, program = before.program, now.program
        if not isinstance(was, Program) or not isinstance(program, Program):
            return False
        return was.structure is program.structure and not now.looked_at_shape


@dataclass
class Kept:
    """What tells whether the cohorts of the last step are those of this one, too, if the library
    finds the same kinds, and the state's entries and what is in them are the same objects."""

    counters: list[Tensor]
    values: list[Tensor]


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
        self._twin = twin.Twin(stock)
        self._stock = stock
        self.promise = promise
        self._making = made
        self._in_backward = in_backward
        self.names: list[str] = []  # of state tensors, in the order of the registers
        self._shaped: set[str] = set()  # of those, with another shape than their parameter
        self.guides = 0  # at the last step
        self.untraced = 0  # steps that were the class's own
        self.why_not: tuple[type[Untraceable], str] | None = None  # the last of them
        self.noted: Noted | None = None  # backward mode: of what updates use
        self._made: dict[int, list[str]] = {}  # slot -> keys of its entry since begin()
        self._inserted: set[int] = set()  # slots whose entry is new in the state since begin()
        self.layout([])

    def layout(self, groups: list[Group]) -> None:
        """The library was told of all parameters from the start; abandon() comes before it."""
        self._group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        self._by_shape = [False] * len(groups)
        self._cohort_of: list[Cohort | None] = [None] * len(self._group_of)
        self._cohorts: list[Cohort] = []
        self._done: list[Cohort] = []  # backward: of earlier passes since step()
        self._kept: Kept | None = None
        self.begun = False

    def state_names(self) -> list[str | None]:
        """Of all registers; None: not in use."""
        return [*self.names, *(MOST_STATE - len(self.names)) * [None]]

    def counters_of(self, entry: Entry) -> list[Tensor]:
        """The tensors that are in no register."""
        known = self.names
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
        self._before = twin.attributes_of(optimizer)
        self.noted = Noted(optimizer, self._stock) if self._in_backward else None
        self._whole = whole
        by_shape = list(self._by_shape)
        kept, self._kept = self._kept, None
        same = same_state and not updated and self._is_same(kept)
        if not same:
            kinds = self._kinds()
            self._taking = [slot for slot in _slots(kinds, any(by_shape)) if slot not in updated]
        same = self._record_all(optimizer, params, self._taking, same)
        for number, cohort in enumerate(self._cohorts):
            assert cohort.recorded is not None
            program = cohort.recorded.program
            if cohort.recorded.looked_at_requires_grad and not whole:
                _refuse_frozen(params[slot] for slot in cohort.slots)
            if isinstance(program, Parts):
                _refuse_parts_of_tensors(params[slot] for slot in cohort.slots)
                if not whole:
                    self._refuse_other_strides(optimizer, [params[slot] for slot in cohort.slots])
            self._set_program(number, None if same else cohort.slots, program)
            for slot in () if same else cohort.slots:
                self._cohort_of[slot] = cohort
        if self._by_shape != by_shape:
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
        names = [name for name in self.names if name not in self._shaped]
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
        """Which parameters may take part, and what of them makes a difference beside data and
        state. The library remembers it."""
        found: list[int] = _kinds(self._plan, self._whole, any(self._by_shape))
        return found

    def _is_same(self, kept: Kept | None) -> bool:
        """Whether the cohorts are those of the last step."""
        if kept is None:
            return False
        if not lib.of_shim_same_kinds(self._plan, self._whole, any(self._by_shape)):
            return False
        return not kept.counters or _hold(kept.counters, kept.values)

    def _record_all(
        self, optimizer: Optimizer, params: list[Tensor], taking: list[int], same: bool
    ) -> bool:
        """same: the cohorts are those of the last step. Whether they still are."""
        state: State = optimizer.__dict__["state"]
        were_same, looked = same, True
        while looked:  # at most twice: then the shapes are known to matter
            were_same = were_same and same
            self._copies = Copies()
            self._after = Settings({}, {})
            if not same:
                self._learn_names(optimizer, params, taking)
                self._cohorts = list(self._divide(params, state, taking))
            looked = same = False
            for cohort in self._cohorts:
                self._record(optimizer, params[cohort.slots[0]], cohort)
                assert cohort.recorded is not None
                if cohort.recorded.looked_at_shape and not self._by_shape[cohort.group]:
                    self._by_shape[cohort.group] = looked = True
        if self.promise.changes():
            self._step_idle_groups(optimizer)
        return were_same

    def _learn_names(self, optimizer: Optimizer, params: list[Tensor], taking: list[int]) -> None:
        """Of the state tensors that an entry has from before this plan. One without dimensions
        could be taken for a counter; the step that makes it tells."""
        state: State = optimizer.__dict__["state"]
        kinds = set()
        for slot in taking if not self.names else ():
            param = params[slot]
            others = [x for x in (state.get(param) or {}).values() if _is_unclear(x, param)]
            place = param.dtype, param.device
            kind = self._group_of[slot], place, tuple(param.shape), param.stride()
            if others and kind not in kinds:
                kinds.add(kind)
                self._learn_from(optimizer, slot, param)

    def _learn_from(self, optimizer: Optimizer, slot: int, param: Tensor) -> None:
        number = self._group_of[slot]
        options = fresh(twin.options_of(optimizer.param_groups[number]), self.promise.options)
        attributes = dict(fresh(self._before, self.promise.attributes))
        strides = None if param.is_contiguous() else param.stride()
        of_param = (tuple(param.shape), param.dtype, None, self.names, strides)
        try:
            recorded = record(
                self._twin, attributes, options, *of_param, self._making, param.device
            )
        except ForeignTensor:
            raise  # the trial then has what is made from nothing traced
        except Untraceable:
            return  # if that matters, this step can't be traced either
        self.names += recorded.names[len(self.names) :]
        self._shaped |= recorded.shaped()
        self._by_shape[number] |= recorded.looked_at_shape

    def _divide(self, params: list[Tensor], state: State, taking: list[int]) -> Iterator[Cohort]:
        """Cohorts, in the order of their first slots."""
        found: dict[Any, Cohort] = {}
        for slot in taking:
            param, group = params[slot], self._group_of[slot]
            by_shape = self._by_shape[group]
            shape = (tuple(param.shape), param.stride()) if by_shape else _kind_of_shape(param)
            place = param.dtype, param.device
            key = (group, place, shape, self._signature(state.get(param), param))
            if key not in found:
                found[key] = Cohort(group, [])
            found[key].slots.append(slot)
        yield from found.values()

    def _signature(self, entry: Entry | None, param: Tensor) -> Any:
        """What of a state entry may lead step() another way, but for data."""
        if entry is None:
            return None
        found = []
        for key, value in entry.items():
            place = None
            if isinstance(value, Tensor):
                place = place_of(key, value, param, self.names, self._shaped)
            found.append((key, _mark(value) if place is None else place))
        return tuple(found)

    def _record(self, optimizer: Optimizer, param: Tensor, cohort: Cohort) -> None:
        before = cohort.recorded
        recorded = None
        if cohort.replay is not None:
            attributes, given, entry = self._inputs(optimizer, param, cohort)
            recorded = cohort.replay.play(self._twin, dict(attributes), dict(given), entry)
            cohort.played += recorded is not None
        if recorded is None:
            cohort.replay = None
            attributes, given, entry = self._inputs(optimizer, param, cohort)
            of_param = tuple(param.shape), param.dtype, entry, self.names, _strides(param)
            of_all = self._making, param.device
            recorded = record(self._twin, dict(attributes), dict(given), *of_param, *of_all)
        cohort.recorded = recorded
        self.names += recorded.names[len(self.names) :]
        self._shaped |= recorded.shaped()
        self._take_settings(cohort.group, attributes, given, recorded)
        if cohort.replay is None and self._can_play(param) and cohort.is_worth_learning(before):
            self._learn_replay(optimizer, param, cohort, recorded)

    def _can_play(self, param: Tensor) -> bool:
        """Elsewhere modes of Python see operators, too."""
        return self._making == "none" and param.device.type == "cpu"

    def _learn_replay(
        self, optimizer: Optimizer, param: Tensor, cohort: Cohort, recorded: Recorded
    ) -> None:
        promise = self.promise
        options = twin.options_of(optimizer.param_groups[cohort.group])
        given = dict(fresh(options, promise.options))
        attributes = dict(fresh(self._before, promise.attributes))
        entry = like(optimizer.__dict__["state"].get(param), param, self.names, self._shaped)
        of_param = tuple(param.shape), param.dtype, entry, self.names, _strides(param)
        cohort.replay = learn(self._twin, attributes, given, *of_param, recorded)
        cohort.learned += 1

    def _inputs(
        self, optimizer: Optimizer, param: Tensor, cohort: Cohort
    ) -> tuple[dict[str, Any], Group, Entry | None]:
        """The attributes, options and state entry of a run, with copies of what it may change."""
        group = optimizer.param_groups[cohort.group]
        options = twin.options_of(group)
        promised = self.promise.options
        if cohort.group in self._after.options:
            given = fresh(options, promised)
        else:
            given = {**options, **self._copies.of(group, promised)}
        if self._after.attributes:
            attributes = fresh(self._before, self.promise.attributes)
        else:
            of_attributes = self._copies.of(optimizer.__dict__, self.promise.attributes)
            attributes = {**self._before, **of_attributes}
        entry = like(optimizer.__dict__["state"].get(param), param, self.names, self._shaped)
        return attributes, given, entry

    def _take_settings(
        self, group: int, attributes: dict[str, Any], options: Group, recorded: Recorded
    ) -> None:
        """Notes what this step makes of attributes and options, and compares it with what the
        other cohorts say."""
        _must_keep("attribute", attributes, recorded.attributes, self.promise.attributes)
        _must_keep("option", options, recorded.options, self.promise.options)
        _must_agree(
            "attribute", self._after.attributes, recorded.attributes, self.promise.attributes
        )
        others = self._after.options.get(group, {})
        _must_agree("option", others, recorded.options, self.promise.options)
        if not self._after.attributes:
            self._after = Settings(recorded.attributes, self._after.options)
        self._after.options.setdefault(group, recorded.options)

    def _step_idle_groups(self, optimizer: Optimizer) -> None:
        """What this step makes of the options of groups in which no parameter has a gradient."""
        for i, group in enumerate(optimizer.param_groups):
            if i in self._after.options:
                continue
            changed = {
                **twin.options_of(group),
                **self._copies.of(group, self.promise.options),
                "params": twin.without_gradient(group["params"]),
            }
            attributes = fresh(self._before, self.promise.attributes)
            if not self._after.attributes:
                of_attributes = self._copies.of(optimizer.__dict__, self.promise.attributes)
                attributes = {**self._before, **of_attributes}
            other = twin.Twin(self._stock)
            after = other.step(attributes, [changed], defaultdict(dict))
            if not self._after.attributes:
                self._after = Settings(after, self._after.options)
            self._after.options[i] = changed

    def make_state(self, optimizer: Optimizer, slot: int, param: Tensor) -> None:
        """The state entry that this step makes; its program fills it."""
        cohort = self._cohort_of[slot]
        assert cohort is not None and cohort.recorded is not None
        if param not in optimizer.state:
            self._inserted.add(slot)
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
        self._before = twin.attributes_of(optimizer)
        taking = [slot for slot, p in enumerate(params) if p.requires_grad]
        if any(has_holes(params[slot]) for slot in taking):
            raise Untraceable(HOLES)
        self._record_all(optimizer, params, taking, same=False)

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
        self._inserted.clear()
        self.begun = False

    def advance(self, optimizer: Optimizer, params: list[Tensor], same_state: bool) -> bool:
        """The updates of all parameters that have a gradient are certain: counters, options and
        attributes become what the class's step() makes of them. same_state: as begin() says.
        Returns whether the state still has the same objects."""
        self._made.clear()
        self.begun = False
        for name in self.promise.attributes:
            self._copies.put(optimizer.__dict__, self._after.attributes, name)
        for name in self.promise.options:
            for i, group in enumerate(optimizer.param_groups):
                if i in self._after.options:  # else it was added since, and step() has said so
                    self._copies.put(group, self._after.options[i], name)
        kept = Kept([], [])
        known = [cohort.counting for cohort in self._cohorts]
        reached = [(cohort, _reached(cohort, params, not self._whole)) for cohort in self._done]
        for number, cohort in enumerate(self._cohorts):
            all_reached = not self._whole or lib.of_shim_have_gradients(self._plan, number)
            reached.append((cohort, _reached(cohort, params, all_reached)))
        if not same_state or not all(map(_is_known, self._cohorts)):
            self._insert(optimizer.__dict__["state"], params, reached)
        for cohort, slots in reached:
            self._advance_entries(cohort, optimizer, params, same_state, slots, kept)
        if not self._done and all(map(_is_known, self._cohorts)):
            self._kept = kept
        same = same_state and not self._done and all(map(_counts_in_place, self._cohorts, known))
        self._done = []
        return same

    def _insert(
        self, state: State, params: list[Tensor], reached: list[tuple[Cohort, list[int]]]
    ) -> None:
        """Entries without tensors that an update fills; then all new ones are brought into the
        order of the parameters, in which stock's step() inserts them."""
        for cohort, slots in reached:
            entry = cohort.recorded and cohort.recorded.entry
            if entry is not None and not any(_filled(entry)):
                absent = [slot for slot in slots if params[slot] not in state]
                state.update((params[slot], {}) for slot in absent)
                self._inserted.update(absent)
        for slot in sorted(self._inserted):
            if params[slot] in state:
                state[params[slot]] = state.pop(params[slot])
        self._inserted.clear()

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
            reached = [slot for slot in reached if _is_whole(state.get(params[slot]), after)]
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
        if not self._cohorts:
            return "traced, but it has taken no step yet"
        parts = [self.described()]
        for cohort in self._cohorts:
            if cohort.recorded is None:
                continue
            n = len(cohort.slots) - 1
            others = f" and {n} more" if n else ""
            parts.append(f"\n{label(cohort.slots[0])}{others}:")
            parts.append(cohort.recorded.program.shown(self.names))
        return "\n".join(parts)

    def described(self) -> str:
        """In a line."""
        if not self._cohorts:
            return "traced"
        sizes = [len(c.recorded.program) for c in self._cohorts if c.recorded]
        guides = f"{len(sizes)} guide{'s' if len(sizes) > 1 else ''} a step"
        return f"traced: {max(sizes, default=0)} operators, {guides}"


def _reached(cohort: Cohort, params: list[Tensor], all_reached: bool) -> list[int]:
    """The slots with a gradient. all_reached: each is known to have one."""
    if all_reached:
        return cohort.slots
    return [slot for slot in cohort.slots if params[slot].grad is not None]


def _filled(entry: Entry) -> list[str]:
    """The keys whose tensors an update fills."""
    return [key for key, value in entry.items() if isinstance(value, Place)]


def _is_whole(entry: Entry | None, after: Entry) -> bool:
    """Whether it has what the update filled: not if somebody has thrown it away since."""
    return entry is not None and all(key in entry for key in _filled(after))


def _strides(param: Tensor) -> tuple[int, ...] | None:
    return None if param.is_contiguous() else param.stride()


def _room(param: Tensor, place: Place) -> Tensor:
    if place.form is not None:
        return torch.empty_strided(
            *place.form, dtype=place.dtype or param.dtype, device=param.device
        )
    return torch.empty_like(param, dtype=place.dtype, memory_format=torch.preserve_format)


def _refuse_frozen(params: Iterable[Tensor]) -> None:
    if not all(param.requires_grad for param in params):
        raise Untraceable("it looks at requires_grad, and a parameter with a gradient has it off")


def _refuse_parts_of_tensors(params: Iterable[Tensor]) -> None:
    if any(map(is_dtensor, params)):
        raise Untraceable(
            "it calls operators that are not elementwise, and of a DTensor parameter they would "
            "see this process's part only"
        )


def _is_unclear(x: Any, param: Tensor) -> bool:
    """Whether a tensor in a state entry may be a counter."""
    return isinstance(x, Tensor) and (x.shape != param.shape or not x.dim())


def _kind_of_shape(param: Tensor) -> Any:
    """PyTorch's operators go another way by it even where step() asks for no shape: without
    dimensions a parameter takes part in how a result's dtype is chosen, and whether flatten() and
    the like are views or copies depends on strides."""
    if param.dim() == 0:
        return None
    return True if param.is_contiguous() else -param.dim()  # 1 equals True


def _slots(kinds: list[int], by_shape: bool) -> Iterator[int]:
    """Those in an answer of the library's kinds()."""
    i = 0
    while i < len(kinds):
        if kinds[i] & _HOLES:
            raise Untraceable(HOLES)
        yield kinds[i] >> 32
        i += 1 + (2 * (kinds[i] & 127) if by_shape else 0)


def _is_known(cohort: Cohort) -> bool:
    """Whether its entries are, with nothing in them that could change unseen."""
    entry = (cohort.recorded and cohort.recorded.entry) or {}
    known = (Place, Tensor, *CONSTANT)
    return cohort.counting is not None and all(isinstance(v, known) for v in entry.values())


def _counts_in_place(cohort: Cohort, known: Counting | None) -> bool:
    """Whether advance() has only written into the tensors that were known to count."""
    entry = (cohort.recorded and cohort.recorded.entry) or {}
    return cohort.counting is known is not None and all(
        isinstance(value, Place | Tensor) for value in entry.values()
    )


def _mark(value: Any) -> Any:
    """What of a value in a state entry may lead step() another way, where it is no data."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), float(value) if value.dim() == 0 else None
    return type(value), value if isinstance(value, CONSTANT) else repr(value)


def _must_keep(
    what: str, before: dict[str, Any], after: dict[str, Any], changing: frozenset[str]
) -> None:
    missing = object()
    changed = [name for name, value in after.items() if before.get(name, missing) is not value]
    for name in (*changed, *(before.keys() - after.keys())):  # nearly always few
        own = name not in changing and name not in twin.HIDDEN and name not in twin.COUNTERS
        if own and name not in twin.NOT_OPTIONS:
            place = difference("", after.get(name), before.get(name))
            if place is not None:
                raise Untraceable(f"it changes the {what} {name!r}, as it did not in the trial")


def _must_agree(
    what: str, before: dict[str, Any], after: dict[str, Any], names: frozenset[str]
) -> None:
    for name in names if before else ():
        if difference("", after.get(name), before.get(name)) is not None:
            raise Untraceable(
                f"it makes of the {what} {name!r} something else for other parameters"
            )
