# SPDX-License-Identifier: BSD-3-Clause
"""register(): optimizer classes without kernels whose step() may be run on one
parameter after the other, and the check that it may."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._native import Error, guard
from optfuse._own import (
    HIDDEN,
    Entry,
    Group,
    attributes_of,
    copied,
    options_of,
    step_alone,
    step_of,
)

STEPS = 3
LONGEST = 8  # elements of a dimension of the small parameters that are stepped
KINDS = 4  # of parameters that are tried in each group
_COUNTERS = ("_warned_capturable_if_run_uncaptured", "_opt_called", "_step_count")

_registered: set[type[Optimizer]] = set()
_known: dict[tuple[Any, ...], bool] = {}  # what was checked -> whether it replaces state

# The classes of torch.optim that step a parameter without looking at others.
_OF_TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam",
    "RAdam", "RMSprop", "Rprop", "SGD",
)
INDEPENDENT = {getattr(torch.optim, name) for name in _OF_TORCH if hasattr(torch.optim, name)}


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
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise Error(f"optfuse: register() takes a subclass of torch.optim.Optimizer, not {cls!r}")
    if not per_parameter:
        _registered.discard(cls)
        return
    if _needs_closure(cls):
        raise Error(
            f"optfuse: can't register {_name(cls)}: its step() needs a closure, so it evaluates "
            "the loss itself and needs all gradients at once. Use the optimizer as it is"
        )
    _registered.add(cls)


def is_registered(cls: type[Optimizer]) -> bool:
    return cls in _registered


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


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
            raise Error(f"optfuse: can't fuse {_name(stock)}, group {index}: {reason}")
    if stock in INDEPENDENT:
        return False
    key = (stock, repr([_kind(group) for group in optimizer.param_groups]))
    if key not in _known:
        _known[key] = _Trial(optimizer, stock).run()
    return _known[key]


def _kind(group: Group) -> list[Any]:
    options = sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "param_names"))
    return [options, [(p.dim(), str(p.dtype), str(p.device)) for p in group["params"]]]


@dataclass
class _Small:
    """A small copy of a parameter, once for each of the two runs."""

    name: str
    group: int
    whole: Tensor  # stepped with all others
    alone: Tensor
    entry: Entry | None  # state of `alone`


class _Trial:
    """step() on everything against step() on one after the other, on copies."""

    def __init__(self, optimizer: Optimizer, stock: type[Optimizer]) -> None:
        self._stock = stock
        self._optimizer = optimizer
        self._step = step_of(stock)
        self._random = torch.Generator().manual_seed(0)
        self._state: dict[Any, Any] = optimizer.__dict__["state"]
        self._attributes = {k: copied(v) for k, v in attributes_of(optimizer).items()}
        self._options = [options_of(group) for group in optimizer.param_groups]
        self._replaces = False

    def run(self) -> bool:
        self._refuse_what_is_shared()
        with torch.random.fork_rng(devices=[]):
            self._run()
        return self._replaces

    def _refuse(self, why: str) -> None:
        if guard("independent"):
            raise Error(
                f"optfuse: can't fuse {_name(self._stock)}: it was registered with "
                f"per_parameter=True, but its step() does not treat parameters independently: "
                f"{why}. Use the optimizer as it is"
            )

    def _refuse_what_is_shared(self) -> None:
        params = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        for name, value in self._optimizer.__dict__.items():
            if name not in HIDDEN and any(id(t) in params for t in _tensors_in(value)):
                self._refuse(f"its attribute {name!r} holds parameters, outside of param_groups")
        for key in self._state:
            if id(key) not in params:
                self._refuse(f"state[{key!r}] belongs to no parameter")

    def _run(self) -> None:
        smalls = list(self._smalls())
        whole = self._whole(smalls)
        twin = self._stock.__new__(self._stock)
        for step in range(STEPS):
            for small in smalls:
                gradient = self._numbers(small.whole)
                small.whole.grad, small.alone.grad = gradient.clone(), gradient
            tensors = {id(s.whole): _tensors_of(whole.state.get(s.whole)) for s in smalls}
            torch.manual_seed(step)
            self._try(lambda: self._step(whole))
            torch.manual_seed(step)
            for small in reversed(smalls):  # in another order, which must not matter
                self._step_alone(twin, small)
            self._compare(whole, smalls, step)
            for small in smalls:
                known = tensors[id(small.whole)]
                now = _tensors_of(whole.state.get(small.whole))
                self._replaces |= bool(known) and list(map(id, known)) != list(map(id, now))

    def _try(self, step: Any) -> Any:
        try:
            return step()
        except Exception as error:
            raise Error(
                f"optfuse: can't fuse {_name(self._stock)}: step() could not be tried on small "
                f"copies of the parameters: {type(error).__name__}: {error}. Use the optimizer "
                "as it is"
            ) from error

    def _step_alone(self, twin: Optimizer, small: _Small) -> None:
        options = self._options[small.group]
        small.entry = self._try(
            lambda: step_alone(
                self._step, twin, self._attributes, options, small.alone, small.entry
            )
        )

    def _numbers(self, like: Tensor) -> Tensor:
        numbers = torch.randn(like.shape, generator=self._random, dtype=torch.float32, device="cpu")
        return numbers.to(like.device, like.dtype)

    def _smalls(self) -> Iterator[_Small]:
        """Of each group some parameters that differ in kind, and at least two."""
        from optfuse._refuse import label

        for index, group in enumerate(self._optimizer.param_groups):
            chosen: dict[Any, int] = {}
            for i, param in enumerate(group["params"]):
                chosen.setdefault((param.dim(), param.dtype, param.device), i)
            picked = list(chosen.values())[:KINDS]
            others = [i for i in range(len(group["params"])) if i not in picked]
            picked += (others + picked)[: max(0, 2 - len(picked))]
            for i in picked:
                yield self._small(label(group, index, i), index, group["params"][i])

    def _small(self, name: str, group: int, param: Tensor) -> _Small:
        shape = [min(LONGEST, n) for n in param.shape]
        numbers = self._numbers(torch.empty(shape, dtype=param.dtype, device=param.device))
        whole, alone = (numbers.clone().requires_grad_(param.requires_grad) for _ in range(2))
        entry = self._state.get(param)
        return _Small(name, group, whole, alone, None if entry is None else _shrunk(entry))

    def _whole(self, smalls: list[_Small]) -> Optimizer:
        """An optimizer like this one with all small parameters."""
        whole = self._stock.__new__(self._stock)
        state: defaultdict[Tensor, Entry] = defaultdict(dict)
        for small in smalls:
            if small.entry is not None:
                state[small.whole] = copied(small.entry)
        groups = [
            {**copied(options), "params": [s.whole for s in smalls if s.group == i]}
            for i, options in enumerate(self._options)
        ]
        attributes = {k: copied(v) for k, v in self._attributes.items()}
        whole.__dict__ = {**attributes, "param_groups": groups, "state": state}
        return whole

    def _compare(self, whole: Optimizer, smalls: list[_Small], step: int) -> None:
        for name, value in whole.__dict__.items():
            known = self._attributes.get(name, whole)
            if name not in (*HIDDEN, *_COUNTERS) and _difference("", known, value) is not None:
                self._refuse(f"it changes the optimizer's attribute {name!r}")
        for index, group in enumerate(whole.param_groups):
            for key, value in group.items():
                known = self._options[index].get(key, whole)
                if key != "params" and _difference("", known, value) is not None:
                    self._refuse(f"it changes the option {key!r} of group {index}")
        for small in smalls:
            difference = _difference("the parameter", small.alone, small.whole) or _difference(
                "state", small.entry or {}, whole.state.get(small.whole, {})
            )
            if difference is not None:
                self._refuse(
                    f"after {step + 1} steps on a small copy of {small.name}, {difference} differs "
                    "when that parameter is stepped by itself"
                )
        stepped = {id(small.whole) for small in smalls}
        for owner in whole.state:
            if id(owner) not in stepped:
                self._refuse(f"it keeps state[{owner!r}], which belongs to no parameter")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | set | OrderedDict):
        for item in value:
            yield from _tensors_in(item)


def _tensors_of(entry: Entry | None) -> list[Tensor]:
    return [v for v in (entry or {}).values() if isinstance(v, Tensor)]


def _shrunk(entry: Entry) -> Entry:
    """A state entry of a small parameter. Sizes follow those of the parameter."""
    return {k: copied(_cut(v) if isinstance(v, Tensor) else v) for k, v in entry.items()}


def _cut(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    for dim, n in enumerate(tensor.shape):
        tensor = tensor.narrow(dim, 0, min(LONGEST, n))
    return tensor


def _difference(name: str, ours: Any, theirs: Any) -> str | None:
    """The name of the first part that differs; tensors are compared by bits."""
    if type(ours) is not type(theirs):
        return name
    if isinstance(ours, Tensor):
        return None if _same_bits(ours, theirs) else name
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{name} (its keys)"
        parts = (_difference(f"{name}[{k!r}]", ours[k], theirs[k]) for k in ours)
        return next((part for part in parts if part is not None), None)
    if isinstance(ours, list | tuple) and len(ours) == len(theirs):
        items = enumerate(zip(ours, theirs, strict=True))
        parts = (_difference(f"{name}[{i}]", *pair) for i, pair in items)
        return next((part for part in parts if part is not None), None)
    same = ours is theirs or ours == theirs or (ours != ours and theirs != theirs)
    return None if same else name


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.is_floating_point():
        nans = a.isnan() & b.isnan()
        a, b = a.masked_fill(nans, 0), b.masked_fill(nans, 0)
    if a.dim() == 0:
        a, b = a.reshape(1), b.reshape(1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
