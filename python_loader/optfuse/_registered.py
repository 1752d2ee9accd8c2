# SPDX-License-Identifier: BSD-3-Clause
"""register(): optimizer classes whose step() may be run on one parameter after the other."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from optfuse._arguments.check import FLAG, OPTIMIZER_CLASS, checked
from optfuse._class_code import step_of
from optfuse._library.bindings import Error

_registered: set[type[Optimizer]] = set()


@checked(cls=OPTIMIZER_CLASS, per_parameter=FLAG)
def register(cls: type[Optimizer], per_parameter: bool = True) -> None:
    """Has backward fusion run this class's own step() on one parameter at a time.

    cls: a torch.optim.Optimizer subclass without kernels; those derived from it, or from which
        it is derived, are registered for themselves.
    per_parameter: your guarantee that step() treats each parameter by itself: where only one has a
        gradient, it does to that one what it would do if others had theirs, too, and changes
        nothing but that one and its state, optimizer.state[param]. False takes it back.

    Without it the class's operators are recorded (docs/any-optimizer.md), in backward mode, too,
    unless step() needs a number of a gradient, keeps one, or calls kernels of its own. Such a
    class may be registered, if that holds: in backward mode step() then runs whenever a
    parameter's gradient is complete, on the optimizer as it is, and finds .grad to be None of all
    others; the gradient is freed. In step() it runs once more, if gradients are left.

    Options, attributes and the state of others are compared around each of these calls, and
    optfuse.Error is raised if one of them has changed. That the result does not depend on
    others is not tried. In forward mode this changes nothing.
    """
    if not per_parameter:
        _registered.discard(cls)
        return
    if _needs_closure(cls):
        raise Error(
            f"optfuse: can't register {cls.__name__}: its step() needs a closure, so it evaluates "
            "the loss itself and needs all gradients at once. Leave register() out"
        )
    _registered.add(cls)


def is_registered(cls: type[Optimizer]) -> bool:
    return cls in _registered


def _needs_closure(cls: type[Optimizer]) -> bool:
    parameters = list(inspect.signature(step_of(cls)).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)
