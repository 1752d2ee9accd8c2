# SPDX-License-Identifier: BSD-3-Clause
"""register(): optimizer classes without kernels whose step() may be run on one
parameter after the other, and the check that it may."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from optfuse._check import FLAG, OPTIMIZER_CLASS, checked
from optfuse._native import Error
from optfuse._own import Group, step_of
from optfuse._trial import Trial, name_of

_registered: set[type[Optimizer]] = set()
_known: dict[tuple[Any, ...], bool] = {}  # what was checked -> whether it replaces state

# The classes of torch.optim that step a parameter without looking at others.
_OF_TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD",
)
INDEPENDENT = {getattr(torch.optim, name) for name in _OF_TORCH if hasattr(torch.optim, name)}


@checked(cls=OPTIMIZER_CLASS, per_parameter=FLAG)
def register(cls: type[Optimizer], per_parameter: bool = True) -> None:
    """Lets fuse() take optimizers of this class, for which optfuse has no kernels.

    cls: a torch.optim.Optimizer subclass; those derived from it, or from which
        it is derived, are registered for themselves.
    per_parameter: your promise that step() treats each parameter by itself: what
        it does to one depends on that one's gradient and state, on the options of
        its group and on attributes of the optimizer that step() doesn't change.
        False takes the registration back.

    The update is the class's own step(), run on one parameter when fuse()'s mode
    says so. fuse() first tries the promise on small copies of the parameters,
    with this optimizer's options: three steps on all of them must give the bits
    of three steps on one after the other. It raises optfuse.Error, with the
    parameter and what differed, if they don't; and for a class whose step()
    needs a closure.
    """
    if not per_parameter:
        _registered.discard(cls)
        return
    if _needs_closure(cls):
        raise Error(
            f"optfuse: can't register {name_of(cls)}: its step() needs a closure, so it evaluates "
            "the loss itself and needs all gradients at once. Use the optimizer as it is"
        )
    _registered.add(cls)


def is_registered(cls: type[Optimizer]) -> bool:
    return cls in _registered


def _needs_closure(cls: type[Optimizer]) -> bool:
    parameters = list(inspect.signature(step_of(cls)).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)


def why_not_independent(stock: type[Optimizer], group: Group) -> str | None:
    """What is known without a trial."""
    if stock is getattr(torch.optim, "Adafactor", None) and group["eps"][0] is None:
        dtypes = {param.dtype for param in group["params"]}
        if len(dtypes) > 1:
            return (
                "with eps=(None, ...) Adafactor takes the epsilon of the first parameter's dtype "
                "for the whole group, and here the dtypes differ; make a group for each dtype"
            )
    return None


def check_promise(optimizer: Optimizer, stock: type[Optimizer]) -> bool:
    """Whether the class puts new tensors into its state at each step. Raises
    optfuse.Error if its step() does not treat parameters independently."""
    for index, group in enumerate(optimizer.param_groups):
        reason = why_not_independent(stock, group)
        if reason is not None:
            raise Error(f"optfuse: can't fuse {name_of(stock)}, group {index}: {reason}")
    if stock in INDEPENDENT:
        return False
    key = (stock, repr([_kind(group) for group in optimizer.param_groups]))
    if key not in _known:
        _known[key] = Trial(optimizer, stock).run()
    return _known[key]


def _kind(group: Group) -> list[Any]:
    options = sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "param_names"))
    return [options, [(p.dim(), str(p.dtype), str(p.device)) for p in group["params"]]]
