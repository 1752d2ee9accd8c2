# SPDX-License-Identifier: BSD-3-Clause
"""torch.optim.swa_utils.AveragedModel: its average of all weights is one call of the library
(shim/averages), which leaves those of pending weights to their updates. Its own averaging runs
where a weight is not a plain one on the CPU, and for averages that are not PyTorch's."""

from __future__ import annotations

import functools
import weakref
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module, ParameterList
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from optfuse import _link
from optfuse._arguments.plain import are_plain
from optfuse._library.bindings import lib_with_gil
from optfuse._patches.replacing import replace

stock_update_parameters = AveragedModel.update_parameters

_average = torch.ops.optfuse.average.default
_UNFIT = -1  # of averages.h
_EMA, _EMA_OF_LISTS = swa_utils.get_ema_avg_fn(), swa_utils.get_ema_multi_avg_fn()
_SWA, _SWA_OF_LISTS = swa_utils.get_swa_avg_fn(), swa_utils.get_swa_multi_avg_fn()

_OWN_KINDS: tuple[dict[str, Any], ...] = (
    *({}, {"avg_fn": _EMA}, {"avg_fn": _SWA}),
    *({"multi_avg_fn": _EMA_OF_LISTS}, {"multi_avg_fn": _SWA_OF_LISTS}),
)

#: Formula of averages.h.
LERP, WEIGHTED, MEAN = range(3)


class Averaging(NamedTuple):
    """One step of an average a of a weight w."""

    formula: int  # lerp(a, w, take), keep * a + take * w, or a + (w - a) / take
    keep: float
    take: float


def _inner(function: Any) -> Any:
    """The function that torch.no_grad() has decorated."""
    return getattr(function, "__wrapped__", function)


def _is_made_as(function: Any, known: Any) -> bool:
    """Whether both are what one function of PyTorch's returns, perhaps with another decay."""
    return (
        type(function) is FunctionType
        and function.__code__ is known.__code__
        and getattr(_inner(function), "__code__", None) is _inner(known).__code__
    )


def _decay_of(function: Any) -> float | None:
    cells = _inner(function).__closure__ or ()
    decay = cells[0].cell_contents if len(cells) == 1 else None
    return decay if type(decay) in (float, int) else None


def averaging_of(model: AveragedModel) -> Averaging | None:
    """The next step of its average; None: not one of PyTorch's, or the first, a copy."""
    count, one, many = model.n_averaged, model.avg_fn, model.multi_avg_fn
    if type(count) is not Tensor or count.device.type != "cpu" or count.dtype != torch.int64:
        return None
    if count.numel() != 1 or not count:
        return None
    if one is None and many is None or _is_made_as(one, _SWA):
        return Averaging(MEAN, 0.0, float(count + 1))
    if one is None and _is_made_as(many, _SWA_OF_LISTS):
        return Averaging(LERP, 0.0, float(1 / (count + 1)))  # a tensor's quotient, as in PyTorch
    function, known = (many, _EMA_OF_LISTS) if one is None else (one, _EMA)
    decay = _decay_of(function) if _is_made_as(function, known) else None
    return None if decay is None else Averaging(LERP if one is None else WEIGHTED, decay, 1 - decay)


_IN_ORDER = ("parameters", "named_parameters", "buffers", "named_buffers", "modules")
_IN_ORDER += ("named_modules", "named_children", "_named_members")
_usual: weakref.WeakKeyDictionary[type[Module], bool] = weakref.WeakKeyDictionary()


def _is_usual(kind: type[Module]) -> bool:
    """Whether its modules, parameters and buffers are those in its dictionaries, in their order."""
    known = _usual.get(kind)
    if known is None:
        known = all(getattr(kind, name) is getattr(Module, name) for name in _IN_ORDER)
        _usual[kind] = known
    return known


def _each_once(found: list[Tensor | None]) -> list[Tensor]:
    """Without None and what came before, by id: a tensor's hash takes longer."""
    if lib_with_gil.of_shim_are_once(found, None):
        return cast(list[Tensor], found)
    return [*{id(tensor): tensor for tensor in found if tensor is not None}.values()]


def _tensors(root: Module) -> tuple[list[Tensor], list[Tensor]] | None:
    """parameters() and buffers(), which take longer; None: a module has its own."""
    parameters: list[Tensor | None] = []
    buffers: list[Tensor | None] = []
    seen: set[Module] = set()
    left: list[Module | None] = [root]
    while left:
        module = left.pop()
        if module is None or module in seen:
            continue
        if not _is_usual(type(module)):
            return None
        seen.add(module)
        parameters += module._parameters.values()
        buffers += module._buffers.values()
        if module._modules:
            left += reversed(module._modules.values())
    return _each_once(parameters), _each_once(buffers)


def _can_average(averages: list[Tensor], weights: list[Tensor]) -> bool:
    fit = len(averages) == len(weights) > 0 and not torch.is_inference_mode_enabled()
    return fit and are_plain(averages) and are_plain(weights)


def _average_all(averaged: AveragedModel, model: Module, averaging: Averaging) -> bool:
    """False, with nothing done: it is for PyTorch's own function."""
    if not _is_usual(type(averaged)) or averaged._parameters or len(averaged._modules) != 1:
        return False
    ours, theirs = _tensors(averaged.module), _tensors(model)
    if ours is None or theirs is None:
        return False
    (averages, kept), (weights, buffers) = ours, theirs
    if averaged.use_buffers:
        averages, weights = averages + kept, weights + buffers
    if not _can_average(averages, weights) or len(kept) != len(buffers) or not _are_as_here():
        return False
    if _average(averages, weights, *averaging) == _UNFIT:
        return False
    if not averaged.use_buffers:
        for a, w in zip(kept, buffers, strict=True):
            a.detach().copy_(w.detach())
    return True


@functools.cache
def _are_as_here() -> bool:
    """Whether this PyTorch averages by the formulas above: it is asked once, on a few numbers."""
    # torch.linspace() would set this thread's number of threads.
    numbers = [[(i - 3) + (5 - i) * k / 6 for k in range(7)] for i in range(4)]
    weights = [torch.tensor(n, dtype=torch.float32, device="cpu") for n in numbers]
    model = ParameterList([weights[0]])
    for kind in _OWN_KINDS:
        theirs, ours = (AveragedModel(model, device="cpu", **kind) for _ in range(2))
        for weight in weights:
            model[0].data = weight
            stock_update_parameters(theirs, model)
            averaging = averaging_of(ours)
            if averaging is None:
                stock_update_parameters(ours, model)
            else:
                _average([*ours.parameters()], [*model.parameters()], *averaging)
                ours.n_averaged.add_(1)
        if not torch.equal(ours.module[0], theirs.module[0]):
            return False
    return True


@functools.wraps(stock_update_parameters)
def update_parameters(self: AveragedModel, model: Module) -> None:
    averaging = averaging_of(self) if _link.links and not is_compiling() else None
    if averaging is None or not _average_all(self, model, averaging):
        return stock_update_parameters(self, model)
    self.n_averaged.add_(1)
    return None


def install() -> None:
    """Once per process. A function of somebody else's stays in its place."""
    now = AveragedModel.update_parameters
    if now is not stock_update_parameters or hasattr(now, "__wrapped__"):
        return
    if now.__module__ == swa_utils.__name__:
        replace(AveragedModel, "update_parameters", update_parameters)
