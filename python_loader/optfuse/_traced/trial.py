# SPDX-License-Identifier: BSD-3-Clause
"""Before programs take the place of a class's step(): does tracing it give its bits, here?

fuse() first finds out that step() treats parameters independently (_own_step/trial.py), as one
program for many of them needs. Then two optimizers of small copies of the parameters take the
same steps, one by the class's own step() on all of them, the other traced: parameters, gradients,
state, options and attributes must be equal by bits after each step."""

from __future__ import annotations

import contextlib
import math
import random as python_random
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import is_dtensor, laid_out_as, local_of
from optfuse._gpu import is_gpu
from optfuse._library.bindings import guard
from optfuse._options import LINK
from optfuse._own_step import twin
from optfuse._own_step.register import check_promise
from optfuse._own_step.settings import SETTINGS
from optfuse._own_step.small import RUNS, Run, Small, gradients, small_copies, with_a_rate
from optfuse._own_step.trial import enter_training
from optfuse._own_step.twin import Entry
from optfuse._own_step.untouched import untouched
from optfuse._traced.rule import TracedRule, traced_rule
from optfuse._traced.standin import ForeignTensor, Made, Untraceable
from optfuse._traced.updates import Traced
from optfuse._trials.compare import deep_copy, difference
from optfuse._trials.own_thread import sets_no_threads
from optfuse._trials.random_state import random_as_it_was

Fuse = Callable[[Optimizer, TracedRule], Optimizer]
ODD = 7  # elements of a dimension: then some take the reference's scalar code
# Parameters and gradients in which every other number is one of these.
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, 1.0, -1.0, 65504.0)
MIXED = (Run(("mixed",) * 3), Run(("mixed",) * 3, large=True), Run(("mixed", 1.0, "mixed")))


def try_traced(optimizer: Optimizer, stock: type[Optimizer], fuse: Fuse) -> TracedRule:
    """The rule by which its updates have the class's bits. fuse: fuses by a rule. Raises
    Untraceable, and optfuse.Error where step() does not treat parameters independently or can't be
    tried, with nothing changed."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.device.type != "cpu" and not is_gpu(param.device):
                raise Untraceable(f"it has parameters on {param.device}, where no program runs")
            if is_dtensor(param) and is_gpu(param.device):
                raise Untraceable("it has DTensor parameters on a GPU, which are not traced there")
    promise = check_promise(optimizer, stock)
    *some, everything = get_args(Made)
    for made in some:
        with contextlib.suppress(ForeignTensor):
            return _try(optimizer, stock, fuse, traced_rule(promise, made))
    return _try(optimizer, stock, fuse, traced_rule(promise, everything))


@sets_no_threads
def try_first(optimizer: Optimizer, stock: type[Optimizer], rule: TracedRule) -> None:
    """A trial is on contiguous copies, and its gradients come by step(): in backward mode, where
    the class's own step() can't take a step instead, raises Untraceable for what can't be traced of
    the parameters themselves. Not of an optimizer that may have to enter training first."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_dtensor, params)) and not callable(getattr(optimizer, "train", None)):
        with random_as_it_was():
            Traced(0, stock, rule.promise, rule.made, in_backward=True).check(optimizer)


@sets_no_threads
def _try(optimizer: Optimizer, stock: type[Optimizer], fuse: Fuse, rule: TracedRule) -> TracedRule:
    random = torch.Generator().manual_seed(0)
    with random_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trials = [(run, _Pair(optimizer, stock, run, random)) for run in (*RUNS, *MIXED)]
        with untouched(optimizer, f"{stock.__module__}.{stock.__qualname__}"):
            for run, pair in trials:
                fuse(pair.ours, rule)
                pair.compare(run, random)
    return rule


class _Pair:
    """Two optimizers like this one, of equal small copies of its parameters."""

    def __init__(
        self, optimizer: Optimizer, stock: type[Optimizer], run: Run, random: torch.Generator
    ) -> None:
        self._take = twin.step_of(stock)
        on_gpu = any(is_gpu(p.device) for group in optimizer.param_groups for p in group["params"])
        smalls = small_copies(optimizer, random, run.large, ODD, enlarged=on_gpu)
        if run.steps[0] == "mixed":
            for small in smalls:
                small.param.detach().copy_(_mixed(small.param, random))
        copies = [replace(small, param=_copied(small.param)) for small in smalls]
        for copied in copies:
            copied.entry = deep_copy(copied.entry, "the state")
        for small in (*smalls, *copies):
            _lay_out(small)
        self._pairs = list(zip(smalls, copies, strict=True))
        self.theirs = _copy_of(optimizer, stock, smalls)
        self.ours = _copy_of(optimizer, stock, copies)
        for one in (self.theirs, self.ours):
            enter_training(one)

    def compare(self, run: Run, random: torch.Generator) -> None:
        """Raises Untraceable where they differ."""
        smalls = [small for small, _ in self._pairs]
        for step, kind in enumerate(run.steps):
            given = list(gradients(smalls, kind, step, random))
            if kind == "mixed":
                given = [_mixed(local_of(small.param), random) for small in smalls]
            for (small, copied), grad in zip(self._pairs, given, strict=True):
                grad = None if grad is None else laid_out_as(small.of, grad)
                small.param.grad = None if grad is None else grad.clone()
                copied.param.grad = grad
            _seed(step)
            try:
                self._take(self.theirs)
            except Exception as error:
                if step == 0 and run.steps[0] == 1.0:
                    why = f"{type(error).__name__}: {error}"
                    raise Untraceable(
                        f"it raises {why} on small copies of the parameters"
                    ) from error
                return  # it takes no such gradients
            _seed(step)
            _take_traced(self.ours)
            self._look_at(f"after step {step + 1} of a trial, with gradients {kind},")

    def _look_at(self, what: str) -> None:
        ours, theirs = self.ours, self.theirs
        for small, copied in self._pairs:
            place = (
                difference("the parameter", *map(_data, (copied.param, small.param)))
                or difference("the gradient", *map(_gradient, (copied.param, small.param)))
                or difference("state", _entry(ours, copied.param), _entry(theirs, small.param))
            )
            if place is not None and guard("traced_bits"):
                raise Untraceable(f"{what} {place} of a small copy of {small.name} has other bits")
        for i, groups in enumerate(zip(ours.param_groups, theirs.param_groups, strict=True)):
            place = difference("", *map(twin.own_options, groups))
            if place is not None:
                raise Untraceable(f"{what} option {place} of group {i} differs")
        place = difference("", *map(twin.own_attributes, map(twin.attributes_of, (ours, theirs))))
        if place is not None:
            raise Untraceable(f"{what} the optimizer's attribute {place} differs")


def _lay_out(small: Small) -> None:
    """As the parameter that it is a copy of, with state tensors of its shape."""
    shape = small.param.shape
    entry = small.entry or {}
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.shape == shape and value.dim():
            entry[key] = laid_out_as(small.of, value)
    small.param = laid_out_as(small.of, small.param)


def _data(param: Tensor) -> Tensor:
    found: Tensor = local_of(param.detach())
    return found


def _gradient(param: Tensor) -> Tensor | None:
    grad: Tensor | None = local_of(param.grad)
    return grad


def _copied(param: Tensor) -> Tensor:
    return param.detach().clone().requires_grad_(param.requires_grad)


def _mixed(like: Tensor, random: torch.Generator) -> Tensor:
    """Normally distributed numbers and special ones."""
    shape = tuple(like.shape)
    plain = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    which = torch.randint(2 * len(SPECIAL), shape, generator=random, device="cpu")
    special = torch.tensor((*SPECIAL, *SPECIAL), device="cpu")[which]
    return torch.where(which < len(SPECIAL), special, plain).to(like.device, like.dtype)


def _take_traced(ours: Optimizer) -> None:
    traced: Traced = ours.__dict__[LINK].traced
    try:
        ours.step()
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(f"the trial of its program failed: {error}") from error
    if traced.why_not is not None:
        kind, why = traced.why_not
        raise kind(why)


def _seed(step: int) -> None:
    python_random.seed(step)
    torch.default_generator.manual_seed(step)


def _copy_of(optimizer: Optimizer, stock: type[Optimizer], smalls: list[Small]) -> Optimizer:
    """An optimizer like this one, with all these parameters."""
    indices = sorted({small.group for small in smalls})
    options = [with_a_rate(twin.options_of(optimizer.param_groups[i])) for i in indices]
    attributes, groups = deep_copy((twin.attributes_of(optimizer), options), SETTINGS)
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for index, group in zip(indices, groups, strict=True):
        group["params"] = [small.param for small in smalls if small.group == index]
    for small in smalls:
        if small.entry is not None:
            state[small.param] = small.entry
    whole = stock.__new__(stock)
    twin.install(whole, attributes, groups, state)
    return whole


def _entry(optimizer: Optimizer, param: Tensor) -> Any:
    entry: Entry = optimizer.__dict__["state"].get(param) or {}
    return {key: local_of(value) for key, value in entry.items()}
