# SPDX-License-Identifier: BSD-3-Clause
"""The costs of a model's entries: measured here and now, or counted as multiply-adds."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optfuse._library.bindings import Error
from optfuse_layers.pipeline.plan import PlannedLayer

MEASURED, ANALYTIC = "measured", "analytic"
#: Speed in "analytic" costs: nominal, so that seconds of the network have something beside them.
MULTIPLY_ADDS_A_SECOND = 1e10
_ROUNDS = 5

Seconds = tuple[float, float, float, float]  # forward, input gradient, weight gradient, update


@dataclass(frozen=True)
class Entry:
    """One of the model, with an input of the right shape."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    has_input_gradient: bool

    @property
    def trained(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def channels(self) -> int:
        """Seconds for the gradient of the input, if the entry is movable; else 0."""
        module = self.module
        weight = module._parameters.get("weight")
        if weight is None or not weight.requires_grad:  # hooks may make it (pruning, weight_norm())
            return 0
        if type(module) is nn.Linear:
            return module.in_features
        plain = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
        return module.in_channels if plain else 0


def entries_of(model: nn.Sequential, example: Tensor, may_share: bool = False) -> list[Entry]:
    """Runs copies of them one after the other, so that buffers and random numbers stay as they
    are. Raises optfuse.Error for a model that can't be a pipeline."""
    if not len(model):
        raise Error("optfuse: plan() got a model without layers; its entries are the layers")
    found: list[Entry] = []
    x, owner = example.detach(), {}
    for name, module in model._modules.items():
        entry = Entry(name, module, x, _output(name, module, x), any(e.trained for e in found))
        for p in entry.trained:
            if owner.setdefault(id(p), name) != name and not may_share:
                raise Error(
                    f"optfuse: plan() got entries {owner[id(p)]!r} and {name!r} that share a "
                    "parameter; take a strategy without delays, or put both into one entry"
                )
        if entry.has_input_gradient and not x.is_floating_point():
            raise Error(
                f"optfuse: plan() got an entry {name!r} whose input is {x.dtype}, which has no "
                "gradient, and entries before it have parameters"
            )
        found.append(entry)
        x = entry.output
    return found


def _output(name: str, module: nn.Module, x: Tensor) -> Tensor:
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        raise Error(
            f"optfuse: plan() got an entry {name!r} that copy.deepcopy() can't copy: {error}. That "
            "is so where hooks make a weight (pruning, torch.nn.utils.weight_norm): remove them "
            "first, or use torch.nn.utils.parametrizations"
        ) from error
    with torch.random.fork_rng(_devices(x)), torch.no_grad():
        y = copied(x.clone())
    if not isinstance(y, Tensor):
        raise Error(
            f"optfuse: plan() got an entry {name!r} that returns {type(y).__name__}; an entry of "
            "a pipeline has one tensor in and one out"
        )
    return y


def _devices(x: Tensor) -> list[torch.device]:
    return [x.device] if x.is_cuda else []


# Multiply-adds


def _multiply_adds(module: nn.Module, x: Tensor) -> int:
    """Multiply-adds of a forward pass of the layers inside; others count nothing."""
    copied, total = copy.deepcopy(module), 0

    def count(layer: nn.Linear | nn.Conv2d, args: Any, y: Tensor) -> None:
        nonlocal total
        total += y.numel() * _multiply_adds_of_one(layer)

    for layer in copied.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(count)
    with torch.random.fork_rng(_devices(x)), torch.no_grad():
        copied(x.clone())
    return total


def _multiply_adds_of_one(layer: nn.Linear | nn.Conv2d) -> int:
    """For one element of the output. Not by the weight: a parametrization makes it at each look."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.in_channels // layer.groups * math.prod(layer.kernel_size)


def _analytic(entry: Entry) -> Seconds:
    """dX and dW take as many multiply-adds as the forward, the update one a parameter."""
    once = _multiply_adds(entry.module, entry.input) / MULTIPLY_ADDS_A_SECOND
    update = sum(p.numel() for p in entry.trained) / MULTIPLY_ADDS_A_SECOND
    return once, once * entry.has_input_gradient, once * bool(entry.trained), update


# Seconds


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some runs: other work on the machine only adds time."""
    times = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _gradients(y: Tensor, of: Sequence[Tensor]) -> Callable[[], object]:
    dy = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, of, dy, retain_graph=True, allow_unused=True)


def _update(parameters: Iterable[Tensor], device: torch.device) -> float:
    """Seconds of an update of SGD with momentum, which moves about as many bytes as most."""
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    for p in copies:
        p.grad = torch.zeros_like(p)
    return _shortest(torch.optim.SGD(copies, lr=0.0, momentum=0.9).step, device)


def _measured(entry: Entry) -> Seconds:
    """dW of an entry that stays whole is what it adds to dX."""
    module, device = copy.deepcopy(entry.module), entry.input.device
    leaf = entry.input.clone().requires_grad_(entry.has_input_gradient)
    trained = [p for p in module.parameters() if p.requires_grad]
    inputs = [leaf.clone() for _ in range(1 + _ROUNDS)]  # an entry may write into its own
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(module(inputs[len(outputs)]))

    with torch.random.fork_rng(_devices(leaf)), torch.enable_grad():
        seconds = _shortest(forward, device)
    y = outputs[0]
    del outputs[1:]
    of_input, of_both, of_weight = 0.0, 0.0, 0.0
    if entry.has_input_gradient and not y.requires_grad:
        raise Error(
            f"optfuse: plan() got an entry {entry.name!r} whose output needs no gradient although "
            "its input does; entries before it would not be trained"
        )
    if entry.has_input_gradient:
        of_input = _shortest(_gradients(y, [leaf]), device)
    if trained and (entry.channels or not entry.has_input_gradient):
        of_weight = _shortest(_gradients(y, trained), device)
    elif trained:
        of_both = _shortest(_gradients(y, [leaf, *trained]), device)
        of_weight = max(0.0, of_both - of_input)
    return seconds, of_input, of_weight, _update(trained, device) if trained else 0.0


def layers_of(
    model: nn.Sequential,
    example: Tensor,
    costs: str | Sequence[Seconds],
    may_share: bool = False,
) -> tuple[PlannedLayer, ...]:
    """may_share: whether two entries may have a parameter in common."""
    entries = entries_of(model, example, may_share)
    if isinstance(costs, str):
        times = list(map(_measured if costs == MEASURED else _analytic, entries))
    else:
        times = list(costs)
    if len(times) != len(entries):
        raise Error(
            f"optfuse: plan() got costs of {len(times)} layers; the model has {len(entries)} "
            "entries, give four times in seconds for each"
        )
    return tuple(_layer(entry, *of) for entry, of in zip(entries, times, strict=True))


def _layer(entry: Entry, forward: float, dx: float, dw: float, update: float) -> PlannedLayer:
    parameters = sum(p.numel() for p in entry.trained)
    return PlannedLayer(
        entry.name,
        forward,
        dx if entry.has_input_gradient else 0.0,
        dw if parameters else 0.0,
        update if parameters else 0.0,
        entry.input.numel(),
        entry.output.numel(),
        parameters,
        bool(entry.channels),
        entry.channels,
    )
