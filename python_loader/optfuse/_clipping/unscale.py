# SPDX-License-Identifier: BSD-3-Clause
"""GradScaler in forward mode: unscale_() looks at the gradients once, for
infinities and NaN and for the norms that clipping may ask for, and leaves the
division of large ones by the scale to whoever reads them next: mostly the update.

The scaler itself is stock's. It works without this too, and does wherever a
gradient is not one that our pass can read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._clipping import one_call
from optfuse._clipping.preconditioners import kfac_of
from optfuse._library.bindings import FORWARD
from optfuse._link import link_of
from optfuse._options import is_fused
from optfuse._patches.replacing import replace


def _folds(optimizer: Optimizer, *tensors: Tensor) -> bool:
    if not is_fused(optimizer):
        return False
    link = link_of(optimizer)
    return link.options.fold and link.mode == FORWARD and all(t.is_cpu for t in tensors)


def _unscale(optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor) -> bool:
    """Whether this was done here."""
    finite = one_call.unscale(parameters_of(optimizer), inv_scale)
    if finite is False:
        found_inf.fill_(1.0)
    return finite is not None


def install() -> None:
    """Once per process."""
    stock = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(stock)
    def unscale_grads(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        kfac = kfac_of(optimizer)
        if kfac is not None:
            kfac.scale = self.get_scale()
        if _folds(optimizer, inv_scale, found_inf) and _unscale(optimizer, inv_scale, found_inf):
            found = {found_inf.device: found_inf}
        else:
            found = stock(self, optimizer, inv_scale, found_inf, allow_fp16)
        if kfac is not None and any(inf.item() for inf in found.values()):
            kfac.discard()  # GradScaler.step() will leave out that of the optimizer
        return found

    replace(torch.amp.GradScaler, "_unscale_grads_", unscale_grads)
