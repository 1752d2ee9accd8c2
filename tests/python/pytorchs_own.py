# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's own functions in the place of those that optfuse has put there for fused optimizers, so
that a run with stock is stock's alone."""

import contextlib

from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.swa_utils import AveragedModel

from optfuse import _averages
from optfuse._clipping import torch_functions as own

PLACES = (
    (utils, "clip_grad_norm_", own.stock_clip_grad_norm_),
    (utils, "clip_grad_value_", own.stock_clip_grad_value_),
    (utils, "get_total_norm", own.stock_get_total_norm),
    (utils, "clip_grads_with_norm_", own.stock_clip_grads_with_norm_),
    (clip_grad, "_get_total_norm", own.stock_get_total_norm),
    (clip_grad, "_clip_grads_with_norm_", own.stock_clip_grads_with_norm_),
    (AveragedModel, "update_parameters", _averages.stock_update_parameters),
)


@contextlib.contextmanager
def pytorchs_own():
    replaced = [getattr(owner, name) for owner, name, _ in PLACES]
    for owner, name, function in PLACES:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(PLACES, replaced, strict=True):
            setattr(owner, name, function)
