# SPDX-License-Identifier: BSD-3-Clause
"""Clipping by the norm of all gradients: one pass that reads them. Small ones are multiplied at
once, large ones by the update, which reads them anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, cast

import torch
import torch._dynamo
from torch import Tensor
from torch.optim import Optimizer

from optfuse import _link
from optfuse._arguments.check import FLAG, PARAMETERS, checked, number, optional
from optfuse._clipping import one_call
from optfuse._clipping.torch_functions import (
    stock_clip_grad_norm_,
    stock_clip_grads_with_norm_,
    stock_get_total_norm,
)
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._gpu import is_on_gpu
from optfuse._library.bindings import BACKWARD, Error, guard
from optfuse._patches.profiling import addresses_are_noted

Function = TypeVar("Function", bound=Callable[..., object])


def _owner(param: Tensor, links: list[_link.Link]) -> tuple[_link.Link, int] | None:
    for link in links:
        slot = link.slot_of(param)
        if slot is not None:
            return link, slot
    return None


def _folds(link: _link.Link, grad: Tensor) -> bool:
    """Whether multiplying this gradient may be left to whoever reads it."""
    return link.options.fold


class Gradients:
    """The gradients of these parameters, whatever they are: of fused ones, or left to torch."""

    def __init__(self, params: list[Tensor]) -> None:
        links = sorted(_link.links.values(), key=lambda link: link.mode != BACKWARD)
        self.fused: list[Tensor] = []  # parameters
        self.plain: list[Tensor] = []
        self._links: dict[_link.Link, None] = {}
        self.on_gpu = False
        for param in params:
            owner = _owner(param, links)
            if owner is not None:
                _refuse_backward(*owner)
            if param.grad is None:
                continue
            if owner is None or is_dtensor(param) or not _folds(owner[0], param.grad):
                self.plain.append(param)
                continue
            self.on_gpu = self.on_gpu or is_on_gpu(param.grad)
            owner[0].marked = True
            self._links[owner[0]] = None
            self.fused.append(param)

    def norms(self) -> Tensor | None:
        """Their 2-norms in this order, or None if an operator must find them."""
        if self.plain or self.on_gpu:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            norms: Tensor | None = torch.ops.optfuse.norms(self.fused)
        return norms

    def _flush_if_noted(self) -> None:
        if addresses_are_noted():
            for link in self._links:
                link.flush()

    def scale(self, factor: Tensor) -> None:
        """Multiplies the fused ones by a 0-dim tensor, when they are read."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.ops.optfuse.scale(self.fused, factor)
        self._flush_if_noted()


def _refuse_backward(link: _link.Link, slot: int) -> None:
    if link.mode == BACKWARD and guard("clip"):
        raise Error(
            "optfuse: clipping and unscaling need all gradients at once, but "
            f"{link.label(slot)} belongs to an optimizer in backward mode, whose updates "
            "don't wait for them; "
            'use optfuse.fuse(optimizer, mode="forward")'
        )


def _total_norm(
    gradients: Gradients,
    params: list[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    if float(norm_type) == 2.0:
        norms = gradients.norms()
        if norms is not None:
            total: Tensor = torch.linalg.vector_norm(norms, 2.0)
            if not error_if_nonfinite or total.isfinite():
                return total
    grads = [p.grad for p in params if p.grad is not None]
    return stock_get_total_norm(grads, norm_type, error_if_nonfinite, foreach)


def _untraced(function: Function) -> Function:
    """torch._dynamo.disable(), which has no types."""
    return cast(Function, torch._dynamo.disable(function))


@_untraced
@checked(
    parameters=PARAMETERS,
    max_norm=number("a number of at least 0", least=0.0, nan=True),
    norm_type=number("a number, or 'inf'", names=("inf", "-inf")),
    error_if_nonfinite=FLAG,
    foreach=optional(FLAG),
)
def clip_grad_norm_(
    parameters: Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ without its pass over large gradients.

    parameters: an optimizer, or parameters of any shape. Gradients of fused
        ones (forward mode, dense; float32, float64, bfloat16, float16) of at
        least 16,384 elements are multiplied where the update reads them, or at
        their first use if that comes earlier; smaller ones at once, and all
        others by torch's own function. On a GPU
        that is so for optimizers with a CUDA kernel, and nothing waits for the
        norm; a CUDA graph multiplies at its end those that are still there.
    max_norm, norm_type, error_if_nonfinite, foreach: as torch's.

    Returns the total norm, a 0-dim tensor of the dtype that torch gives it. The
    norm, the gradients as anyone sees them and the updates have the bits of
    torch's function followed by step().

    Raises optfuse.Error for a parameter of an optimizer in backward mode, for a
    negative max_norm, with which torch's function turns gradients round, and what
    torch's function raises, before any gradient has changed.
    """
    assert isinstance(parameters, list)  # as checked() passes it on
    return clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def clip(
    params: list[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """clip_grad_norm_() of arguments that were checked, where dynamo does not trace."""
    norm = one_call.clip_norm(params, max_norm, float(norm_type), error_if_nonfinite)
    if norm is not None:
        return norm
    return _clip_one_by_one(params, max_norm, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def _clip_one_by_one(
    params: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    gradients = Gradients(params)
    # On a GPU what can't wait is multiplied by PyTorch's multi-tensor function, which writes to
    # memory that copies on write (torch._lazy_clone) without a copy; its loop does not.
    by_loop = foreach is False and gradients.on_gpu
    if not gradients.fused or by_loop or any(map(is_dtensor, params)):
        return stock_clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = _total_norm(gradients, params, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    gradients.scale(factor)
    if gradients.plain:
        stock_clip_grads_with_norm_(gradients.plain, max_norm, norm, foreach)
    return norm
