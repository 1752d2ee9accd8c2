# SPDX-License-Identifier: BSD-3-Clause
"""Backward fusion and activation checkpointing: a block that is computed again inside backward
must not read weights that are updated already."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import checkpoint

from optfuse._library.bindings import check, lib
from optfuse._patches.replacing import replace

Begin = Callable[[], object]  # returns what lives until the end


def install(plans_of: Callable[[], tuple[Iterable[object], list[int]]]) -> None:
    """Once per process. plans_of: the optimizers in backward mode, and their plans."""

    def begin() -> object:
        kept, plans = plans_of()
        check(lib.of_shim_begin_recompute((ctypes.c_void_p * len(plans))(*plans), len(plans)))
        return kept

    _mark_in_nested_backward(begin)
    hooks = getattr(checkpoint, "_recomputation_hook", None)
    if hooks is not None:  # else the list of patches warns
        _mark_in_hooks(hooks, begin)


def _mark_in_nested_backward(begin: Begin) -> None:
    """For reentrant checkpoints: in the block alone, not in the backward pass that follows it."""
    nested = checkpoint.CheckpointFunction
    backward = nested.backward

    @functools.wraps(backward)
    def backward_in_between(ctx: Any, *grads: Any) -> Any:
        function = ctx.run_function

        def marked(*arguments: Any) -> Any:
            kept = begin()
            try:
                return function(*arguments)
            finally:
                lib.of_shim_end_recompute()
                del kept

        ctx.run_function = marked
        try:
            return backward(ctx, *grads)
        finally:
            ctx.run_function = function

    replace(nested, "backward", staticmethod(backward_in_between))


def _mark_in_hooks(hooks: Any, begin: Begin) -> None:
    enter, leave = hooks.__enter__, hooks.__exit__

    @functools.wraps(enter)
    def enter_and_begin(self: Any) -> Any:
        entered = enter(self)
        try:
            self._optfuse_optimizers = begin()
        except BaseException:
            leave(self, None, None, None)
            raise
        return entered

    @functools.wraps(leave)
    def leave_and_end(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            lib.of_shim_end_recompute()
            del self._optfuse_optimizers

    replace(hooks, "__enter__", enter_and_begin)
    replace(hooks, "__exit__", leave_and_end)
