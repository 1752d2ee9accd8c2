# SPDX-License-Identifier: BSD-3-Clause
"""The library's functions that clip and unscale all gradients in one call (shim/clipping): of plain
parameters on the CPU of which an optimizer in forward mode has some, and no other fused one has
any. Each returns None, with nothing changed, where that is not so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optfuse import _link
from optfuse._arguments.plain import are_plain
from optfuse._library.bindings import FINAL, FORWARD, Error, guard, lib
from optfuse._patches.profiling import addresses_are_noted

#: Who finds norms of float32 gradients.
NOT_TRIED, OURS, TORCHS = "not tried yet", "one pass of ours", "torch's operator"

_ops: Any = torch.ops.optfuse
_clip, _clip_with_norm = _ops.clip.default, _ops.clip_with_norm.default
_clip_value, _total_norm = _ops.clip_value.default, _ops.total_norm.default
_unscale = _ops.unscale.default


def _called(operator: Any, *args: Any) -> Any:
    """Calls the operator. The optimizers live meanwhile, of whose parameters the library uses what
    it knows: another thread may let go of one."""
    _optimizers = [link.kept() for link in list(_link.links.values())]
    return operator(*args)


def _note_marks() -> None:
    """Gradients wait to be multiplied."""
    for link in list(_link.links.values()):
        link.marked = True
    if addresses_are_noted():
        for link in list(_link.links.values()):
            link.flush()


def refuse_final(params: list[Tensor]) -> None:
    """Gradients that are gone would be left out without a word."""
    for link in list(_link.links.values()):
        if link.mode != FINAL or not guard("final_clip"):
            continue
        its = [(slot, p) for p in params if (slot := link.slot_of(p)) is not None]
        if its and all(p.grad is None for _, p in its):
            raise Error(
                f"optfuse: nothing to clip: the gradient of {link.label(its[0][0])} and "
                "all others of its optimizer have gone into their updates, which "
                "Backward(final=True) makes inside backward(). Clip each gradient by itself, in a "
                "hook: p.register_post_accumulate_grad_hook(lambda p: clip_grad_norm_(p, 1.0)), or "
                'use optfuse.fuse(optimizer, mode="forward")'
            )


def clip_norm(
    params: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor | None:
    if not are_plain(params):
        return None
    norm, some_wait = _called(_clip, params, max_norm, norm_type, error_if_nonfinite)
    if some_wait:
        _note_marks()
    return norm  # type: ignore[no-any-return]


def clip_with_norm(params: list[Tensor], max_norm: float, norm: Tensor) -> bool | None:
    if not are_plain([*params, norm]):
        return None
    some_wait = _called(_clip_with_norm, params, max_norm, norm)
    if some_wait:
        _note_marks()
    return some_wait  # type: ignore[no-any-return]


def clip_value(params: list[Tensor], limit: float) -> bool | None:
    if not are_plain(params):
        return None
    return _called(_clip_value, params, limit) or None


def total_norm(tensors: list[Tensor], norm_type: float) -> Tensor | None:
    """That of whatever tensors, as long as all fused optimizers are in forward mode."""
    modes = {link.mode for link in list(_link.links.values())}
    if modes != {FORWARD} or not are_plain(tensors):
        return None
    return _total_norm(tensors, norm_type)  # type: ignore[no-any-return]


def unscale(params: list[Tensor], factor: Tensor) -> bool | None:
    """Whether all were finite."""
    if not are_plain(params):
        return None
    finite, some_wait = _called(_unscale, params, factor)
    if some_wait:
        _note_marks()
    return finite  # type: ignore[no-any-return]


def norms_are() -> str:
    """Who finds norms, as summary() says."""
    return (NOT_TRIED, OURS, TORCHS)[lib.of_shim_norms_tried()]
