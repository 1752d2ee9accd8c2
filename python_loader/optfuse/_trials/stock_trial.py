# SPDX-License-Identifier: BSD-3-Clause
"""Before an update takes the place of stock's where nobody has compared the two: does it
give stock's bits, here?

A few steps are taken both ways. Our update runs only where every bit is equal, and else
the class's own step() does. Two things are not known beforehand:

- On a GPU, where PyTorch's operators round: that depends on how its compiler contracted
  them for a chip and a release. The rules that are tried there promise the bits of the
  class's own step(), with the flags that it was made with. (For Adam, AdamW and SGD the
  kernels reproduce fused=True whatever a trial finds: gpu_trial.py.)
- A release for which a rule's bits are not known (_library/releases.py). The trial is against the
  implementation that the rule reproduces, whatever the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._bits import difference
from optfuse._gpu import is_gpu, is_on_gpu
from optfuse._library import releases
from optfuse._library.bindings import DTYPES, guard
from optfuse._rules import Group, Rule

Fuse = Callable[[Optimizer], Optimizer]
Kind = tuple[type[Optimizer], torch.dtype, torch.device, str]
Shape = tuple[int, ...]

STEPS = 8  # RAdam takes another way from the sixth on
SIZES = (1, 7, 64, 1003, 9001)  # with tails, and more than a block's part
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 1.0, -65504.0)
_LEFT_OUT = ("params", "param_names", "lr", "initial_lr", "seed")
# With one of these the class computes its scalars in other ways, or on the device.
# (ASGD checks no alpha; PyTorch's power function has ways of its own for negative ones.)
_OTHER_WAYS = ("capturable", "fused", "differentiable", "a tensor as lr", "a negative alpha")

known: dict[Kind, str] = {}  # why a kind of parameters has no kernels; "": it has


def _is_known(rule: Rule, dtype: str) -> bool:
    """Whether the rule has the bits of this release, as far as that depends on it alone."""
    return releases.holds(rule.name, dtype, releases.release_of(str(torch.__version__)))


def unknown_dtypes(rule: Rule) -> int:
    """A bit for each, in the library's order."""
    return sum(1 << i for i, dtype in enumerate(DTYPES) if not _is_known(rule, dtype))


def _is_tried(rule: Rule, dtype: torch.dtype, device: torch.device) -> bool:
    on_gpu = rule.tried and is_gpu(device)
    return on_gpu or not _is_known(rule, str(dtype).removeprefix("torch."))


def kinds(rule: Rule, stock: type[Optimizer], groups: list[Group]) -> Iterator[tuple[Kind, Group]]:
    """The kinds of parameters that need a trial, each with the options for it."""
    for group in groups:
        options = {k: v for k, v in group.items() if k not in _LEFT_OUT}
        # The class makes counters on the default device, and kernels look for them in one place.
        text = repr((sorted(options.items()), torch.get_default_device()))
        places = {(p.dtype, p.device) for p in group["params"]}
        for dtype, device in sorted(places, key=str):
            if _is_tried(rule, dtype, device):
                yield (stock, dtype, device, text), options


def flags_of(group: Group) -> tuple[Any, ...]:
    """The options that select one of the class's implementations."""
    tensor, alpha = isinstance(group.get("lr"), Tensor), group.get("alpha", 0)
    negative = isinstance(alpha, int | float) and alpha < 0
    return *map(group.get, _OTHER_WAYS[:-2]), tensor, negative, group.get("foreach")


def other_ways(group: Group) -> list[str]:
    *ways, _ = flags_of(group)
    return [name for name, taken in zip(_OTHER_WAYS, ways, strict=True) if taken]


def verdicts(rule: Rule, stock: type[Optimizer], groups: list[Group]) -> list[str]:
    """Why these groups did not pass their trials; empty if they did."""
    found: list[str] = []
    for kind, _ in kinds(rule, stock, groups):
        why = known.get(kind, "of no trial")
        place = f"{str(kind[1]).removeprefix('torch.')} on {kind[2]}"
        if why and f"{why} ({place})" not in found:
            found.append(f"{why} ({place})")
    return found


def make(stock: type[Optimizer], groups: list[Group], rule: Rule, fuse: Fuse) -> None:
    """The trials of those kinds that had none yet. fuse: by the rule that has to pass."""
    for kind, options in kinds(rule, stock, groups):
        if kind in known:
            continue
        if rule.tried and is_gpu(kind[2]):
            if other_ways(options):
                continue
        else:
            options = {**options, **rule.flags(options)}
        known[kind] = _try(kind, options, rule, fuse) if guard("tried") else ""


def _try(kind: Kind, options: Group, rule: Rule, fuse: Fuse) -> str:
    try:
        for varied in _variations(options):
            difference = _compare(kind, varied, rule, fuse)
            if difference:
                return f"in a trial the kernels {difference}"
    except Exception as error:  # whatever it is, the class's own step() needs none of this
        return f"the trial of the kernels failed: {type(error).__name__}: {error}"
    return ""


def _variations(options: Group) -> Iterator[Group]:
    """The options; and others that a script may come to later, through which the
    formulas go other ways."""
    yield options
    decay = 0.0 if options.get("weight_decay") else 0.1
    other: Group = {"weight_decay": decay, "maximize": not options.get("maximize")}
    yield {**options, **{k: v for k, v in other.items() if k in options}}
    other = {"weight_decay": 0.1, "alpha": 0.3, "rho": 0.3}
    other |= {"lambd": 3.0, "t0": 3.0, "momentum": 0.5}
    other["betas"] = (0.3, 0.6, 0.4)[: len(options.get("betas", ()))]
    for name in ("decoupled_weight_decay", "no_prox"):
        other[name] = not options.get(name)
    yield {**options, **{k: v for k, v in other.items() if k in options}}


def _compare(kind: Kind, options: Group, rule: Rule, fuse: Fuse) -> str:
    """Trains with the class's own step() and with ours. The first difference, or why the trial
    showed nothing; empty if there is neither."""
    stock, dtype, device, _ = kind
    random = torch.Generator("cpu").manual_seed(0)
    params = [[_placed((n,), dtype, device) for n in SIZES] for _ in range(2)]
    for theirs, ours in zip(*params, strict=True):
        numbers = _numbers(theirs, random, SPECIAL)
        for param in (theirs, ours):
            param.detach().copy_(numbers)
    own, fused = (_made(stock, options, some) for some in params)
    fused = fuse(fused)
    for step in range(STEPS):
        for theirs, ours in zip(*params, strict=True):
            theirs.grad = _numbers(theirs, random, SPECIAL)
            ours.grad = theirs.grad.clone()
        own.step()
        fused.step()
        if step == 0:
            _set_apart(own, params[0])
            _set_apart(fused, params[1])
        for theirs, ours in zip(*params, strict=True):
            what = f"after {step + 1} steps of {theirs.numel()} elements the"
            place = difference(f"{what} parameter", ours, theirs) or difference(
                f"{what} state", dict(fused.state[ours]), dict(own.state[theirs])
            )
            if place is not None:
                return f"gave other bits than it: {place}"
    if any(param.isnan().all() for param in params[0]):
        return "could not be compared with it: all numbers became NaN"
    return ""


def _set_apart(optimizer: Optimizer, params: list[Tensor]) -> None:
    """Gives step counters on the device different values: kernels read each of them."""
    for i, param in enumerate(params):
        counter = optimizer.state[param].get("step")
        if is_on_gpu(counter):
            counter += 97 * i


def _placed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. Every other tensor does not begin where its memory does."""
    n = math.prod(shape)
    start = n % 2
    whole = torch.zeros(start + n, device=device, dtype=dtype)
    return whole[start:].view(shape).detach().requires_grad_()


def _numbers(like: Tensor, random: torch.Generator, special: tuple[float, ...]) -> Tensor:
    """Numbers of many magnitudes; a few of them are special. Numbers without special ones have
    fewer magnitudes, so that in 16 bits no sum over a matrix overflows."""
    n = like.numel()
    plain, scale = (torch.randn(n, generator=random, device="cpu") for _ in range(2))
    numbers = plain * torch.exp((3 if special else 0.5) * scale)
    if special and n >= 4 * len(special):
        places = torch.randperm(n, generator=random, device="cpu")[: len(special)]
        numbers[places] = torch.tensor(special, device="cpu")
    return numbers.view(like.shape).to(like.device, like.dtype)


def _made(stock: type[Optimizer], options: Group, params: list[Tensor]) -> Optimizer:
    optimizer = stock(params, lr=1e-2)  # type: ignore[call-arg]
    optimizer.param_groups[0].update(options)
    return optimizer
