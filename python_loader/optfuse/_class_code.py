# SPDX-License-Identifier: BSD-3-Clause
"""The step() of an optimizer's class."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer

_HOOKED = Optimizer.profile_hook_step(lambda _: None).__code__
WRAPPED = "_wrapped_by_lr_sched"  # an attribute of what a scheduler puts into an optimizer
_METHODS = ("step", "step_parameter", "step_param")


def step_of(stock: type[Optimizer]) -> Callable[..., Any]:
    """The class's own step() without the profiler's and the hooks' wrapper, but with a script's, to
    which functools.wraps() gives the attributes of that one."""
    step: Any = stock.step
    is_hooked = getattr(step, "__code__", None) is _HOOKED
    return step.__wrapped__ if is_hooked else step  # type: ignore[no-any-return]


@contextlib.contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Those of step() run around that of the optimizer, and not around one that it calls."""
    own = optimizer.__dict__
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    hooks = {name: own[name] for name in names if own.get(name)}
    own.update((name, OrderedDict()) for name in hooks)
    try:
        yield
    finally:
        own.update(hooks)


def patched(optimizer: Optimizer) -> dict[str, Callable[..., Any]]:
    """The methods that somebody has put into this object in the place of its class's, as trainers
    do: it is another kind of optimizer then. A scheduler's wrapper that counts calls is none."""
    own = optimizer.__dict__
    found = {name: own[name] for name in _METHODS if name in own}
    step = found.get("step")
    if getattr(step, WRAPPED, False):
        function = getattr(step, "__wrapped__", type(optimizer).step)
        if function is type(optimizer).step:
            del found["step"]
        else:  # the scheduler has wrapped what was there
            found["step"] = function.__get__(optimizer)
    return found


def counts_calls(optimizer: Optimizer) -> bool:
    """Whether a scheduler has its wrapper there."""
    return getattr(optimizer.__dict__.get("step"), WRAPPED, False)


class Own:
    """A fused optimizer as it is by itself: its class, and methods that the object was given."""

    def __init__(
        self,
        stock: type[Optimizer],
        methods: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        self.stock = stock
        self.has_run = False  # its step(), of one parameter
        self._methods = methods

    def method(self, name: str) -> Callable[..., Any] | None:
        """A function of the optimizer and the method's arguments; None: it has none."""
        patched = self._methods.get(name)
        if patched is None:
            return getattr(self.stock, name, None)
        return lambda _, *args, **kwargs: patched(*args, **kwargs)

    @contextlib.contextmanager
    def seen(self, optimizer: Optimizer) -> Iterator[None]:
        """Its code sees it as it is by itself, and its wrapper, if it has methods of that."""
        fused = optimizer.__class__
        wrappers = {id(its): its for m in self._methods.values() if (its := _owner(m)) is not None}
        holders = [one.__dict__ for one in {id(optimizer): optimizer, **wrappers}.values()]
        before = [{k: own[k] for k in self._methods if k in own} for own in holders]
        optimizer.__class__ = self.stock
        for own in holders if self._methods else ():
            own.update(self._methods)
        try:
            yield
        finally:
            for own, its in zip(holders, before, strict=True):
                for name in self._methods:
                    own.pop(name, None)
                own.update(its)
            optimizer.__class__ = fused


def _owner(method: Any) -> Any:
    """The object that it is bound to."""
    return getattr(method, "__self__", None)
