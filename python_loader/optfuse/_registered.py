# SPDX-License-Identifier: BSD-3-Clause
"""register(): optimizer classes whose step() may be run on one parameter after the other."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

from optfuse._arguments.check import FLAG, OPTIMIZER_CLASS, checked, one_of, optional
from optfuse._class_code import step_of
from optfuse._library.bindings import Error

COUNTER = "counter"
_registered: dict[type[Optimizer], str | None] = {}  # and who answers its draws


@checked(cls=OPTIMIZER_CLASS, per_parameter=FLAG, random=optional(one_of(COUNTER)))
def register(
    cls: type[Optimizer], per_parameter: bool = True, *, random: str | None = None
) -> None:
    """Has backward fusion run this class's own step() on one parameter at a time.

    cls: a torch.optim.Optimizer subclass without kernels; those derived from it, or from which
        it is derived, are registered for themselves.
    per_parameter: your guarantee that step() treats each parameter by itself: where only one has a
        gradient, it does to that one what it would do if others had theirs, too, and changes
        nothing but that one and its state, optimizer.state[param]. With Backward(final=True) the
        groups have no other parameter meanwhile, so it may not ask for a place in them, as
        bitsandbytes does for its overrides. False takes it back.
    random: "counter": step() draws random numbers, as classes do that round stochastically, and
        randint(), randint_like(), rand() and rand_like() are answered by a counter, whatever
        generator they name: by the words of optfuse.random_bits(seed, step, parameter, stream,
        shape, torch.float16), where seed is the option "random_seed" of the group (0), step the
        count of this parameter's updates, parameter its number in state_dict(), and stream the
        number of the draw in this update. An integer is low + word * (high - low) / 2^32, rounded
        down; a fraction has the first bits of the word. So the class's own numbers are given up,
        and results depend on no order, thread or mode: step() runs on one parameter at a time in
        forward mode, too. Any other draw raises. None: PyTorch's generators answer: in forward
        mode with stock's bits; in backward mode such a class is left to step().

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
        _registered.pop(cls, None)
        return
    if _needs_closure(cls):
        raise Error(
            f"optfuse: can't register {cls.__name__}: its step() needs a closure, so it evaluates "
            "the loss itself and needs all gradients at once. Leave register() out"
        )
    _registered[cls] = random


def has_counted_draws(cls: type[Optimizer]) -> bool:
    return _registered.get(cls) == COUNTER


def is_registered(cls: type[Optimizer]) -> bool:
    return cls in _registered


def _needs_closure(cls: type[Optimizer]) -> bool:
    parameters = list(inspect.signature(step_of(cls)).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)
