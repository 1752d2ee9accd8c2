# SPDX-License-Identifier: BSD-3-Clause
"""The trial of a class whose parameters are not independent of each other in the first steps of a
group (steady.py): after some steps on all small copies at once, steps on all against steps on one
after the other, as updates take them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._own_step import twin
from optfuse._own_step.causes import Coupled
from optfuse._own_step.maps import Maps, Places, why_maps_differ
from optfuse._own_step.reach import why_reaches_too_much
from optfuse._own_step.settings import Promise, Settings, changes, copied_settings
from optfuse._own_step.shared import why_writes_too_much
from optfuse._own_step.small import RUNS, Kind, Run, Small, gradients
from optfuse._own_step.steady import (
    Path,
    Steady,
    count,
    counters_in,
    kind_of,
    maps_of_parameters,
    paths,
    put_counters,
    why_no_maps,
    why_unsteady,
)
from optfuse._own_step.trial import (
    Trial,
    are_others,
    refuse_compiled_lists,
    trials_of,
    written_of,
)
from optfuse._own_step.untouched import untouched
from optfuse._trials.random_state import random_as_it_was

FIRST_STEPS = 4  # after which a group is steady
LEAST = 10  # steps that are compared of the first run
PLAIN = FIRST_STEPS * (1.0,)
# Only the first parameter has a gradient, so that some groups have none.
ONE = Run((1.0, "one", 1.0, "one", 1.0))
# Coupling of first steps may go on where groups look steady already; and all that a run shows has
# to be seen in steady groups, too.
ALL_RUNS = (*RUNS, *(replace(run, steps=(*PLAIN, *run.steps)) for run in (*RUNS, ONE)))


def try_steady(optimizer: Optimizer, stock: type[Optimizer]) -> Promise:
    """The changes of steps in steady groups. Raises Coupled if they are not of one parameter after
    the other."""
    maps = maps_of_parameters(optimizer)
    why = why_reaches_too_much(optimizer, maps)
    if why is not None:
        raise Coupled(why)
    if any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
        raise Coupled("it has DTensor parameters")
    random = torch.Generator().manual_seed(0)
    found = Promise()
    with random_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials = trials_of(SteadyTrial, ALL_RUNS, optimizer, stock, random)
        with untouched(optimizer, stock.__qualname__, maps):
            refuse_compiled_lists(stock, trials[0][1])
            for run, trial in trials:
                found |= trial.take_all(run, random)
        if len({trial.drops_gradients for _, trial in trials}) != 1 or found.steady is None:
            raise Coupled("it drops some gradients only")
        why = why_no_maps(optimizer, found.steady.maps, [trial.filled for _, trial in trials])
        if why is not None:
            raise Coupled(why)
        known = _counters_of(optimizer, found.steady)
        why = why_writes_too_much(optimizer, found.written, known)
        if why is not None:
            raise Coupled(why)
    return found


def _counters_of(optimizer: Optimizer, steady: Steady) -> frozenset[int]:
    """The ids of tensors that a group's options and an entry share."""
    entries = [entry for entry in optimizer.__dict__["state"].values() if entry]
    return frozenset(id(x) for entry in entries for x in counters_in(entry, steady))


class SteadyTrial(Trial):
    """All at once are stepped the copies of `_whole`."""

    def __init__(self, optimizer: Optimizer, stock: type[Optimizer], smalls: list[Small]) -> None:
        self._maps = maps_of_parameters(optimizer)
        self._alone_maps: Maps = {}
        self._left: dict[str, Any] = {}  # the attributes after a step on one
        super().__init__(optimizer, stock, smalls)
        self._places = Places(small.param for small in smalls)
        self._compared = 0

    def _attributes_of(self, optimizer: Optimizer) -> dict[str, Any]:
        own = twin.attributes_of(optimizer)
        return {**own, **{name: {} for name in self._maps & own.keys()}}

    def _own(self, attributes: dict[str, Any]) -> dict[str, Any]:
        own = twin.own_attributes(attributes)
        self._left = own
        return {**own, **{name: {} for name in self._maps & own.keys()}}

    def _given(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {**super()._given(attributes), **self._alone_maps}

    def take_all(self, run: Run, random: torch.Generator) -> Promise:
        """The steps of the run. Those in groups that are not steady are of all at once."""
        self._rehearse(random)
        self._copy_again()
        for step, kind in enumerate(run.steps):
            self._give(_gradients(self._smalls, kind, step, random))
            if not self._take(step, kind, f"step {step + 1} with gradients {kind}", False):
                break  # it takes no such gradients
        if run is ALL_RUNS[0] and self._compared < LEAST:
            raise Coupled("its groups are hardly ever steady")
        return self._found | Promise(steady=self._steady)

    def _rehearse(self, random: torch.Generator) -> None:
        """Finds out how groups look when they are steady."""
        optimizer = self._first
        params = parameters_of(optimizer)
        looks = []
        for step in range(FIRST_STEPS):
            for param, grad in zip(params, gradients(self._smalls, 1.0, step, random), strict=True):
                param.grad = grad
            self._seed(step)
            self._must("took a first step of all", lambda: self._step(optimizer))
            self._maps |= maps_of_parameters(optimizer)
            looks.append(_looks(optimizer, self._maps))
        if looks[-1] is None or looks[-1] != looks[-2]:
            raise Coupled("its groups are never steady")
        self._steady = looks[-1]
        self.filled = {name for name in self._maps if optimizer.__dict__[name]}

    @property
    def drops_gradients(self) -> bool:
        return self._steady.drops_gradients

    # ---- a step

    def _take(self, step: int, kind: Kind, what: str, may_fail: bool) -> bool:
        if why_unsteady(self._whole, self._steady) is None:
            return self._compare_step(step, kind, what)
        self._seed(step)
        if self._error_of(f"took {what} of all", lambda: self._step(self._whole)) is not None:
            return False
        self._copy_again()
        return True

    def _copy_again(self) -> None:
        self._alone = [self._twin_of(small) for small in self._smalls]
        self._alone_maps = {name: {} for name in self._maps}

    def _compare_step(self, step: int, kind: Kind, what: str) -> bool:
        self._change_rates(step)
        before = self._settings(copied=True)
        state = self._tensors_of_state()
        copies = self._copies()
        given = [small.param.grad is not None for small in self._smalls]
        maps = self._maps_of_whole()
        items = self._places.told(maps)
        self._seed(step)
        error = self._error_of(f"took {what} of all", lambda: self._step(self._whole))
        if error is not None and kind == 1.0:
            raise error
        self._seed(step)
        stepped = [alone for alone, has in zip(self._alone, given, strict=True) if has]
        after = {id(a): self._take_alone(a, before, what, error is None) for a in stepped[::-1]}
        if error is not None:
            if kind not in ("some", "late", "one") and None not in after.values():
                self._refuse(f"{what} raises {error.__cause__!r} if all are stepped at once only")
            return False
        self._count(stepped, after)
        self._compare(what)
        self._compare_maps(maps, items, what)
        self._compare_gradients(given, what)
        self._found |= Promise(written=written_of(copies))
        self._look_at_all(before, [(a, after[id(a)]) for a in stepped], what)
        replaced = any(map(are_others, state, self._tensors_of_state()))
        self._found |= Promise(replaces_state=replaced)
        self._compared += 1
        return True

    def _take_alone(self, small: Small, before: Settings, what: str, must: bool) -> Settings | None:
        entry = small.entry
        keys = {name: set(items) for name, items in self._alone_maps.items()}
        kept = counters_in(entry or {}, self._steady)
        after = super()._take_alone(small, before, what, must)
        if small.entry is not entry:
            self._refuse(f"after {what} the state of {small.name} is another dict")
        for name, items in self._alone_maps.items() if after is not None else ():
            if self._left.get(name) is not items or keys[name] - items.keys():
                self._refuse(f"{what} takes items out of its attribute {name!r}")
        put_counters(small.entry or {}, self._steady, kept)
        return after

    def _count(self, stepped: list[Small], after: dict[int, Settings | None]) -> None:
        counted = set()
        for small in stepped:
            settings = after[id(small)]
            if small.group not in counted and settings is not None and small.entry is not None:
                counted.add(small.group)
                count(small.entry, self._steady, settings.options[small.group])

    def _maps_of_whole(self) -> Maps:
        held = self._whole.__dict__
        return {name: held[name] for name in self._maps if type(held.get(name)) is dict}

    def _compare_maps(self, maps: Maps, items: Maps, what: str) -> None:
        """maps: those before the step. items: what was in them then."""
        now = self._maps_of_whole()
        if {name: id(held) for name, held in now.items()} != {k: id(v) for k, v in maps.items()}:
            self._refuse(f"after {what} its dicts by parameter are others")
        alone = Places(small.param for small in self._alone).told(self._alone_maps)
        why = why_maps_differ(items, self._places.told(now), alone)
        if why is not None:
            self._refuse(f"after {what} {why}")

    def _compare_gradients(self, given: list[bool], what: str) -> None:
        for small, had in zip(self._smalls, given, strict=True):
            if had and (small.param.grad is None) != self._steady.drops_gradients:
                self._refuse(f"after {what} it has dropped some gradients only")

    def _look_at_all(
        self, before: Settings, stepped: list[tuple[Small, Settings | None]], what: str
    ) -> None:
        after = self._settings()
        reached = {small.group for small, _ in stepped}
        found = [settings for _, settings in stepped if settings is not None]
        if not found:
            return  # the class's own step() takes such steps
        idle = [self._idle_group(before, i) for i in self._groups if i not in reached]
        for settings in (*found, *idle):
            for change in changes(after, settings):
                self._refuse_change(change, f"{what} in another way for one parameter")
        changed = list(changes(before, after))
        self._found |= Promise(
            options=frozenset(c.name for c in changed if c.group is not None),
            attributes=frozenset(c.name for c in changed if c.group is None),
        )

    def _idle_group(self, before: Settings, number: int) -> Settings:
        """No parameter of this group has a gradient. Attributes are those of the other groups."""
        settings = copied_settings(before)
        attributes = {**self._not_own, **settings.attributes}
        params = self._whole.param_groups[self._groups.index(number)]["params"]
        group = {**settings.options[number], "params": twin.without_gradient(params)}
        self._twin.step(attributes, [group], defaultdict(dict))
        return Settings(self._settings().attributes, {number: twin.own_options(group)})


def _looks(optimizer: Optimizer, maps: frozenset[str]) -> Steady | None:
    """Those of the groups as they are. None: it has dropped some gradients only."""
    groups, state = optimizer.param_groups, optimizer.state
    names = [twin.own_options(group).keys() for group in groups]
    counters: dict[Path, str] = {}
    for group in groups:
        options = twin.own_options(group).items()
        for path, value in paths(state.get(group["params"][0]) or {}):
            same = [k for k, v in options if isinstance(v, Tensor) and v is value]
            counters.update((path, name) for name in same[:1])
    params = parameters_of(optimizer)
    dropped = {p.grad is None for p in params}
    if len(dropped) != 1:
        return None
    return Steady(
        frozenset(names[0]).intersection(*names),
        frozenset(kind_of(state[p], counters) for p in params if p in state),
        tuple(counters.items()),
        maps,
        dropped.pop(),
    )


def _gradients(smalls: list[Small], kind: Kind, step: int, random: torch.Generator) -> Any:
    if kind != "one":
        return gradients(smalls, kind, step, random)
    plain = gradients(smalls, 1.0, step, random)
    return [grad if i == 0 else None for i, grad in enumerate(plain)]
