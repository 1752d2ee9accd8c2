# SPDX-License-Identifier: BSD-3-Clause
"""register(): optimizer classes without kernels whose step() may be run on one
parameter after the other, and the check that it may."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import FLAG, OPTIMIZER_CLASS, checked
from optfuse._library.bindings import Error
from optfuse._own_step.looks import why_looked_at
from optfuse._own_step.settings import Promise
from optfuse._own_step.trial import name_of, try_promise
from optfuse._own_step.twin import HIDDEN, Group, attributes_of, own_options, step_of
from optfuse._rules import RULES

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_registered: dict[type[Optimizer], bool] = {}  # whether for subclasses of Tensor, too
_known: dict[tuple[type[Optimizer], str], Promise] = {}  # what was tried -> what was found

# The classes of torch.optim that step a parameter without looking at others.
INDEPENDENT = {cls for cls in RULES if cls.__module__.startswith("torch.optim")}


@checked(cls=OPTIMIZER_CLASS, per_parameter=FLAG, subclasses=FLAG)
def register(cls: type[Optimizer], per_parameter: bool = True, *, subclasses: bool = False) -> None:
    """Lets fuse() take optimizers of this class, for which optfuse has no kernels.

    cls: a torch.optim.Optimizer subclass; those derived from it, or from which
        it is derived, are registered for themselves.
    per_parameter: your promise that step() treats each parameter by itself: what
        it does to one depends on that one's gradient and state, on the options of
        its group and on attributes of the optimizer. Options and attributes may
        change with a step, as counters do, if the change depends on no parameter.
        This holds from the first step on: a class whose first steps are of all parameters
        of a group together is refused.
        False takes the registration back.
    subclasses: your promise that step() does to parameters of a subclass of Tensor or Parameter
        what it does to others. Without it fuse() refuses them.

    The update is the class's own step(), run on one parameter when fuse()'s mode
    says so. fuse() first tries the promise on small copies of the parameters, with
    this optimizer's options: steps on all of them must give the bits of steps on one
    after the other, with gradients that are plain, missing, zero, tiny, huge, infinite
    and NaN. It raises optfuse.Error, with the parameter and what differed, if they
    don't, and for a class whose step() needs a closure.

    The trial finds coupling of parameters in every k-th step for k up to 20, coupling
    of those above a size of up to 16,384 elements, and coupling above a threshold of
    gradients up to 1e30. It does not find what comes later or at larger sizes, what
    only values of training bring about, and what depends on the time, on files or on
    global variables.
    """
    if not per_parameter:
        _registered.pop(cls, None)
        return
    if _needs_closure(cls):
        raise Error(
            f"optfuse: can't register {name_of(cls)}: its step() needs a closure, so it evaluates "
            "the loss itself and needs all gradients at once. Use the optimizer as it is"
        )
    _registered[cls] = subclasses


def is_registered(cls: type[Optimizer]) -> bool:
    return cls in _registered


def _needs_closure(cls: type[Optimizer]) -> bool:
    parameters = list(inspect.signature(step_of(cls)).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)


def why_not_independent(stock: type[Optimizer], group: Group) -> str | None:
    """The reason that is known without a trial; None: there is none."""
    if stock is getattr(torch.optim, "Adafactor", None) and group["eps"][0] is None:
        dtypes = {param.dtype for param in group["params"]}
        if len(dtypes) > 1:
            return (
                "with eps=(None, ...) Adafactor takes the epsilon of the first parameter's dtype "
                "for the whole group, and here the dtypes differ; make a group for each dtype"
            )
    return None


def check_promise(optimizer: Optimizer, stock: type[Optimizer]) -> Promise:
    """The changes that the class's step() makes beside updating parameters. Raises optfuse.Error if
    it does not treat them independently."""
    for index, group in enumerate(optimizer.param_groups):
        reason = why_not_independent(stock, group)
        if reason is not None:
            raise Error(f"optfuse: can't fuse {name_of(stock)}, group {index}: {reason}")
    if stock in INDEPENDENT:
        return Promise()
    for name in ("param_groups", "state"):
        if name not in optimizer.__dict__:
            raise Error(
                f"optfuse: can't fuse {name_of(stock)}: {name} is not an attribute of its own, so "
                "it belongs to something else, which a copy for a trial would share. Use the "
                "optimizer as it is"
            )
    why = why_looked_at(optimizer, stock, _registered.get(stock, False))
    if why is not None:
        raise Error(f"optfuse: can't fuse {name_of(stock)}: {why}. Use the optimizer as it is")
    kind = _kind(optimizer)
    if kind is None:
        return try_promise(optimizer, stock)
    if (stock, kind) not in _known:
        _known[stock, kind] = try_promise(optimizer, stock)
    return _known[stock, kind]


def _kind(optimizer: Optimizer) -> str | None:
    """The properties that matter to a trial; None: they can't be compared with another one's."""
    attributes = [(k, v) for k, v in attributes_of(optimizer).items() if k not in HIDDEN]
    groups = [
        (own_options(group), [(tuple(p.shape), p.dtype, p.device) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.__dict__["state"]
    entries = [state.get(param) for param in params]
    parts = [*_plain((attributes, groups)), *_plain(entries if any(entries) else (), True)]
    return None if None in parts else repr(parts)


def _plain(value: Any, is_state: bool = False) -> Iterator[str | None]:
    """A value's appearance; None where appearance does not tell all. State tensors without
    dimensions are counters; the numbers in others make no difference."""
    if type(value) in (list, tuple):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _plain(item, is_state)
    elif type(value) in (dict, OrderedDict):
        yield from _plain(list(value.items()), is_state)
    elif isinstance(value, Tensor):
        shape = f"{tuple(value.shape)} {value.dtype}"
        is_told = is_state or value.numel() == 1
        yield (f"{shape} {value.tolist() if value.numel() == 1 else ''}") if is_told else None
    else:
        yield repr(value) if type(value) in _PLAIN else None
