# SPDX-License-Identifier: BSD-3-Clause
"""Refuses what a class's step() could see of a parameter beside its data: a subclass, attributes,
hooks and the identity. Small copies and stand-ins have none of these, so that no trial tells
whether step() goes another way by them. Kernels look at nothing of it."""

from __future__ import annotations

import functools
import math
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._library.bindings import guard
from optfuse._own_step.code import codes_of, functions_reached, names_of
from optfuse._own_step.reach import reachable
from optfuse._own_step.twin import (
    attributes_of,
    own_attributes,
    own_options,
    step_of,
)

_PLAIN = (Tensor, Parameter)  # torch.nn.Buffer() makes a Tensor
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LISTS = (list, tuple, deque)
_HOLDS = (*_LISTS, dict, set, frozenset)
_ALL = {"__dict__", "vars", "dir"}  # names by which code sees all attributes
_ANY = _ALL | {"getattr", "items", "keys", "values"}  # attributes and options


def why_looked_at(optimizer: Optimizer, stock: type, subclasses: bool) -> str | None:
    """Names something of a parameter that step() may see. subclasses: those of Tensor are promised
    to make no difference."""
    if not guard("looks"):
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    functions = functions_reached(stock)
    return (
        (None if subclasses else _why_type(params))
        or _why_attributes(params, names_of(functions))
        or _why_identity(optimizer, params, functions)
        or _why_position(optimizer, params)
    )


def _why_type(params: list[Tensor]) -> str | None:
    for p in params:
        if type(p) not in _PLAIN and not is_dtensor(p):
            return (
                f"a parameter is of the class {type(p).__name__}, which its step() may treat "
                "otherwise. If it does not, register the class with "
                "optfuse.register(cls, subclasses=True)"
            )
    return None


def _why_attributes(params: list[Tensor], names: set[str]) -> str | None:
    for p in params:
        for name in p.__dict__:
            if name in names or not names.isdisjoint(_ALL):
                return (
                    f"a parameter has the attribute {name!r}, and code of the class has "
                    f"{'that name' if name in names else 'a look at all attributes'}, too"
                )
        for name in _HOOKS:
            if name in names and getattr(p, name):
                return f"a parameter has hooks, and code of the class has {name}"
    return None


def _why_identity(
    optimizer: Optimizer, params: list[Tensor], functions: list[types.FunctionType]
) -> str | None:
    ids = {id(p) for p in params}
    known = [f.__globals__.get(name) for f in functions for name in names_of([f])]
    options = [own_options(group) for group in optimizer.param_groups]
    for place, start in (
        ("an attribute", own_attributes(attributes_of(optimizer))),
        ("an option", options),
        ("its code's reach", [*functions, [x for x in known if _may_hold(x)]]),
    ):
        for found in reachable(start):
            if isinstance(found, _HOLDS) and any(
                type(x) is int and x in ids for x in _items(found)
            ):
                return f"{place} holds the id() of a parameter, by which its step() may tell it"
            if isinstance(found, types.CellType) and _content(found) in ids:
                return "a closure of its code holds the id() of a parameter"
    return None


def _may_hold(x: Any) -> bool:
    return isinstance(x, (*_HOLDS, int)) and not isinstance(x, bool)


def _content(cell: types.CellType) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:
        return None
    return content if type(content) is int else None


def _items(found: Any) -> Iterable[Any]:
    return [*found.keys(), *found.values()] if isinstance(found, dict) else found


def _values(found: Any) -> Iterable[Any]:
    return found.values() if isinstance(found, dict) else found


def _why_position(optimizer: Optimizer, params: list[Tensor]) -> str | None:
    """A container with a place for each parameter: a step on one of them would take the first.
    Without a tensor in it the number of places may be a coincidence; the trial, and updates after
    it, see it filled."""
    state, ids = optimizer.__dict__["state"], {id(p) for p in params}
    own = own_attributes(attributes_of(optimizer))
    places = [("attribute", v, len(params)) for v in own.items()]
    for group in optimizer.param_groups:
        for n in (len(params), len(group["params"])):
            places += [("option", v, n) for v in own_options(group).items()]
    for p in params:
        places += [("state entry", v, len(params)) for v in (state.get(p) or {}).items()]
    for what, (name, value), n in places:
        if n > 1 and isinstance(value, (*_LISTS, dict)) and len(value) == n:
            held = [x for x in _values(value) if x is not None]
            if held and all(isinstance(x, Tensor) and id(x) not in ids for x in held):
                return (
                    f"the {what} {name!r} has as many places as there are parameters, with "
                    "tensors in them: read by position, a step on one parameter would take "
                    "another one's"
                )
    return None


# ---- the class's code


@functools.cache
def names_read(stock: type[Optimizer]) -> frozenset[str] | None:
    """Names of attributes and options that the class's code may read, arguments included, as
    options may become those. None: any, as it is not all in Python or looks at all names."""
    functions = functions_reached(stock)
    names = names_of(functions)
    if not isinstance(step_of(stock), types.FunctionType) or not names.isdisjoint(_ANY):
        return None
    return frozenset(names.union(*map(_arguments, functions)))


def reads_option(stock: type[Optimizer], optimizer: Optimizer) -> Callable[[str], bool]:
    """Whether the class's code may read an option of this name. PyTorch's code, in which nobody
    looks for names, reads those with a default."""
    read, defaults = names_read(stock), frozenset(optimizer.__dict__.get("defaults", ()))
    return lambda name: read is None or name in read or name in defaults


@functools.cache
def numbers_in(stock: type[Optimizer]) -> list[float]:
    """Numbers with which the class's code may compare an option, in order."""
    functions = functions_reached(stock)
    named = (f.__globals__.get(name) for f in functions for name in names_of([f]))
    constants = (x for code in codes_of(functions) for x in code.co_consts)
    found = [x for x in (*named, *constants) if type(x) in (int, float)]
    return sorted({0, 1, math.inf, -math.inf, *found})


def _arguments(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
