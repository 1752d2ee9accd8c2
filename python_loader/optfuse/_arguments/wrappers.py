# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate's and Lightning's wrappers of an optimizer, which a script holds in its place. They
are told by their names: importing either package takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.optim import Optimizer

from optfuse._class_code import patched
from optfuse._options import LINK, RECORDED

P = ParamSpec("P")
T = TypeVar("T")
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_PACKAGES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
_OF_HOOKS = ("step_parameter", "step_param")
_LENT = "_optfuse_lent"  # an attribute of a wrapper whose methods are in its optimizer now
#: The attribute that holds the optimizer.
_INNER = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
}


def _inner(optimizer: Optimizer) -> Any:
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _INNER and cls.__module__.partition(".")[0] in _PACKAGES:
            return optimizer.__dict__.get(_INNER[cls.__name__])
    return None


def unwrapped(optimizer: OptimizerT) -> OptimizerT:
    """The optimizer itself, or the one in its wrappers."""
    if LINK in optimizer.__dict__:
        return optimizer
    while isinstance(inner := _inner(optimizer), Optimizer):
        optimizer = inner  # type: ignore[assignment]
    return optimizer


def _adapt(wrapper: Any) -> None:
    """After fuse() or unfuse() has changed the class of the optimizer inside."""
    inner = _inner(wrapper)
    if not isinstance(inner, Optimizer):
        return
    _adapt(inner)
    cls = type(wrapper)
    if cls.__name__ == "AcceleratedOptimizer":
        # It has kept the step() that it calls under a GradScaler, and takes the present one
        # when it is unpickled.
        wrapper.__setstate__({})
    else:  # Lightning's is a subclass of the optimizer's class
        bases = (cls.__bases__[0], type(inner))
        wrapper.__class__ = type(cls.__name__, bases, {"__module__": cls.__module__})


def _is_fused(optimizer: Any) -> bool:
    return LINK in optimizer.__dict__ or RECORDED in optimizer.__dict__


def _lend_methods(wrapper: Any, inner: Any) -> None:
    """Before fuse() or unfuse(): methods that trainers have put into a wrapper are those of the
    optimizer inside as long as that is fused."""
    if _is_fused(inner):  # the wrapper has ours
        for name in _OF_HOOKS:
            wrapper.__dict__.pop(name, None)
        return
    for name, method in patched(wrapper).items():
        del wrapper.__dict__[name]
        inner.__dict__[name] = method
        wrapper.__dict__[_LENT] = True


def _return_methods(wrapper: Any, inner: Any) -> None:
    """After it, also if it has failed."""
    if _is_fused(inner):
        for name in _OF_HOOKS:
            wrapper.__dict__[name] = getattr(inner, name)
    elif wrapper.__dict__.pop(_LENT, False):
        for name, method in patched(inner).items():
            del inner.__dict__[name]
            wrapper.__dict__[name] = method


def returns_the_wrapper(function: Callable[P, T]) -> Callable[P, T]:
    """Around a function that gets the optimizer inside, changes its class and returns it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given: Any = args[0] if args else kwargs.get("optimizer")
        inner = unwrapped(given) if isinstance(given, Optimizer) else given
        if inner is not given:
            _lend_methods(given, inner)
        try:
            made: Any = function(*args, **kwargs)
        finally:
            if inner is not given:
                _return_methods(given, inner)
        if given is not made:
            _adapt(given)
        return given  # type: ignore[no-any-return]

    return call
