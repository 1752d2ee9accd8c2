# SPDX-License-Identifier: BSD-3-Clause
"""The computations of a layer's tasks, for one batch: by autograd where a layer's tasks are on one
process, by its operators where they are on several.

torch.distributed.pipelining computes dX and dW apart (its "zero bubble" schedules), with the bits
of one backward pass; its stages hold several layers on one process, so that only these two
functions are of use here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.func import functional_call

from optfuse_layers.pipeline.versions import Version

Gradients = dict[str, Tensor]  # of parameters, by their names in the layer


class Graph:
    """A layer's forward pass that waits for its backward tasks. replaced: names of weights that
    replace() gives for dX; all others are those of the forward."""

    def __init__(
        self, layer: nn.Module, version: Version, x: Tensor, with_dx: bool, replaced: set[str]
    ) -> None:
        self._version = version
        self._with_dx = with_dx
        self._replacement: Version = {n: version[n].detach() for n in replaced}
        self._x = x.detach()
        if with_dx:
            self._x.requires_grad_()
        # A leaf can't be changed in place, and the entry before keeps what it has made.
        given = self._x.clone() if getattr(layer, "inplace", False) else self._x
        with torch.enable_grad(), saved_tensors_hooks(*self._hooks()):
            y = functional_call(layer, version, (given,))
            # detach_(), which a view refuses, is called when dX is done.
            self._y = torch._lazy_clone(y) if y._is_view() else y
        self._groups: list[dict[str, Any]] = []

    @property
    def output(self) -> Tensor:
        return self._y.detach()

    def replace(self, version: Version) -> None:
        """Weights for the dX that comes, in the place of the forward's."""
        self._replacement.update(version)

    def input_gradient(self, dy: Tensor) -> Tensor:
        if self._version:
            found, self._groups = stage_backward_input(
                [self._y], [dy], [self._x], iter(self._version.values())
            )
            self._x.grad = None
            dx = found[0]
        else:
            (dx,) = torch.autograd.grad(self._y, self._x, dy, allow_unused=True)
        return torch.zeros_like(self._x) if dx is None else dx

    def weight_gradient(self, dy: Tensor) -> Gradients:
        """The gradients of the parameters that have been used."""
        leaves = list(self._version.values())
        if self._with_dx:
            stage_backward_weight(iter(leaves), self._groups)
            found = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        else:
            found = list(torch.autograd.grad(self._y, leaves, dy, allow_unused=True))
        return {n: g for n, g in zip(self._version, found, strict=True) if g is not None}

    def _hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Where a replaced weight is saved for backward, whole or as a view, its name is saved."""
        places = {_storage(self._version[n]): n for n in self._replacement}
        if not places:
            return _same, _same
        offsets = {n: self._version[n].storage_offset() for n in self._replacement}
        replacement = self._replacement

        def pack(saved: Tensor) -> Any:
            name = places.get(_storage(saved))
            if name is None:
                return saved
            return name, saved.shape, saved.stride(), saved.storage_offset() - offsets[name]

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            name, shape, stride, offset = packed
            weight = replacement[name]
            return weight.as_strided(shape, stride, weight.storage_offset() + offset)

        return pack, unpack


def _same(saved: Any) -> Any:
    return saved


def _storage(tensor: Tensor) -> int:
    """The same for all tensors in the same memory. An address would end a copy on write."""
    return tensor.untyped_storage()._cdata


# A layer whose tasks are on several processes: exactly a Linear, or a Conv2d with groups=1


def axis(layer: nn.Module) -> int:
    """The dimension of the input's channels or features."""
    return -3 if isinstance(layer, nn.Conv2d) else -1


def input_gradient(layer: nn.Module, dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """dX for some input channels. weight: (outputs, these channels, ...), contiguous. shape: of
    the layer's whole input."""
    part = list(shape)
    part[axis(layer)] = weight.shape[1]
    if isinstance(layer, nn.Linear):
        return dy.reshape(-1, dy.shape[-1]).mm(weight).view(part)
    return _convolution(layer, dy, dy.new_empty(part), weight, [True, False, False])[0]


def weight_gradient(layer: nn.Module, dy: Tensor, x: Tensor) -> Gradients:
    """dW and db; without the values of the weight."""
    biased = layer.bias is not None
    if isinstance(layer, nn.Linear):
        rows = dy.reshape(-1, dy.shape[-1])
        found = {"weight": rows.t().mm(x.reshape(-1, x.shape[-1]))}
        return {**found, "bias": rows.sum(0)} if biased else found
    empty = x.new_empty(layer.weight.shape)
    _, dw, db = _convolution(layer, dy, x, empty, [False, True, biased])
    return {"weight": dw, "bias": db} if biased else {"weight": dw}


def _convolution(
    layer: Any, dy: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    single = x.dim() == 3
    x, dy = (x[None], dy[None]) if single else (x, dy)
    dx, dw, db = torch.ops.aten.convolution_backward(
        dy, x, weight, [layer.out_channels], layer.stride, layer.padding, layer.dilation,
        False, [0, 0], 1, wanted,
    )  # fmt: skip
    return (dx[0] if single and dx is not None else dx), dw, db
