# SPDX-License-Identifier: BSD-3-Clause
"""The trial of an optimizer class that was registered with per_parameter=True: step() on
small copies of the parameters, all at once, against step() on one after the other. Nothing
real is within reach meanwhile (reach.py, untouched.py).

Options and attributes may change with a step, if they do so in the same way whether all
parameters are stepped, each by itself, or none because no parameter has a gradient: counters
do, and what a first step sets up. Own.begin() then finds out what they become by the last of
these ways."""

from __future__ import annotations

import copy
import inspect
import random as python_random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import Error, guard
from optfuse._own_step import twin
from optfuse._own_step.causes import Coupled, copied, name_cause
from optfuse._own_step.reach import why_reaches_too_much
from optfuse._own_step.settings import (
    SETTINGS,
    Change,
    Promise,
    Settings,
    changes,
    copied_settings,
)
from optfuse._own_step.shared import why_writes_too_much
from optfuse._own_step.small import (
    RUNS,
    Kind,
    Run,
    Small,
    gradients,
    is_any_large,
    small_copies,
    with_a_rate,
)
from optfuse._own_step.twin import Entry
from optfuse._own_step.untouched import untouched
from optfuse._patches.compiled import lists_given
from optfuse._trials.compare import deep_copy, difference
from optfuse._trials.own_thread import sets_no_threads
from optfuse._trials.random_state import random_as_it_was

STEPS = 100  # of one run at most


T = TypeVar("T")
Place = tuple[str, Any]  # "attribute", "option" or "state", and its name


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@sets_no_threads
def try_promise(optimizer: Optimizer, stock: type[Optimizer]) -> Promise:
    """The changes that the class's step() makes beside updating its parameters one by one. Raises
    optfuse.Error if it does not update them one by one, with nothing changed."""
    try:
        return _try_all(optimizer, stock)
    except Error:
        raise
    except Exception as error:
        raise Error(
            f"optfuse: can't fuse {name_of(stock)}: its step() could not be tried on small copies "
            f"of the parameters: {type(error).__name__}: {error}. Use the optimizer as it is"
        ) from error


def _try_all(optimizer: Optimizer, stock: type[Optimizer]) -> Promise:
    why = why_reaches_too_much(optimizer)
    if why is not None:
        _refuse(stock, why)
    random = torch.Generator().manual_seed(0)
    found = Promise()
    with random_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials = _trials(optimizer, stock, random)
        with untouched(optimizer, name_of(stock)):
            _refuse_compiled_lists(stock, trials[0][1])
            for run, trial in trials:
                found |= trial.run(run, random)
        why = why_writes_too_much(optimizer, found.written)
        if why is not None:
            _refuse(stock, why)
    return found


def _trials(
    optimizer: Optimizer, stock: type[Optimizer], random: torch.Generator
) -> list[tuple[Run, Trial]]:
    """Each run with a trial of its own. Runs of large copies only where a parameter is large."""
    return [
        (run, Trial(optimizer, stock, small_copies(optimizer, random, run.large)))
        for run in RUNS
        if not run.large or is_any_large(optimizer)
    ]


def _refuse(stock: type[Optimizer], why: str) -> None:
    if guard("independent"):
        raise Error(
            f"optfuse: can't fuse {name_of(stock)}: its step() does not treat parameters "
            f"independently: {why}. Use the optimizer as it is"
        )


def _refuse_compiled_lists(stock: type[Optimizer], trial: Trial) -> None:
    """Before anything is compiled: code for a list of parameters would be compiled for each
    parameter by itself, and torch._dynamo.config.recompile_limit ends that with an error. Runs one
    step() on copies, uncompiled."""
    names = trial.compiled_lists()
    if names and guard("independent"):
        raise Error(
            f"optfuse: can't fuse {name_of(stock)}: its step() gives lists of tensors to code of "
            f"torch.compile ({', '.join(sorted(names))}), which is compiled for all of them "
            "together. Let the class run uncompiled, or use the optimizer as it is"
        )


def enter_training(optimizer: Optimizer) -> None:
    """Puts optimizers that have a mode to train in into that mode."""
    train = getattr(optimizer, "train", None)
    if callable(train) and not inspect.signature(train).parameters:
        train()


class Trial:
    """step() on everything against step() on one after the other, on copies. The copies
    that are stepped at once, with their state, are what any other way to update them can be
    compared with."""

    def __init__(self, optimizer: Optimizer, stock: type[Optimizer], smalls: list[Small]) -> None:
        self._stock = stock
        self._step = twin.step_of(stock)
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        self._gpus = sorted(d.index for d in devices if d.type == "cuda")
        self._smalls = smalls
        self._groups = sorted({small.group for small in smalls})  # their indices
        self._whole = self._copy_of(optimizer)
        self._enter_training()
        self._alone = [self._twin_of(small) for small in smalls]
        self._first = copied(self._whole)
        self._twin = twin.Twin(stock)
        self._not_own = _not_own(twin.attributes_of(self._whole))
        self._found = Promise()

    def _copy_of(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer like this one, with all small parameters."""
        real = [optimizer.param_groups[i] for i in self._groups]
        options = [with_a_rate(twin.options_alone(group, True)) for group in real]
        attributes, groups = deep_copy((twin.attributes_of(optimizer), options), SETTINGS)
        state: defaultdict[Tensor, Entry] = defaultdict(dict)
        for index, group in zip(self._groups, groups, strict=True):
            group["params"] = [small.param for small in self._smalls if small.group == index]
        for small in self._smalls:
            if small.entry is not None:
                state[small.param] = small.entry
        whole = self._stock.__new__(self._stock)
        twin.install(whole, attributes, groups, state)
        return whole

    def _enter_training(self) -> None:
        self._must("called train() on copies", lambda: enter_training(self._whole))

    def _twin_of(self, small: Small) -> Small:
        param = small.param.detach().clone().requires_grad_(small.param.requires_grad)
        entry = self._whole.state.get(small.param)
        return Small(small.name, small.group, param, deep_copy(entry, "the state"), small.of)

    def compiled_lists(self) -> set[str]:
        """The names of the code of torch.compile to which a step gives several tensors in a
        list."""
        whole = copied(self._whole)
        for group in whole.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        with lists_given() as names:
            self._error_of("took a step", lambda: self._step(whole))  # the runs say what it raises
        return names

    # ---- steps

    def run(self, run: Run, random: torch.Generator) -> Promise:
        start = random.get_state()
        # The class may want all gradients, as PyTorch's fused SGD with momentum does: then an error
        # says nothing.
        may_fail = "late" in run.steps
        for step, kind in enumerate(run.steps[:STEPS]):
            self._give(gradients(self._smalls, kind, step, random))
            what = f"step {step + 1}" + ("" if kind == 1.0 else f" with gradients {kind}")
            try:
                if not self._take(step, kind, what, may_fail):
                    break  # it takes no such gradients
            except Coupled as coupled:
                cause = self._cause(run, random.set_state(start), step, coupled)
                _refuse(self._stock, f"{cause}{coupled.why}")
        return self._found

    def _give(self, given: Iterable[Tensor | None]) -> None:
        for small, alone, grad in zip(self._smalls, self._alone, given, strict=True):
            small.param.grad = None if grad is None else grad.clone()
            alone.param.grad = grad

    def _change_rates(self, step: int) -> None:
        """As schedulers do, each group's by another factor, and back, exactly."""
        if step % 3 != 2:
            return
        for i, group in enumerate(self._whole.param_groups):
            if type(group.get("lr")) is float:
                factor = 2.0 ** (1 + i % 3)
                group["lr"] *= factor if step % 2 else 1 / factor

    def _cause(self, run: Run, random: torch.Generator, last: int, coupled: Coupled) -> str:
        """Takes the same steps up to the last one, in which it was seen that they are coupled."""
        if coupled.target is None:
            return ""
        whole = self._first
        params = [p for group in whole.param_groups for p in group["params"]]
        try:
            for step, kind in enumerate(run.steps[: last + 1]):
                given = gradients(self._smalls, kind, step, random)
                for param, grad in zip(params, given, strict=True):
                    param.grad = grad
                if step < last:
                    self._take_again(whole, step)
            cause = name_cause(whole, self._take_again, last, coupled.target)
        except Exception:  # what was seen is reason enough
            return ""
        return "" if cause is None else f"{cause}: "

    def _take_again(self, whole: Optimizer, seed: int) -> None:
        self._seed(seed)
        self._step(whole)

    def _take(self, step: int, kind: Kind, what: str, may_fail: bool) -> bool:
        """One step in each of the three ways. False: the class raises an error."""
        self._change_rates(step)
        before = self._settings(copied=True)
        state = self._tensors_of_state()
        copies = self._copies()
        self._seed(step)
        error = self._error_of(f"took {what} of all", lambda: self._step(self._whole))
        if error is not None and kind == 1.0 and not may_fail:
            raise error
        self._seed(step)
        stepped = [alone for alone in reversed(self._alone) if alone.param.grad is not None]
        alone = [self._take_alone(one, before, what, error is None) for one in stepped]
        if error is not None:
            if kind != "some" and not may_fail and None not in alone:
                self._refuse(f"{what} raises {error.__cause__!r} if all are stepped at once only")
            return False
        self._compare(what)
        self._found |= Promise(written=_written_of(copies))
        self._look_at_settings(before, [a for a in alone if a is not None], what)
        now = self._tensors_of_state()
        self._found |= Promise(replaces_state=any(map(_are_others, state, now)))
        return True

    def _seed(self, seed: int) -> None:
        """No other generators than those that are put back afterwards."""
        python_random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for device in self._gpus:
            torch.cuda.default_generators[device].manual_seed(seed)

    def _take_alone(self, small: Small, before: Settings, what: str, must: bool) -> Settings | None:
        """None: it raises an error."""
        own = {small.group: before.options[small.group]}
        settings = copied_settings(Settings(before.attributes, own))
        attributes = {**self._not_own, **settings.attributes}
        options = settings.options[small.group]

        def take() -> Settings:
            done = self._twin.step_alone(attributes, options, small.param, small.entry)
            small.entry = done[0]
            return Settings(twin.own_attributes(done[1]), {small.group: twin.own_options(done[2])})

        doing = f"took {what} of a copy of {small.name} by itself"
        if must:
            return self._must(doing, take)
        found: list[Settings] = []
        self._error_of(doing, lambda: found.append(take()))
        return found[0] if found else None

    def _take_idle(self, before: Settings) -> Settings:
        """Where no parameter has a gradient."""
        settings = copied_settings(before)
        attributes = {**self._not_own, **settings.attributes}
        groups = [
            {**settings.options[i], "params": twin.without_gradient(group["params"])}
            for i, group in zip(self._groups, self._whole.param_groups, strict=True)
        ]
        after = self._twin.step(attributes, groups, defaultdict(dict))
        options = dict(zip(self._groups, map(twin.own_options, groups), strict=True))
        return Settings(twin.own_attributes(after), options)

    def _must(self, doing: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            raise Error(
                f"optfuse: can't fuse {name_of(self._stock)}: step() could not be tried on small "
                f"copies of the parameters: the trial {doing}, and {type(error).__name__} was "
                f"raised: {error}. Use the optimizer as it is"
            ) from error

    def _error_of(self, doing: str, work: Callable[[], Any]) -> Error | None:
        try:
            self._must(doing, work)
        except Error as error:
            return error
        return None

    # ---- comparing

    def _refuse(self, why: str, target: int | Change | None = None) -> None:
        if guard("independent"):
            raise Coupled(why, target)

    def _refuse_change(self, change: Change, how: str) -> None:
        group = None if change.group is None else self._groups.index(change.group)
        self._refuse(f"it changes {change}, in {how}", Change(change.name, group))

    def _settings(self, copied: bool = False) -> Settings:
        groups = map(twin.own_options, self._whole.param_groups)
        options = dict(zip(self._groups, groups, strict=True))
        now = Settings(twin.own_attributes(twin.attributes_of(self._whole)), options)
        return copied_settings(now) if copied else now

    def _contents(self) -> list[tuple[Place, Any]]:
        """The settings and entries that a step may write into."""
        now = self._settings()
        entries = [self._whole.state.get(small.param) or {} for small in self._smalls]
        kinds = [("attribute", now.attributes)]
        kinds += [("option", options) for options in now.options.values()]
        kinds += [("state", entry) for entry in entries]
        return [((kind, name), v) for kind, values in kinds for name, v in values.items()]

    def _copies(self) -> list[tuple[Place, Any, Any]]:
        """The contents, where each one is, and a copy of it. Numbers can't be written into."""
        contents = ((place, x) for place, x in self._contents() if type(x) not in twin.CONSTANT)
        return [(place, value, _copy_of_one(value)) for place, value in contents]

    def _tensors_of_state(self) -> list[list[Tensor]]:
        entries = [self._whole.state.get(small.param) or {} for small in self._smalls]
        return [[v for v in entry.values() if isinstance(v, Tensor)] for entry in entries]

    def _compare(self, what: str) -> None:
        state = self._whole.state
        for i, (small, alone) in enumerate(zip(self._smalls, self._alone, strict=True)):
            place = difference("the parameter", alone.param, small.param) or difference(
                "state", alone.entry or {}, state.get(small.param) or {}
            )
            if place is not None:
                self._refuse(
                    f"after {what} on a small copy of {small.name}, {place} differs when that "
                    "parameter is stepped by itself",
                    i,
                )
        stepped = {id(small.param) for small in self._smalls}
        for owner in state:
            if not isinstance(owner, twin.CONSTANT) and id(owner) not in stepped:
                self._refuse(f"it keeps state[{owner!r}], which belongs to no parameter")

    def _look_at_settings(self, before: Settings, alone: list[Settings], what: str) -> None:
        after = self._settings()
        for settings in alone:
            for change in changes(after, settings):
                self._refuse_change(
                    change, f"{what} in another way when a parameter is stepped by itself"
                )
        changed = list(changes(before, after))
        idle = self._idle_or_none(before, bool(changed) or self._found.changes())
        for change in changes(after, idle) if idle is not None else ():
            self._refuse_change(change, f"{what} in another way when no parameter has a gradient")
        self._found |= Promise(
            options=frozenset(c.name for c in changed if c.group is not None),
            attributes=frozenset(c.name for c in changed if c.group is None),
        )

    def _idle_or_none(self, before: Settings, must: bool) -> Settings | None:
        """Nobody needs it of a class that changes nothing."""
        if must:
            doing = "took a step in which no parameter has a gradient"
            return self._must(doing, lambda: self._take_idle(before))
        return None


def _not_own(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that PyTorch gives to every optimizer."""
    own = twin.own_attributes(attributes)
    return {k: v for k, v in attributes.items() if k not in own}


def _copy_of_one(value: Any) -> Any:
    is_plain = type(value) is Tensor and not value.requires_grad
    return value.clone() if is_plain else copy.deepcopy(value)


def _written_of(copies: list[tuple[Place, Any, Any]]) -> frozenset[Place]:
    """The places of what a step has written into, by copies from before."""
    changed = [place for place, value, was in copies if difference("", value, was) is not None]
    return frozenset(changed)


def _are_others(before: list[Tensor], after: list[Tensor]) -> bool:
    return bool(before) and list(map(id, before)) != list(map(id, after))
