# SPDX-License-Identifier: BSD-3-Clause
"""Small copies of an optimizer's parameters, with small copies of their state, on which
its class's step() can be tried; and the gradients for that."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import label
from optfuse._dtensor.local_tensors import local_of
from optfuse._own_step.twin import Entry, Group
from optfuse._trials.compare import deep_copy

SHORT = 8  # elements of a dimension, where a copy is as small as can be
LARGE = 16_384  # elements that a large copy exceeds, if its parameter does
KINDS = 4  # of parameters in a group; two of each where there are so many
GROUPS = 2  # that have the same kinds of options
RATE = 1e-3  # in the place of a learning rate that is 0: updates would show nothing


@dataclass
class Small:
    """A small copy of a parameter; of a DTensor one of its local tensor."""

    name: str
    group: int
    param: Tensor
    entry: Entry | None  # of its state
    of: Tensor  # the parameter itself


def is_any_large(optimizer: Optimizer) -> bool:
    """Whether some parameters have more elements than the smallest copies."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any(n > SHORT for p in params for n in p.shape)


def small_copies(
    optimizer: Optimizer,
    random: torch.Generator,
    large: bool,
    short: int = SHORT,
    enlarged: bool = False,
) -> list[Small]:
    """Small copies: from each kind of group some parameters that differ in kind, and at least two.
    short: the longest dimension of small copies. enlarged: a large copy of a parameter without
    state is large whatever the parameter's size, unless it has no dimension."""
    state: dict[Any, Any] = optimizer.__dict__["state"]
    smalls = []
    for index in _chosen_groups(optimizer.param_groups):
        group = optimizer.param_groups[index]
        for i in _chosen(group["params"], state):
            name = label(group, index, i)
            param = group["params"][i]
            longest = _longest(local_of(param)) if large else short
            more = enlarged and large and state.get(param) is None
            smalls.append(_small(name, index, param, state, random, longest, more))
    return smalls


def _chosen_groups(groups: list[Group]) -> list[int]:
    kinds: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        options = sorted((k, _kind_of_option(v)) for k, v in group.items() if k != "params")
        params = sorted({_kind(p) for p in group["params"]})
        kinds.setdefault(repr((options, params)), []).append(i)
    return sorted(i for alike in kinds.values() for i in alike[:GROUPS])


def _kind_of_option(value: Any) -> str:
    """Numbers that are not 0 lead the same way."""
    if type(value) in (int, float):
        return f"{type(value)} {value == 0}"
    return repr(value) if type(value) in (bool, str, type(None)) else str(type(value))


def _kind(param: Tensor) -> tuple[str, ...]:
    return _names(param.dtype, param.device, param.dim(), param.numel() > LARGE)


@functools.lru_cache(256)
def _names(*of_param: Any) -> tuple[str, ...]:
    return tuple(map(str, of_param))


def _chosen(params: list[Tensor], state: Any) -> list[int]:
    """Every dtype and device is among them, with and without state."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for i, param in enumerate(params):
        place, *form = _kind(param)
        kinds.setdefault((place, form[0], str(bool(state.get(param))), *form[1:]), []).append(i)
    first = {kind[:3]: kind for kind in reversed(kinds)}
    order = [*first.values(), *(kind for kind in kinds if kind not in first.values())]
    chosen = [i for kind in order[: max(KINDS, len(first))] for i in kinds[kind][:2]]
    return sorted(chosen if len(chosen) > 1 or not chosen else chosen * 2)


def _small(
    name: str,
    group: int,
    param: Tensor,
    state: Any,
    random: torch.Generator,
    longest: int,
    enlarged: bool,
) -> Small:
    local: Tensor = local_of(param)
    shape = [min(longest, n) for n in local.shape]
    if enlarged and shape and 0 < math.prod(shape) <= LARGE:
        shape[0] *= LARGE // math.prod(shape) + 1
    numbers = normal(shape, local, random) * 10 ** (-6 * _uniform(shape, local, random))
    small = numbers.requires_grad_(param.requires_grad)
    entry = state.get(param)
    cut_entry = None if entry is None else deep_copy(_cut(entry, longest), f"the state of {name}")
    return Small(name, group, small, cut_entry, param)


def _longest(param: Tensor) -> int:
    """A bound for the length of dimensions under which its copy is large, if it is."""
    bound = SHORT
    while bound < max(param.shape, default=0):
        if math.prod(min(bound, n) for n in param.shape) > LARGE:
            break
        bound = bound * 5 // 4
    return bound


def _cut(value: Any, longest: int) -> Any:
    """A state entry for a small parameter: sizes follow those of the parameter."""
    if isinstance(value, Tensor):
        value = local_of(value.detach())
        for dim, n in enumerate(value.shape):
            value = value.narrow(dim, 0, min(longest, n))
        return value.clone()
    if type(value) is dict:
        return {key: _cut(item, longest) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cut(item, longest) for item in value)
    return value


def normal(shape: Iterable[int], like: Tensor, random: torch.Generator) -> Tensor:
    numbers = torch.randn(tuple(shape), generator=random, dtype=torch.float32, device="cpu")
    return numbers.to(like.device, like.dtype)


def _uniform(shape: Iterable[int], like: Tensor, random: torch.Generator) -> Tensor:
    numbers = torch.rand(tuple(shape), generator=random, dtype=torch.float32, device="cpu")
    return numbers.to(like.device, like.dtype)


def with_a_rate(options: Group) -> Group:
    lr = options.get("lr")
    if isinstance(lr, Tensor) and not lr.any():
        return {**options, "lr": torch.full_like(lr, RATE)}
    return {**options, "lr": RATE} if type(lr) in (int, float) and lr == 0 else options


# ---- gradients

Kind = float | str


@dataclass(frozen=True)
class Run:
    """Steps that are taken one after the other. Of each the gradients: a number is what
    normally distributed ones are multiplied by; "some": every other parameter has none; "late":
    the first one has none, and every other one after it; "zero": all are; "inf" and "nan": one
    number of one parameter's is; "first zero", "first tiny" and "first huge": those of the first
    parameter alone, as a loop may end there by its value; and so "first inf" and "first nan"."""

    steps: tuple[Kind, ...]
    large: bool = False  # copies


# The kind of the first parameter's gradient, where those of the others are plain.
FIRST: dict[Kind, Kind] = {
    **{"first zero": "zero", "first tiny": 1e-12, "first huge": 1e12},
    **{"first inf": "inf", "first nan": "nan"},
}
RUNS = (
    # Runs with plain gradients show whatever happens in every k-th step, for k up to 20.
    Run((1.0, 1.0, 1.0, 1e-4, 1.0, 1.0, 1.0, "zero", *12 * (1.0,), 100.0)),
    Run((1.0, 1.0, "some", 1.0, 1.0)),
    # State that is made for all parameters where the first one has none yet.
    Run(("late", 1.0, 1.0)),
    Run((1.0, "first zero", 1.0, "first tiny", 1.0, "first huge", 1.0)),
    Run((1.0, "first inf")),
    Run((1.0, "first nan")),
    # The later ones leave nothing of what the earlier ones did.
    Run((1.0, 1e-8, 1e-20, 1e-40, 1e3, 1e6, 1e12, 1e18, 1e30, "inf", "nan")),
    Run((1.0, 1.0, 1e-3, 1e3, 1.0, 1.0), large=True),
)


def gradients(
    smalls: list[Small], kind: Kind, step: int, random: torch.Generator
) -> Iterator[Tensor | None]:
    """One for each; in a step that is "inf" or "nan" a single number of one of them is."""
    special = 0 if kind in FIRST else step % max(1, len(smalls))
    for i, small in enumerate(smalls):
        own = kind if kind not in FIRST else FIRST[kind] if i == 0 else 1.0
        grad = _gradient(own, local_of(small.param), random, i == special)
        yield None if kind == ("late", "some")[i % 2] else grad


def _gradient(kind: Kind, param: Tensor, random: torch.Generator, is_special: bool) -> Tensor:
    grad = normal(param.shape, param, random)
    if isinstance(kind, float):
        return grad * kind
    if kind == "zero":
        return torch.zeros_like(grad)
    if kind in ("inf", "nan") and is_special and grad.numel():
        grad.view(-1)[0] = float(kind)
    return grad
