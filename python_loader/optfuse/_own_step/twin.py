# SPDX-License-Identifier: BSD-3-Clause
"""The class's own step() on a twin of an optimizer, which has other parameters than that
one: a single one of them, small copies, or one that stands for all where none has a
gradient."""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from optfuse._options import LINK

Group = dict[str, Any]
Entry = dict[str, Any]

_HOOKS = tuple(
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)
_HOOKED = Optimizer.profile_hook_step(lambda _: None).__code__
# Attributes that PyTorch writes in step() for itself: in wrappers, and a check that its fused
# implementations need to make once.
COUNTERS = (
    "_warned_capturable_if_run_uncaptured",
    "_opt_called",
    "_step_count",
    "_need_device_dtype_check_for_fused",
)
# Attributes of an optimizer that its twin has of its own, or not at all.
HIDDEN = frozenset(("param_groups", "state", "step", LINK, "_step_supports_amp_scaling", *_HOOKS))
# Among attributes: what the state holds under other keys than parameters, such as a counter.
SHARED = "state of no parameter"
_TENSORS = {Tensor, Parameter}
NOT_OPTIONS = ("params", "param_names")
CONSTANT = (bool, int, float, complex, str, bytes, type(None))
_CONSTANT = frozenset(CONSTANT)


@dataclass(frozen=True)
class OwnMethod:
    """In an attribute's place: a method of the optimizer that has the attribute. A twin has its
    own."""

    function: Callable[..., Any]


def step_of(stock: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's own step() without the profiler's and the hooks' wrapper, but with a script's, to
    which functools.wraps() gives the attributes of that one."""
    step: Any = stock.step
    is_hooked = getattr(step, "__code__", None) is _HOOKED
    return step.__wrapped__ if is_hooked else step  # type: ignore[no-any-return]


def copied(value: Any) -> Any:
    """An option as it is now; numbers and the like can't change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple and _CONSTANT.issuperset(map(type, value)):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return value


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that a twin shares with the optimizer: all but parameters, state and hooks."""
    own = unbound({k: v for k, v in optimizer.__dict__.items() if k not in HIDDEN}, optimizer)
    return {**own, **shared_state(optimizer), **{name: OrderedDict() for name in _HOOKS}}


def unbound(attributes: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    methods = {k: v for k, v in attributes.items() if is_method_of(v, optimizer)}
    return {**attributes, **{k: OwnMethod(v.__func__) for k, v in methods.items()}}


def is_method_of(value: Any, optimizer: Optimizer) -> bool:
    return isinstance(value, types.MethodType) and value.__self__ is optimizer


def shared_state(optimizer: Optimizer) -> dict[str, Any]:
    """The items of the state that belong to no parameter, as one attribute; none if there are
    none."""
    state = optimizer.__dict__["state"]
    if _TENSORS.issuperset(map(type, state)):
        return {}
    found = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    return {SHARED: found} if found else {}


def put_shared_state(optimizer: Optimizer, found: dict[Any, Any]) -> None:
    """Puts what a step has made of them in their place. New ones come first: step() makes them
    before its loop."""
    state = optimizer.__dict__["state"]
    for key in [key for key in state if not isinstance(key, Tensor) and key not in found]:
        del state[key]
    if found.keys() <= state.keys():
        state.update(found)
        return
    items = {**found, **{key: value for key, value in state.items() if key not in found}}
    state.clear()
    state.update(items)


def install(
    optimizer: Optimizer, attributes: dict[str, Any], groups: list[Group], state: Any
) -> None:
    """Gives an optimizer its attributes, as attributes_of() has them, and all else."""
    own = {k: v for k, v in attributes.items() if type(v) is OwnMethod}
    bound = {k: types.MethodType(v.function, optimizer) for k, v in own.items()}
    optimizer.__dict__ = {**attributes, **bound, "param_groups": groups, "state": state}
    state.update(optimizer.__dict__.pop(SHARED, ()))


def options_of(group: Group) -> Group:
    return {
        k: v if type(v) in CONSTANT else copied(v) for k, v in group.items() if k not in NOT_OPTIONS
    }


def options_alone(group: Group, is_whole: bool) -> Group:
    """The options for a step() on one parameter that goes the way of one on the group: where
    the class may choose, one that has no multi-tensor functions is enough for it to do
    without. is_whole: gradients are still to come."""
    options = options_of(group)
    chooses = "foreach" in group and group["foreach"] is None and group.get("fused") is None
    if chooses and _differ(group["params"]):
        takes_part = operator.attrgetter("requires_grad") if is_whole else _has_gradient
        if _differ(list(filter(takes_part, group["params"]))):
            options["foreach"] = False
    return options


def _has_gradient(param: Tensor) -> bool:
    return param.grad is not None


def _differ(params: list[Tensor]) -> bool:
    """In whether they have multi-tensor functions."""
    kinds = {(type(p), p.device.type): p for p in params}
    if len(kinds) < 2:
        return False
    choices = {_default_to_fused_or_foreach([p], differentiable=False) for p in kinds.values()}
    return len(choices) > 1


def own_attributes(values: dict[str, Any]) -> dict[str, Any]:
    """The attributes that belong to the class."""
    return {k: v for k, v in values.items() if k not in HIDDEN and k not in COUNTERS}


def own_options(group: Group) -> Group:
    return {k: v for k, v in group.items() if k not in NOT_OPTIONS}


class Twin:
    """An optimizer of a class that has only what each step is given."""

    def __init__(self, stock: type[Optimizer]) -> None:
        self._step = step_of(stock)
        self._optimizer = stock.__new__(stock)

    def step(
        self, attributes: dict[str, Any], groups: list[Group], state: defaultdict[Tensor, Entry]
    ) -> dict[str, Any]:
        """The attributes that there are after the class's step(). Options are changed where
        they are."""
        optimizer = self._optimizer
        install(optimizer, attributes, groups, state)
        try:
            self._step(optimizer)
            after = unbound(optimizer.__dict__, optimizer)
            shared = shared_state(optimizer)
            after.update(shared)
            for key in shared.get(SHARED, ()):
                del after["state"][key]
            return after
        finally:
            optimizer.__dict__ = {}

    def step_alone(
        self, attributes: dict[str, Any], options: Group, param: Tensor, entry: Entry | None
    ) -> tuple[Entry | None, dict[str, Any], Group]:
        """A step() of one parameter; its state entry, the attributes and the options afterwards."""
        state: defaultdict[Tensor, Entry] = defaultdict(dict)
        if entry is not None:
            state[param] = entry
        group = {**options, "params": [param]}
        after = self.step(attributes, [group], state)
        return state.get(param), after, group


def without_gradient(params: list[Tensor]) -> list[Tensor]:
    """A placeholder for a group's parameters where none of them has a gradient."""
    first = params[:1]
    shapes = [tuple(min(n, 8) for n in param.shape) for param in first]
    return [
        torch.zeros(shape, dtype=param.dtype, device=param.device, requires_grad=True)
        for param, shape in zip(first, shapes, strict=True)
    ]
