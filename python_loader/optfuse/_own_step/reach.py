# SPDX-License-Identifier: BSD-3-Clause
"""The objects that an optimizer can reach besides its parameters and their state. A copy of it for
a trial would reach the same."""

from __future__ import annotations

import gc
import types
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import Error, guard
from optfuse._own_step.twin import CONSTANT, HIDDEN, unbound

MOST = 200_000  # objects that are looked at
_OPAQUE = (
    type,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
)


def reachable(*start: Any) -> Iterator[Any]:
    """Through containers, attributes, closures and bound methods; an optimizer or a tensor
    is an end."""
    seen: dict[int, Any] = {}
    todo = deque(start)
    while todo:
        value = todo.popleft()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        if len(seen) >= MOST:
            raise Error(
                f"optfuse: more than {MOST:,} objects can be reached from the optimizer's "
                "attributes, options, state or code, too many to find out whether step() could "
                "change one of them in a trial or tell a parameter by one. Use the optimizer as "
                "it is"
            )
        seen[id(value)] = value
        yield value
        if not isinstance(value, Optimizer):
            todo.extend(_referents(value))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it has no memory itself, but the tensors in it have."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _referents(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None) if is_wrapper(value) else None
        return [] if flatten is None else [getattr(value, name) for name in flatten()[0]]
    if isinstance(value, weakref.ref):
        return [value()]
    found = gc.get_referents(value)
    if isinstance(value, types.FunctionType):
        of_all = value.__globals__, value.__builtins__  # an interactive prompt writes there, too
        return [item for item in found if not any(item is names for names in of_all)]
    return found


def inner_optimizer(optimizer: Optimizer) -> tuple[str, Optimizer] | None:
    """The one that a wrapper steps, and the attribute where it is."""
    for name, value in optimizer.__dict__.items():
        if isinstance(value, Optimizer) and value is not optimizer:
            return name, value
    return None


class Memory:
    """The memory of some tensors: whether another tensor shares it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans = {span for t in tensors if (span := span_of(t)) is not None}
        self._begins: list[tuple[str, int]] = []
        self._ends: list[tuple[str, int]] = []
        for where, begin, end in sorted(spans):
            if self._ends and self._ends[-1] >= (where, begin):
                self._ends[-1] = max(self._ends[-1], (where, end))
            else:
                self._begins.append((where, begin))
                self._ends.append((where, end))

    def has(self, tensor: Tensor) -> bool:
        span = span_of(tensor)
        if span is None:
            return False
        where, begin, end = span
        i = bisect_right(self._begins, (where, end - 1)) - 1
        return i >= 0 and self._ends[i] > (where, begin)


def span_of(tensor: Tensor) -> tuple[str, int, int] | None:
    """Addresses of the first byte and of the one after the last; None: it has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or is_wrapper(tensor):
        return None
    if tensor.numel() == 0:
        return None
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in strides)
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # a gradient that backward fusion has consumed
        return None
    return str(tensor.device), begin, begin + (last + 1) * tensor.element_size()


def why_reaches_too_much(optimizer: Optimizer) -> str | None:
    """Why a copy of the optimizer would still reach the original: it holds optimizers, parameters
    or this optimizer itself where copying does not replace them."""
    groups, state = optimizer.__dict__["param_groups"], optimizer.__dict__["state"]
    params = [p for group in groups for p in group["params"]]
    real = Memory(t for p in params for t in (p, p.grad) if t is not None)
    ids = set(map(id, params))
    places = [
        (f"its attribute {name!r}", value)
        for name, value in unbound(optimizer.__dict__, optimizer).items()
        if name not in HIDDEN
    ]
    places += [(f"state[{k!r}]", v) for k, v in state.items() if isinstance(k, CONSTANT)]
    for i, group in enumerate(groups):
        options = group.items()
        places += [(f"the option {k!r} of group {i}", v) for k, v in options if k != "params"]
    for name, value in places:
        for found in reachable(value):
            what = _what(found, optimizer, real, ids)
            if what is not None and guard("reach"):
                return f"{name} {what}"
    return _why_not_state(optimizer, state, params)


def _what(found: Any, optimizer: Optimizer, real: Memory, ids: set[int]) -> str | None:
    if found is optimizer:
        return "leads back to the optimizer itself, so that a copy of it would step the real one"
    if isinstance(found, Optimizer):
        return f"holds another optimizer, {type(found).__name__}, and a copy would step that one"
    if isinstance(found, Tensor) and (id(found) in ids or real.has(found)):
        return "holds parameters, outside of param_groups"
    return None


def _why_not_state(optimizer: Optimizer, state: Any, params: list[Tensor]) -> str | None:
    """A parameter's state may hold its own memory, not that of others."""
    if not state:
        return None
    memory = {id(p): Memory([p]) for p in params}
    whole = Memory(params)
    for key, entry in state.items():
        if isinstance(key, CONSTANT):
            continue  # it is taken for an attribute
        if id(key) not in memory:
            return f"state[{key!r}] belongs to no parameter"
        for found in reachable(entry):
            if isinstance(found, Optimizer):
                return f"the state of a parameter holds an optimizer, {type(found).__name__}"
            is_real = isinstance(found, Tensor) and whole.has(found)
            if is_real and not memory[id(key)].has(found):
                return "the state of one parameter holds another parameter"
    return None
