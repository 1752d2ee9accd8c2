# SPDX-License-Identifier: BSD-3-Clause
"""The guides of one step(): a run on stand-ins for each cohort of parameters, and what all of them
make of options and attributes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._own_step import twin
from optfuse._own_step.settings import Copies, Promise, Settings, fresh
from optfuse._own_step.twin import Entry, Group
from optfuse._traced.cohorts import Cohort, kind_of_shape, mark_of
from optfuse._traced.guide import Inputs, Recorded, like, place_of, record
from optfuse._traced.standin import ForeignTensor, Made, Untraceable
from optfuse._trials.compare import difference

State = dict[Tensor, Entry]
MOST_ITEMS = 1000  # of a list or dict that each run gets a copy of
_LEFT = twin.HIDDEN | set(twin.COUNTERS)  # nothing that step() writes into


class Recording:
    """Records the steps of one plan. Between two calls it knows neither the optimizer nor its
    parameters."""

    def __init__(self, stock: type[Optimizer], promise: Promise, made: Made) -> None:
        self._twin = twin.Twin(stock)
        self._stock = stock
        self.promise = promise
        self._making = made
        self.names: list[str] = []  # of state tensors, in the order of the registers
        self.shaped: set[str] = set()  # of those, with another shape than their parameter
        self.before: dict[str, Any] = {}  # attributes of the optimizer
        self.after = Settings({}, {})  # what this step makes of options and attributes
        self.copies = Copies()
        self.layout([])

    def layout(self, groups: list[Group]) -> None:
        """The library was told of all parameters from the start."""
        self.group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        self.by_shape = [False] * len(groups)
        self.cohorts: list[Cohort] = []

    def record_all(
        self, optimizer: Optimizer, params: list[Tensor], taking: list[int], same: bool
    ) -> bool:
        """same: the cohorts are those of the last step. Whether they still are."""
        state: State = optimizer.__dict__["state"]
        were_same, looked = same, True
        while looked:  # at most twice: then the shapes are known to matter
            were_same = were_same and same
            self.copies = Copies()
            self.after = Settings({}, {})
            if not same:
                self._learn_names(optimizer, params, taking)
                self.cohorts = list(self._divide(params, state, taking))
            looked = same = False
            for cohort in self.cohorts:
                self._record(optimizer, params[cohort.slots[0]], cohort)
                assert cohort.recorded is not None
                if cohort.recorded.looked_at_shape and not self.by_shape[cohort.group]:
                    self.by_shape[cohort.group] = looked = True
        if self.promise.changes():
            self._step_idle_groups(optimizer)
        return were_same

    def _learn_names(self, optimizer: Optimizer, params: list[Tensor], taking: list[int]) -> None:
        """Learns the names of the state tensors that an entry has from before this plan. One
        without dimensions could be taken for a counter; the step that makes it tells."""
        state: State = optimizer.__dict__["state"]
        kinds = set()
        known = list(self.names)  # of other kinds of parameters, if there are any
        for slot in taking:
            param = params[slot]
            others = [
                x
                for key, x in (state.get(param) or {}).items()
                if _is_unclear(x, param) and (not known or (x.dim() and key not in known))
            ]
            place = param.dtype, param.device
            kind = self.group_of[slot], place, tuple(param.shape), param.stride()
            if others and kind not in kinds:
                kinds.add(kind)
                self._learn_from(optimizer, slot, param)

    def _learn_from(self, optimizer: Optimizer, slot: int, param: Tensor) -> None:
        number = self.group_of[slot]

        def inputs() -> Inputs:
            options = fresh(twin.options_of(optimizer.param_groups[number]), self.promise.options)
            attributes = fresh(self.before, self.promise.attributes)
            return self._apart((attributes, options, None))

        attributes, options, _ = inputs()
        of_param = (tuple(param.shape), param.dtype, None, self.names, _strides(param))
        of_all = self._making, param.device, inputs
        try:
            recorded = record(self._twin, attributes, options, *of_param, *of_all)
        except ForeignTensor:
            raise  # the trial then has what is made from nothing traced
        except Untraceable:
            return  # if that matters, this step can't be traced either
        self.names += recorded.names[len(self.names) :]
        self.shaped |= recorded.shaped()
        self.by_shape[number] |= recorded.looked_at_shape

    def _divide(self, params: list[Tensor], state: State, taking: list[int]) -> Iterator[Cohort]:
        """Cohorts, in the order of their first slots."""
        found: dict[Any, Cohort] = {}
        for slot in taking:
            param, group = params[slot], self.group_of[slot]
            by_shape = self.by_shape[group]
            shape = (tuple(param.shape), param.stride()) if by_shape else kind_of_shape(param)
            place = param.dtype, param.device
            key = (group, place, shape, self._signature(state.get(param), param))
            if key not in found:
                found[key] = Cohort(group, [])
            found[key].slots.append(slot)
        yield from found.values()

    def _signature(self, entry: Entry | None, param: Tensor) -> Any:
        """The parts of a state entry that may lead step() another way, without data."""
        if entry is None:
            return None
        found = []
        for key, value in entry.items():
            place = None
            if isinstance(value, Tensor):
                place = place_of(key, value, param, self.names, self.shaped)
            found.append((key, mark_of(value) if place is None else place))
        return tuple(found)

    def _record(self, optimizer: Optimizer, param: Tensor, cohort: Cohort) -> None:
        attributes, given, entry = inputs = self._inputs(optimizer, param, cohort)
        of_param = tuple(param.shape), param.dtype, entry, self.names, _strides(param)
        again = lambda: self._apart(self._inputs(optimizer, param, cohort))  # noqa: E731
        of_all = self._making, param.device, again
        recorded = record(self._twin, *self._apart(inputs)[:2], *of_param, *of_all)
        cohort.recorded = recorded
        self.names += recorded.names[len(self.names) :]
        self.shaped |= recorded.shaped()
        _must_keep_entries(entry, recorded.entry)
        untouched = _with_own_containers(given, optimizer.param_groups[cohort.group])
        self._take_settings(cohort.group, attributes, untouched, recorded)

    def _inputs(self, optimizer: Optimizer, param: Tensor, cohort: Cohort) -> Inputs:
        """The attributes, options and state entry of a run, with copies of what it may change."""
        group = optimizer.param_groups[cohort.group]
        options = twin.options_of(group)
        promised = self.promise.options
        if cohort.group in self.after.options:
            given = fresh(options, promised)
        else:
            given = {**options, **self.copies.of(group, promised)}
        if self.after.attributes:
            attributes = fresh(self.before, self.promise.attributes)
        else:
            of_attributes = self.copies.of_attributes(optimizer, self.promise.attributes)
            attributes = {**self.before, **of_attributes}
        entry = like(optimizer.__dict__["state"].get(param), param, self.names, self.shaped)
        return attributes, given, entry

    def _apart(self, inputs: Inputs) -> Inputs:
        """With copies of the optimizer's lists and dicts, in which every run starts from the same
        and leaves nothing."""
        attributes, given, entry = inputs
        left = {*_LEFT, *self.promise.attributes}
        copies = {
            name: twin.copied(value)
            for name, value in attributes.items()
            if type(value) in (list, tuple, dict) and name not in left and _may_be_copied(value)
        }
        return {**attributes, **copies}, dict(given), entry

    def _take_settings(
        self, group: int, attributes: dict[str, Any], options: Group, recorded: Recorded
    ) -> None:
        """Notes what this step makes of attributes and options, and compares it with what the
        other cohorts say."""
        _must_keep("attribute", attributes, recorded.attributes, self.promise.attributes)
        _must_keep("option", options, recorded.options, self.promise.options)
        _must_agree(
            "attribute", self.after.attributes, recorded.attributes, self.promise.attributes
        )
        others = self.after.options.get(group, {})
        _must_agree("option", others, recorded.options, self.promise.options)
        if not self.after.attributes:
            self.after = Settings(recorded.attributes, self.after.options)
        self.after.options.setdefault(group, recorded.options)

    def advance_settings(self, optimizer: Optimizer) -> None:
        """Options and attributes become what the class's step() makes of them."""
        self.copies.put_attributes(optimizer, self.after.attributes, self.promise.attributes)
        for name in self.promise.options:
            for i, group in enumerate(optimizer.param_groups):
                if i in self.after.options:  # else it was added since, and step() has said so
                    self.copies.put(group, self.after.options[i], name)

    def _step_idle_groups(self, optimizer: Optimizer) -> None:
        """Notes the options that this step gives to groups in which no parameter has a gradient."""
        for i, group in enumerate(optimizer.param_groups):
            if i in self.after.options:
                continue
            changed = {
                **twin.options_of(group),
                **self.copies.of(group, self.promise.options),
                "params": twin.without_gradient(group["params"]),
            }
            attributes = fresh(self.before, self.promise.attributes)
            if not self.after.attributes:
                of_attributes = self.copies.of_attributes(optimizer, self.promise.attributes)
                attributes = {**self.before, **of_attributes}
            other = twin.Twin(self._stock)
            after = other.step(attributes, [changed], defaultdict(dict))
            if not self.after.attributes:
                self.after = Settings(after, self.after.options)
            self.after.options[i] = changed


def _may_be_copied(value: Any, depth: int = 0) -> bool:
    """Not what takes too long to copy, or has tensors, which are the optimizer's."""
    if type(value) not in (list, tuple, dict):
        return not isinstance(value, Tensor)
    is_large = len(value) > MOST_ITEMS or depth > MOST_ITEMS // 100
    items = value.values() if type(value) is dict else value
    return not is_large and all(_may_be_copied(x, depth + 1) for x in items)


def _strides(param: Tensor) -> tuple[int, ...] | None:
    return None if param.is_contiguous() else param.stride()


def _is_unclear(x: Any, param: Tensor) -> bool:
    """Whether a tensor in a state entry may be a counter."""
    return isinstance(x, Tensor) and (x.shape != param.shape or not x.dim())


def _must_keep(
    what: str, before: dict[str, Any], after: dict[str, Any], changing: frozenset[str]
) -> None:
    missing = object()
    same = map(is_, map(before.get, after, repeat(missing)), after.values())
    changed = [name for name, is_same in zip(after, same, strict=True) if not is_same]
    for name in (*changed, *(before.keys() - after.keys())):  # nearly always few
        own = name not in changing and name not in twin.HIDDEN and name not in twin.COUNTERS
        if own and name not in twin.NOT_OPTIONS:
            place = difference("", after.get(name), before.get(name))
            if place is not None:
                raise Untraceable(f"it changes the {what} {name!r}, as it did not in the trial")


def _must_keep_entries(before: Entry | None, after: Entry | None) -> None:
    names = list(before or ())
    if list(after or ())[: len(names)] != names:
        raise Untraceable(
            "it takes something out of its state or puts it there in another order, as it did not "
            "in the trial"
        )


def _with_own_containers(options: Group, group: Group) -> Group:
    """The options that a run was given, but the group's own in the place of what it may have
    filled."""
    filled = [k for k, v in options.items() if isinstance(v, (list, dict, set)) and k in group]
    return {**options, **{k: group[k] for k in filled}} if filled else options


def _must_agree(
    what: str, before: dict[str, Any], after: dict[str, Any], names: frozenset[str]
) -> None:
    for name in names if before else ():
        if difference("", after.get(name), before.get(name)) is not None:
            raise Untraceable(
                f"it makes of the {what} {name!r} something else for other parameters"
            )
