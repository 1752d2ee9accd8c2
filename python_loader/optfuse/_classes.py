# SPDX-License-Identifier: BSD-3-Clause
"""One real subclass for each stock class: a fused optimizer is still an
instance of its class, has its name, and pickles as the stock class."""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import Optimizer

from optfuse import _stock_trial
from optfuse._check import parameters_of
from optfuse._native import BACKWARD, Error, lib, lib_with_gil
from optfuse._observed import ZERO_GRAD, addresses_are_noted, has_hooks, is_watched
from optfuse._own import running
from optfuse._refuse import check_group
from optfuse._register import check_promise

if TYPE_CHECKING:
    from optfuse._link import Link
    from optfuse._rules import Rule

LINK = "_optfuse_link"  # the optimizer's attribute that holds its Link


def link_of(optimizer: Optimizer) -> Link:
    return optimizer.__dict__[LINK]  # type: ignore[no-any-return]


def _step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Creates this step's updates; they are launched by the schedule."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    link = link_of(self)
    if link.max_grad_norm is not None:
        from optfuse._clip import clip

        clip(parameters_of(self), link.max_grad_norm)
    link.step(self)
    return loss


def _watched_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    loss = _step(self, closure)
    if addresses_are_noted():
        link_of(self).flush()
    return loss


def _make_step() -> Callable[..., Any]:
    """step() as every optimizer has it, for those who watch it and for dynamo, and a shorter
    way for others. What a closure does comes too late for the choice."""
    watched = torch._dynamo.disable(Optimizer.profile_hook_step(_watched_step))

    @functools.wraps(_step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        traced = get_eval_frame_callback() is not None
        if args or kwargs or traced or is_watched() or has_hooks(self):
            return watched(self, *args, **kwargs)
        return _step(self)

    step = torch._dynamo.disable(step, recursive=False)
    step.hooked = True  # type: ignore[attr-defined]
    return step


def _may_zero_here(link: Link, set_to_none: bool) -> bool:
    """Whether stock's zero_grad() would only let go of gradients, seen by nobody."""
    if get_eval_frame_callback() is not None or not set_to_none or not link.plain:
        return False
    return ZERO_GRAD is not None and link.stock.zero_grad is ZERO_GRAD and not is_watched()


class _Fused:
    """What a fused optimizer does differently; the rest is the stock class."""

    step = _make_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        optimizer: Any = self
        link = link_of(optimizer)
        if link.mode == BACKWARD and lib.of_shim_unconfirmed(link.plan):
            raise Error(
                "optfuse: zero_grad() before step(): backward fusion has already applied the "
                "gradients that this would discard. Call step() after each backward; run passes "
                "that only add to the gradients, or whose gradients are thrown away, inside "
                "`with optfuse.accumulate(optimizer):`; or use "
                'optfuse.fuse(optimizer, mode="forward")'
            )
        if link.mode == BACKWARD:
            link.sync_params(optimizer)
            link.passes.restart()
        if _may_zero_here(link, set_to_none) and (
            link.mode == BACKWARD or link.known.have_same_params(optimizer.param_groups)
        ):
            lib_with_gil.of_shim_drop_gradients(link.plan)
        else:
            link.stock.zero_grad(optimizer, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        optimizer: Any = self
        link_of(optimizer).stock.add_param_group(optimizer, param_group)
        try:
            link = link_of(optimizer)
            groups = optimizer.param_groups
            check_group(link.rule, groups[-1], len(groups) - 1, strict=False)
            _try_group(link.rule, link.stock, groups[-1])
            if link.own is not None:
                link.own.promise = check_promise(optimizer, link.stock)
            link.rebuild(optimizer, groups[-1]["params"])
        except BaseException:
            optimizer.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = {name: self.__dict__[name] for name in ("state", "param_groups")}
        link = link_of(self)  # type: ignore[arg-type]
        link.stock.load_state_dict(self, state_dict)  # type: ignore[arg-type]
        if link.rule.as_made and link.rule.counts_on_gpu:
            _look_at_counters(self, link, before)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        stock = link_of(self).stock  # type: ignore[arg-type]
        return copyreg._reconstructor, (stock, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        from optfuse._fuse import fuse_like

        link = link_of(self)  # type: ignore[arg-type]
        twin = link.stock.__new__(link.stock)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[attr-defined]
        return fuse_like(twin, link, [copy.deepcopy(p, memo) for p in link.eager])


def _try_group(rule: Rule, stock: type[Optimizer], group: dict[str, Any]) -> None:
    """A group is added to others that the class's own step() need not update."""
    from optfuse._fuse import try_with_stock
    from optfuse._rules import OWN, why_not_tried

    if rule is OWN:
        return
    try_with_stock(stock, [group])
    why = why_not_tried(rule, stock, [group], {})
    if why:
        raise Error(
            "optfuse: the others of this optimizer's parameters are updated by "
            f"{rule.updates_by()}, but those of the new group can't be, because {why[0]}; unfuse "
            "the optimizer, and fuse it again with all groups"
        )


def _look_at_counters(optimizer: Optimizer, link: Link, before: dict[str, Any]) -> None:
    """A checkpoint may bring them to the CPU, or in another dtype. PyTorch then computes
    otherwise, and the class's own step() does that. before: loading it."""
    from optfuse._fuse import fuse_again

    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.__dict__["state"]
    if not _stock_trial.other_counters(params, state, link.rule.numbers_on_gpu()):
        return
    if link.mode == BACKWARD and lib.of_shim_unconfirmed(link.plan):
        optimizer.__dict__.update(before)
        raise Error(
            "optfuse: load_state_dict() between backward() and step(): backward fusion has "
            "already updated, and what was to be loaded needs the class's own step() from here "
            "on. Nothing was loaded; load it before backward() or after step()"
        )
    fuse_again(optimizer)


class _FusedOwn(_Fused):
    """What the class's own step() puts into the state is not known beforehand, so
    whoever asks for the state finds nothing pending."""

    @property
    def state(self) -> Any:
        link = self.__dict__.get(LINK)
        if link is not None and lib.of_any_pending() and not running():
            link.flush()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state


@functools.cache
def fused_class(stock: type[Optimizer], by_host: bool = False) -> type[Optimizer]:
    """The subclass that a fused optimizer of this class becomes."""

    def make_stock(_: type[Optimizer], *args: Any, **kwargs: Any) -> Optimizer:
        """type(optimizer)(...) makes another one, which nobody has fused."""
        return stock(*args, **kwargs)

    names = {
        **_methods(_FusedOwn if by_host else _Fused),
        "__new__": make_stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock)(stock.__name__, (stock,), names)


def _methods(cls: type) -> dict[str, Any]:
    """Its own and those that it inherits. A class with two bases could not take the place
    of one whose first base has no attributes, such as ABC."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= {k: v for k, v in vars(base).items() if k not in ("__dict__", "__weakref__")}
    return found
