# SPDX-License-Identifier: BSD-3-Clause
"""The trial of an optimizer class that was registered with per_parameter=True: on
small copies, step() on all parameters against step() on one after the other."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._native import Error, guard
from optfuse._own import HIDDEN, Entry, attributes_of, copied, options_alone, step_alone, step_of

STEPS = 3
LONGEST = 8  # elements of a dimension of the small parameters that are stepped
KINDS = 4  # of parameters that are tried in each group
_COUNTERS = ("_warned_capturable_if_run_uncaptured", "_opt_called", "_step_count")


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass
class _Small:
    """A small copy of a parameter, once for each of the two runs."""

    name: str
    group: int
    whole: Tensor  # stepped with all others
    alone: Tensor
    entry: Entry | None  # state of `alone`


class Trial:
    """step() on everything against step() on one after the other, on copies."""

    def __init__(self, optimizer: Optimizer, stock: type[Optimizer]) -> None:
        self._stock = stock
        self._optimizer = optimizer
        self._step = step_of(stock)
        self._random = torch.Generator().manual_seed(0)
        self._state: dict[Any, Any] = optimizer.__dict__["state"]
        self._attributes = {k: copied(v) for k, v in attributes_of(optimizer).items()}
        self._options = [options_alone(group, True) for group in optimizer.param_groups]
        self._replaces = False
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        self._gpus = sorted(d.index for d in devices if d.type == "cuda")

    def run(self) -> bool:
        self._refuse_what_is_shared()
        with torch.random.fork_rng(devices=self._gpus):
            self._run()
        return self._replaces

    def _seed(self, seed: int) -> None:
        """No other generators than those that are put back afterwards."""
        torch.default_generator.manual_seed(seed)
        for device in self._gpus:
            torch.cuda.default_generators[device].manual_seed(seed)

    def _refuse(self, why: str) -> None:
        if guard("independent"):
            raise Error(
                f"optfuse: can't fuse {name_of(self._stock)}: it was registered with "
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
            before = [_tensors_of(whole.state.get(small.whole)) for small in smalls]
            self._seed(step)
            self._try(lambda: self._step(whole))
            after = [_tensors_of(whole.state.get(small.whole)) for small in smalls]
            self._replaces |= any(map(_are_others, before, after))
            self._seed(step)
            for small in reversed(smalls):  # in another order, which must not matter
                self._step_alone(twin, small)
            self._compare(whole, smalls, step)

    def _try(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:
            raise Error(
                f"optfuse: can't fuse {name_of(self._stock)}: step() could not be tried on small "
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


def _are_others(before: list[Tensor], after: list[Tensor]) -> bool:
    return bool(before) and list(map(id, before)) != list(map(id, after))


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
