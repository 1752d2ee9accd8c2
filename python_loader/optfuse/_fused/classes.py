# SPDX-License-Identifier: BSD-3-Clause
"""One real subclass for each stock class: a fused optimizer is still an
instance of its class, has its name, and pickles as the stock class."""

from __future__ import annotations

import copy
import copyreg
import functools
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._arguments.wrappers import unwrapped
from optfuse._class_code import counts_calls, patched
from optfuse._fused import final, methods
from optfuse._fused.recorded import record
from optfuse._fused.refuse import check_group, check_params
from optfuse._fused.scheduler import rewrap
from optfuse._gpu import is_gpu
from optfuse._library.bindings import BACKWARD, FINAL, FORWARD, Error, guard
from optfuse._link import Link, link_of
from optfuse._options import DELAYED, LINK, MADE, Options, is_fused
from optfuse._patches import raw_memory
from optfuse._rules import AnyRule, Group, RecordedRule, RegisteredRule, Rule
from optfuse._trials.rule_choice import other_counters, rule_of, try_with_stock, why_not_tried

_AMP = "_step_supports_amp_scaling"
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class _Fused:
    """The methods of a fused optimizer that differ; the rest is the stock class. Lightning's
    wrapper is an instance of it, too, and has none of its attributes."""

    step = methods.step
    zero_grad = methods.zero_grad
    step_parameter = final.step_parameter
    step_param = final.step_param
    supports_fused_back_pass = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        optimizer: Any = unwrapped(self)  # type: ignore[type-var]
        link_of(optimizer).stock.add_param_group(optimizer, param_group)
        try:
            link = link_of(optimizer)
            groups = optimizer.param_groups
            check_params(groups[-1:], first=len(groups) - 1)
            check_group(link.rule, groups[-1], len(groups) - 1, strict=False)
            _try_group(link.rule, link.stock, groups[-1])
            link.rebuild(optimizer, groups[-1]["params"])
        except BaseException:
            optimizer.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        optimizer: Any = unwrapped(self)  # type: ignore[type-var]
        link = link_of(optimizer)
        found: dict[str, Any] = link.stock.state_dict(optimizer)
        if link.delayed is not None:
            found[DELAYED] = link.delayed.state(optimizer)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer: Any = unwrapped(self)  # type: ignore[type-var]
        link = link_of(optimizer)
        _refuse_late_load(link)
        late = state_dict.get(DELAYED) if link.delayed is not None else None
        if link.delayed is not None:
            link.delayed.check(optimizer, late)
        link.stock.load_state_dict(optimizer, state_dict)
        if link.rule.as_made and link.rule.counts_on_gpu:
            _look_at_counters(optimizer, link)
        if not is_fused(optimizer):
            return
        delayed = link_of(optimizer).delayed
        if delayed is not None:
            delayed.load(late)
        link_of(optimizer).adopt_state(optimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self = unwrapped(self)  # type: ignore[type-var]
        if link_of(self).delayed is not None:  # type: ignore[arg-type]
            raise Error(
                "optfuse: an optimizer with delayed parameters can't be pickled, since the queue "
                "of their versions would be lost; save its state_dict(), or call "
                "optfuse.unfuse(optimizer) first"
            )
        stock = link_of(self).stock  # type: ignore[arg-type]
        return copyreg._reconstructor, (stock, object, None), _state_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self = unwrapped(self)  # type: ignore[type-var]
        link = link_of(self)  # type: ignore[arg-type]
        twin = link.stock.__new__(link.stock)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(_state_of(self), memo))
        eager = tuple(copy.deepcopy(p, memo) for p in link.options.eager)
        delays = copy.deepcopy(link.options.delays, memo)
        options = replace(link.options, eager=eager, reduction=None, delays=delays)
        fuse_by(_rule_of_copy(twin, link), twin, options)
        if not is_fused(twin):
            return twin
        if link.delayed is not None:
            link_of(twin).delayed.load(link.delayed.state(self))  # type: ignore[union-attr, arg-type]
        return twin


def _state_of(optimizer: Any) -> Any:
    """The attributes that a copy is made of. A class may give all of them away."""
    found = optimizer.__getstate__()
    if isinstance(found, dict) and LINK in found:
        return {k: v for k, v in found.items() if k not in (LINK, _AMP)}
    return found


def _rule_of_copy(twin: Optimizer, link: Link) -> Rule:
    """Options may have become others since the original was fused."""
    if isinstance(link.rule, (RecordedRule, RegisteredRule)):
        return link.rule
    try_with_stock(link.stock, twin.param_groups, _fuse_small)
    return rule_of(twin)


def _try_group(rule: Rule, stock: type[Optimizer], group: Group) -> None:
    """A group is added to others that the class's own step() need not update."""
    if isinstance(rule, AnyRule):
        return
    try_with_stock(stock, [group], _fuse_small)
    why = why_not_tried(rule, stock, [group], {})
    if why:
        raise Error(
            "optfuse: the other parameters of this optimizer are updated by the kernels, "
            f"but those of the new group can't be, because {why[0]}; unfuse the optimizer, and "
            "fuse it again with all groups"
        )


def _refuse_late_load(link: Link) -> None:
    """Stock's step() would update what is loaded."""
    if link.updater.is_unconfirmed() and guard("late_load"):
        raise Error(
            "optfuse: load_state_dict() between backward() and step(): backward fusion has "
            "already updated with the old state. Nothing was loaded; call load_state_dict() "
            'before backward() or after step(), or use optfuse.fuse(optimizer, mode="forward")'
        )


def _look_at_counters(optimizer: Optimizer, link: Link) -> None:
    """A checkpoint may bring counters to the CPU, or in another dtype. PyTorch then computes in
    another way, as the class's own step() does."""
    state = optimizer.__dict__["state"]
    if other_counters(parameters_of(optimizer), state, link.rule.numbers_on_gpu()):
        become_stock(optimizer)
        fuse_by(rule_of(optimizer), optimizer, link.options)


class _FusedRecorded(_Fused):
    """In backward mode the class's own step() runs, with its own arguments."""

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def step(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self
        link = link_of(optimizer)
        updater: Any = link.updater
        with link.alone:
            make = functools.partial(link.step, optimizer)
            return updater.called(optimizer, make, *args, **kwargs)

    step.hooked = True  # stock's step() runs the hooks; load_state_dict() would wrap this one, too

    def zero_grad(self, set_to_none: bool = True) -> None:
        optimizer: Any = unwrapped(self)  # type: ignore[type-var]
        link_of(optimizer).updater.give_up(optimizer)
        methods.zero_grad(optimizer, set_to_none)


class _FusedFinal(_Fused):
    step = final.step
    step.hooked = True  # type: ignore[attr-defined]


def _methods_for(rule: Rule, mode: int) -> type:
    if mode == FINAL:
        return _FusedFinal
    if isinstance(rule, RecordedRule) and mode == BACKWARD:
        return _FusedRecorded
    return _Fused


@functools.cache
def fused_class(stock: type[Optimizer], methods: type = _Fused) -> type[Optimizer]:
    """The subclass that a fused optimizer of this class becomes."""

    def make_stock(_: type[Optimizer], *args: Any, **kwargs: Any) -> Optimizer:
        """type(optimizer)(...) makes another one, which nobody has fused but for `python -m
        optfuse run`: it is an instance of this class then, and Python calls __init__() again."""
        made = stock(*args, **kwargs)
        if is_fused(made):
            made.__dict__[MADE] = True
        return made

    names = {
        **_methods(methods),
        "__new__": make_stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock)(stock.__name__, (stock,), names)


def _methods(cls: type) -> dict[str, Any]:
    """A class's own methods and those that it inherits. A class with two bases could not take the
    place of one whose first base has no attributes, such as ABC."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= {k: v for k, v in vars(base).items() if k not in ("__dict__", "__weakref__")}
    return found


def tried_rule(optimizer: Optimizer) -> Rule:
    """The rule by which an optimizer that is not fused has its class's bits on this machine, with
    this torch."""
    try_with_stock(type(optimizer), optimizer.param_groups, _fuse_small)
    return rule_of(optimizer)


def _fuse_small(small: Optimizer, rule: Rule) -> Optimizer:
    """For a trial."""
    return become_fused(small, Options(), rule)


def fuse_by(rule: Rule, optimizer: OptimizerT, options: Options) -> OptimizerT:
    """In the way of the rule."""
    if isinstance(rule, RecordedRule) and options.mode == FORWARD and not options.delays:
        return record(optimizer, options, rule.because)
    if isinstance(rule, (RecordedRule, RegisteredRule)):
        raw_memory.watch_recorded()
    return become_fused(optimizer, options, rule)


def become_fused(optimizer: OptimizerT, options: Options, rule: Rule) -> OptimizerT:
    stock = type(optimizer)
    methods = patched(optimizer)
    link = Link(optimizer, options, rule, methods)
    for name in methods:
        link.saved[name] = optimizer.__dict__[name]
        if name != "step" or not counts_calls(optimizer):
            del optimizer.__dict__[name]
    if options.delays:
        link.delayed = options.delays.begin(link, optimizer)
    optimizer.__dict__[LINK] = link
    optimizer.__class__ = fused_class(stock, _methods_for(rule, options.mode))  # type: ignore[assignment, arg-type]
    rewrap(optimizer)
    if options.mode == FINAL:
        final.keep(optimizer)
    # On the CPU GradScaler must skip steps by itself, and unscale before someone
    # clips: what is folded is folded in its own unscale_().
    if _AMP in optimizer.__dict__:
        link.saved[_AMP] = optimizer.__dict__[_AMP]
    optimizer.__dict__[_AMP] = _unscales(optimizer, options.mode)
    return optimizer


def become_stock(optimizer: Optimizer) -> None:
    """Launches what is pending first."""
    link = link_of(optimizer)
    link.updater.give_up(optimizer)
    link.close()
    final.let_go(optimizer)
    del optimizer.__dict__[LINK], optimizer.__dict__[_AMP]
    optimizer.__dict__.update(link.saved)
    optimizer.__class__ = link.stock
    if "step" not in link.saved:
        rewrap(optimizer)


def _unscales(optimizer: Optimizer, mode: int) -> bool:
    """Whether GradScaler may leave unscaling and skipping to the update, as it
    does with stock's fused=True: on GPUs, where the step counters are too. Not where step()
    clips, before the update: the norm is that of unscaled gradients."""
    link = link_of(optimizer)
    return (
        not isinstance(link.rule, AnyRule)
        and mode == FORWARD
        and link.max_grad_norm is None
        and all(
            group.get("fused") and all(is_gpu(p.device) for p in group["params"])
            for group in optimizer.param_groups
        )
    )
