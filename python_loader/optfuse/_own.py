# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels: the class's own step() runs on one parameter, on a
twin of the optimizer that has nothing but this parameter. Where the library has a
native update, it comes here for what is unusual, and for the first one, which makes
the state.

An update that waits uses the options and the state entry of its own step(). The
library calls apply() under the lock of the plan."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from optfuse._native import Error, lib

Group = dict[str, Any]
Entry = dict[str, Any]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Attributes of an optimizer that its twin has of its own, or not at all.
HIDDEN = ("param_groups", "state", "step", "_optfuse_link", "_step_supports_amp_scaling", *_HOOKS)
_NOT_OPTIONS = ("params", "param_names")

owns: dict[int, Own] = {}  # plan -> what its updates need, until it is freed
_thread = threading.local()
_late: list[int] = []  # plans of optimizers that died during an update


def running() -> bool:
    """Whether this thread is in the middle of an update, and holds its plan's lock."""
    return getattr(_thread, "depth", 0) > 0


def interrupted() -> BaseException | None:
    """What the last update that failed on this thread raised; once."""
    return _thread.__dict__.pop("error", None)


def free_plan(plan: int) -> None:
    """When the optimizer is gone. Its updates may take locks that this thread holds."""
    _late.append(plan)
    _free_late()


def _free_late() -> None:
    while _late and not running():
        late = _late.pop()
        lib.of_shim_plan_free(late)
        owns.pop(late, None)


def step_of(stock: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's step() without the profiler's and the hooks' wrapper."""
    step: Any = stock.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def copied(value: Any) -> Any:
    """An option as it is now; numbers and the like can't change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return value


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What a twin shares with the optimizer: all but parameters, state and hooks."""
    own = {k: v for k, v in optimizer.__dict__.items() if k not in HIDDEN}
    return {**own, **{name: OrderedDict() for name in _HOOKS}}


def options_of(group: Group) -> Group:
    return {k: copied(v) for k, v in group.items() if k not in _NOT_OPTIONS}


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


def step_alone(
    step: Callable[[Optimizer], Any],
    twin: Optimizer,
    attributes: dict[str, Any],
    options: Group,
    param: Tensor,
    entry: Entry | None,
) -> Entry | None:
    """The class's step() on one parameter; the state entry that it then has."""
    state: defaultdict[Tensor, Entry] = defaultdict(dict)
    if entry is not None:
        state[param] = entry
    groups = [{**options, "params": [param]}]
    twin.__dict__ = {**attributes, "param_groups": groups, "state": state}
    try:
        step(twin)
    finally:
        twin.__dict__ = {}
    return state.get(param)


class Own:
    """What the updates of one plan need. Knows neither the optimizer nor its
    parameters, so that it keeps none of them alive."""

    def __init__(
        self,
        plan: int,
        stock: type[Optimizer],
        replaces_state: bool,
        entries: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self._step = step_of(stock)
        self._twin = stock.__new__(stock)
        self._replaces_state = replaces_state
        self._native_entries = entries  # those that the library updates itself
        self._attributes: dict[str, Any] = {}
        self._options: list[Group] = []
        self._versions: list[list[Any]] = []
        self.layout([])
        owns[plan] = self

    def layout(self, groups: list[Group]) -> None:
        """The library was told of all parameters from the start."""
        self._group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        n = len(self._group_of)
        self._entries: list[Entry | None] = [None] * n
        self._stepped = [False] * n  # so that its state is made, if it has any
        self._replaced = [self._replaces_state] * n  # tensors of the state are exchanged
        self.changed = True  # the library must be told of state again

    def begin(self, optimizer: Optimizer, before_gradients: bool) -> None:
        """Takes over what updates from here on use. Nothing is pending now."""
        _free_late()
        self._attributes = attributes_of(optimizer)
        self._options = [options_alone(g, before_gradients) for g in optimizer.param_groups]
        self._versions = [_versions(group) for group in optimizer.param_groups]

    def late_change(self, groups: list[Group]) -> int | None:
        """The first group whose options are no longer those of begin()."""
        for i, (group, known) in enumerate(zip(groups, self._versions, strict=False)):
            if not _same(_versions(group), known):
                self._versions[i] = _versions(group)
                return i
        return None

    def take_state(self, slot: int, entry: Entry | None) -> list[Tensor | None]:
        """The state of a slot, as the library's set_state() wants it."""
        self._entries[slot] = entry
        values = list(entry.values()) if entry else []
        if entry and self._native_entries:
            names = next((n for n in self._native_entries if entry.keys() == set(n)), None)
            values = [None, *values] if names is None else [entry[name] for name in names]
        tensors: list[Tensor | None] = [v for v in values if isinstance(v, Tensor)]
        is_known = bool(values) or self._stepped[slot]
        if not is_known or self._replaced[slot] or len(tensors) < len(values):
            tensors.append(None)
        return tensors

    def run(self, slot: int, param: Tensor) -> Entry | None:
        """The update; a state entry that it made, or None."""
        entry = self._entries[slot]
        before = list(entry.values()) if entry else []
        options = self._options[self._group_of[slot]]
        made = step_alone(self._step, self._twin, self._attributes, options, param, entry)
        after = list(made.values()) if made else []
        if before and not _same(before, after):
            self.changed |= not self._replaced[slot]
            self._replaced[slot] = True
        self.changed |= not self._stepped[slot]
        self._stepped[slot] = True
        self._entries[slot] = made
        return made if made is not entry else None


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        map(lambda x, y: x is y or (not isinstance(x, Tensor) and _equal(x, y)), a, b)
    )


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # arrays and the like have no one answer
        return False


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _versions(group: Group) -> list[Any]:
    """What tells whether an option was changed; tensors are not looked at."""
    values: list[Any] = []
    for key, value in group.items():
        if key not in _NOT_OPTIONS:
            tensors = [(id(t), t._version) for t in _tensors(value)]
            values.append((key, tensors or copied(value)))
    return values


def apply(plan: int, slot: int, known: Tensor | None) -> Entry | None:
    """What the library's callback does. known: the slot's parameter; None if the
    optimizer is being taken down. Returns a state entry that was made."""
    own = owns.get(plan)
    if own is None:
        raise Error("optfuse: this optimizer no longer exists")
    param = torch.ops.optfuse.parameter_of(plan, slot) if known is None else known
    _thread.depth = getattr(_thread, "depth", 0) + 1
    _thread.error = None
    try:
        return own.run(slot, param)
    except BaseException as error:
        _thread.error = error
        raise
    finally:
        _thread.depth -= 1
