# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of layers as matrices, and their products with inverses of factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from optfuse_layers.kfac.layers import Preconditioned


def _matrix(layer: Preconditioned, dtype: torch.dtype) -> Tensor:
    """The layer's gradient, (outputs, inputs), with that of a bias as the last column."""
    assert layer.weight.grad is not None
    matrix = layer.weight.grad.reshape(layer.outputs, layer.inputs).to(dtype)
    if layer.bias is None:
        return matrix
    assert layer.bias.grad is not None
    return torch.cat([matrix, layer.bias.grad.to(dtype)[:, None]], 1)


def _columns(layer: Preconditioned, matrix: Tensor) -> list[Tensor]:
    """The gradients of the weight and of the bias."""
    weight = matrix[:, : layer.inputs]
    return [weight] if layer.bias is None else [weight, matrix[:, layer.inputs]]


def not_finite(layers: Sequence[Preconditioned]) -> Preconditioned | None:
    """The first layer with infinities or NaN in its gradients. It takes one look at a number if
    there is none."""
    gradients = [[p.grad for p in layer.parameters() if p.grad is not None] for layer in layers]
    if _are_finite([gradient for some in gradients for gradient in some]):
        return None
    pairs = zip(layers, gradients, strict=True)
    return next(layer for layer, some in pairs if not _are_finite(some))


def _are_finite(gradients: list[Tensor]) -> bool:
    return bool(get_total_norm(gradients, math.inf).isfinite().item())


def precondition(
    layers: Sequence[Preconditioned],
    inverses: Sequence[Tensor],
    optimizer: Optimizer,
    kl_clip: float | None,
    leave: set[int],
) -> None:
    """Replaces each gradient dW by G^-1 dW A^-1 min(1, sqrt(kl_clip / |sum lr^2 v dw|)). Layers
    without a gradient, and those to leave, are left as they are. inverses: of A and G of each
    layer."""
    rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    found: list[tuple[Tensor, Tensor]] = []  # gradients, and what they are to be
    product = torch.zeros((), dtype=torch.float64, device=inverses[0].device)
    for n, layer in enumerate(layers):
        parameters = layer.parameters()
        if n in leave or any(p.grad is None for p in parameters):
            continue
        matrix = _matrix(layer, inverses[0].dtype)
        better = inverses[2 * n + 1] @ matrix @ inverses[2 * n]
        for p, old, new in zip(
            parameters, _columns(layer, matrix), _columns(layer, better), strict=True
        ):
            assert p.grad is not None
            product += rates[id(p)] ** 2 * (old * new).sum()
            found.append((p.grad, new))
    nu = 1.0 if kl_clip is None else (kl_clip / product.abs()).sqrt().clamp_max(1.0)
    for gradient, new in found:
        gradient.copy_((new * nu).view_as(gradient))
