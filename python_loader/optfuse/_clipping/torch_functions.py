# SPDX-License-Identifier: BSD-3-Clause
"""The functions of torch.nn.utils that clip: on parameters of fused optimizers they do all in one
call of the library. Everything else is left to PyTorch's own, as is what dynamo traces."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from types import GeneratorType
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import utils
from torch.nn.utils import clip_grad

from optfuse._clipping import one_call
from optfuse._patches.replacing import replace

# PyTorch's own, whatever is in their places later.
stock_clip_grad_norm_ = clip_grad.clip_grad_norm_
stock_clip_grad_value_ = clip_grad.clip_grad_value_
stock_get_total_norm = clip_grad._get_total_norm
stock_clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_

Tensors = Tensor | Iterable[Tensor]
_EMPTY = "`parameters` is an empty generator, no gradient clipping will occur."


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _is_number(value: Any) -> bool:
    return type(value) in (float, int)


@functools.wraps(stock_clip_grad_norm_)
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    if is_compiling() or not (_is_number(max_norm) and _is_number(norm_type)):
        return stock_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    params = _listed(parameters)
    if not params and isinstance(parameters, GeneratorType):
        warnings.warn(_EMPTY, stacklevel=2)  # PyTorch's function would name this file
    norm = one_call.clip_norm(params, max_norm, norm_type, bool(error_if_nonfinite))
    if norm is not None:
        return norm
    return stock_clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)


@functools.wraps(stock_get_total_norm)
def get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    if is_compiling() or norm_type not in (1, 2, math.inf):
        return stock_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    listed = _listed(tensors)
    norm = one_call.total_norm(listed, float(norm_type))
    if norm is None or (error_if_nonfinite and not norm.isfinite()):
        return stock_get_total_norm(listed, norm_type, error_if_nonfinite, foreach)
    return norm


@functools.wraps(stock_clip_grads_with_norm_)
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    if is_compiling() or not _is_number(max_norm):
        return stock_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
    params = _listed(parameters)
    one_call.refuse_final(params)
    if one_call.clip_with_norm(params, max_norm, total_norm) is None:
        stock_clip_grads_with_norm_(params, max_norm, total_norm, foreach)
    return None


@functools.wraps(stock_clip_grad_value_)
def clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    if is_compiling() or not _is_number(clip_value):
        return stock_clip_grad_value_(parameters, clip_value, foreach)
    params = _listed(parameters)
    if one_call.clip_value(params, clip_value) is None:
        stock_clip_grad_value_(params, clip_value, foreach)
    return None


def _refuse_by_early_names() -> None:
    """Who has imported clip_grad_value_() before calls PyTorch's own, whose decorator has the
    function in a cell."""
    (cell,) = stock_clip_grad_value_.__closure__
    clip_value = cell.cell_contents

    @functools.wraps(clip_value)
    def look_and_clip(parameters: Tensors, *args: Any, **kwargs: Any) -> None:
        params = _listed(parameters)
        one_call.refuse_final(params)
        clip_value(params, *args, **kwargs)

    cell.cell_contents = look_and_clip


def install() -> None:
    """Once per process. PyTorch's clip_grad_norm_ looks two of them up by their private names: so
    those who have imported it before gain, too. Its own name there stays PyTorch's, by which pickle
    finds what was imported before."""
    _refuse_by_early_names()
    for ours in (clip_grad_norm_, get_total_norm, clip_grads_with_norm_, clip_grad_value_):
        ours.__module__ = utils.__name__  # where pickle finds ours
    replace(utils, "clip_grad_norm_", clip_grad_norm_)
    replace(utils, "get_total_norm", get_total_norm)
    replace(utils, "clip_grads_with_norm_", clip_grads_with_norm_)
    replace(utils, "clip_grad_value_", clip_grad_value_)
    replace(clip_grad, "_get_total_norm", get_total_norm)
    replace(clip_grad, "_clip_grads_with_norm_", clip_grads_with_norm_)
