# SPDX-License-Identifier: BSD-3-Clause
"""Clipping by the norm of all gradients, folded into the update: one pass that
reads the gradients, and none that writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.optim import Optimizer

from optfuse import _link
from optfuse._native import BACKWARD, Error, guard

_Parts = dict[int, list[int]]  # plan -> slots


def _listed(parameters: Any) -> list[Tensor]:
    if isinstance(parameters, Optimizer):
        return [p for group in parameters.param_groups for p in group["params"]]
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _owner(param: Tensor, links: list[_link.Link]) -> tuple[_link.Link, int] | None:
    for link in links:
        slot = link.slot_of(param)
        if slot is not None:
            return link, slot
    return None


def _split(params: list[Tensor]) -> tuple[_Parts, list[Tensor]]:
    """The slots of each plan, and the parameters that are not fused."""
    links = sorted(_link.links.values(), key=lambda link: link.mode != BACKWARD)
    parts: _Parts = {}
    plain = []
    for param in params:
        owner = _owner(param, links)
        if owner is None:
            plain.append(param)
            continue
        link, slot = owner
        if link.mode == BACKWARD and guard("clip"):
            raise Error(
                f"optfuse: clip_grad_norm_() needs all gradients at once, but {link.label(slot)} "
                "belongs to an optimizer in backward mode, whose updates don't wait for them; "
                'use optfuse.fuse(optimizer, mode="forward")'
            )
        if param.grad is not None:
            parts.setdefault(link.plan, []).append(slot)
    return parts, plain


@torch._dynamo.disable
@torch.no_grad()
def clip_grad_norm_(
    parameters: Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ without its pass over the gradients.

    parameters: an optimizer, or parameters of any shape. Gradients of fused
        ones (forward mode, dense, CPU; float32, float64, bfloat16, float16) are
        multiplied where the update reads them, or at their first use if that
        comes earlier; all others at once, by torch's own function.
    max_norm, norm_type, error_if_nonfinite, foreach: as torch's.

    Returns the total norm, a 0-dim tensor of the dtype that torch gives it. The
    norm, the gradients as anyone sees them and the updates have the bits of
    torch's function followed by step().

    Raises optfuse.Error for a parameter of an optimizer in backward mode, and
    what torch's function raises, before any gradient has changed.
    """
    params = _listed(parameters)
    parts, plain = _split(params)
    if not parts:
        return torch.nn.utils.clip_grad_norm_(
            params, max_norm, norm_type, error_if_nonfinite, foreach
        )
    grads = [p.grad for p in params if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    if factor.item() != 1.0:
        for plan, slots in parts.items():
            _link.links[plan].scale(slots, factor)
    if plain:
        torch.nn.utils.clip_grads_with_norm_(plain, max_norm, norm, foreach)
    return norm
