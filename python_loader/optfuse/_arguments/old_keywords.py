# SPDX-License-Identifier: BSD-3-Clause
"""Keywords that fuse() had before its modes were objects. They work in this release, with a
DeprecationWarning."""

from __future__ import annotations

from typing import Any

from optfuse._arguments.check import argument, one_of
from optfuse._arguments.modes import Backward, DDPModel, Delay, Forward
from optfuse._library.bindings import Error
from optfuse._library.log import warn

NAMES = ("accumulate", "side_stream", "max_grad_norm", "fold", "delay", "weights")
NAMES += ("ddp", "comm_hook", "await_reduction")
_AWAIT = one_of("backward", "first_use")


def with_old_keywords(
    mode: Forward | Backward, old: dict[str, Any], stacklevel: int
) -> Forward | Backward:
    """The mode with what the old keywords say. stacklevel: as warnings.warn() has it, from the
    caller of this function. Raises optfuse.Error, or TypeError for a keyword
    that fuse() never had."""
    unknown = [name for name in old if name not in NAMES]
    if unknown:
        raise TypeError(f"fuse() got an unexpected keyword argument {unknown[0]!r}")
    kind = type(mode)
    if vars(mode) != vars(kind()):
        raise Error(
            f"optfuse: fuse() got mode=optfuse.{kind.__name__}(...) and {', '.join(old)} beside "
            "it; name all options in the mode"
        )
    made = _made(kind, **old)
    warn(
        f"fuse() will lose {', '.join(old)} in the next release: write "
        f"optfuse.fuse(optimizer, optfuse.{kind.__name__}(...)), with what goes together in "
        "optfuse.DDPModel(model, comm_hook) and optfuse.Delay(steps, weights)",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
    return made


def _made(
    kind: type,
    accumulate: Any = 1,
    side_stream: Any = False,
    max_grad_norm: Any = None,
    fold: Any = True,
    ddp: Any = None,
    comm_hook: Any = None,
    await_reduction: Any = "backward",
    delay: Any = None,
    weights: Any = "stash",
) -> Forward | Backward:
    """accumulate, fold and ddp may be given in the mode that does not look at them."""
    late = argument("fuse", "await_reduction", await_reduction, _AWAIT) == "first_use"
    reduction = None if ddp is None else DDPModel(ddp, comm_hook)
    backward = Backward(accumulate=accumulate, side_stream=side_stream, ddp=reduction)
    forward = Forward(
        max_grad_norm=max_grad_norm,
        fold=fold,
        ddp=reduction if late else None,
        delay=None if delay is None else Delay(delay, weights),
    )
    needs_model = (late or comm_hook is not None) and ddp is None
    if needs_model or (comm_hook is not None and kind is Forward and not late):
        raise Error(
            "optfuse: comm_hook= and await_reduction= go with a model: "
            "optfuse.Backward(ddp=optfuse.DDPModel(model, comm_hook)), or the same in "
            "optfuse.Forward(...), which awaits its gradients at their first use; otherwise call "
            "model.register_comm_hook()"
        )
    if weights != "stash" and delay is None:
        raise Error(
            f"optfuse: weights={weights!r} goes with a delay: optfuse.Delay(steps, weights)"
        )
    if kind is Backward:
        _refuse("Forward", max_grad_norm=max_grad_norm, delay=delay, await_reduction=late or None)
        return backward
    _refuse("Backward", side_stream=backward.side_stream or None)
    return forward


def _refuse(home: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise Error(f"optfuse: fuse() got {name}=, which belongs to optfuse.{home}(...) only")
