# SPDX-License-Identifier: BSD-3-Clause
"""For the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import importlib
from typing import Any

from optfuse._arguments.check import argument
from optfuse._arguments.modes import MODE, Backward, Forward, mode_of
from optfuse._arguments.wrappers import unwrapped
from optfuse._fuse import fuse
from optfuse._library.bindings import Error
from optfuse._options import is_disabled, owner_of

_TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback


class OptfuseCallback(_TrainerCallback):  # type: ignore[misc]
    """Fuses the Trainer's optimizer when training begins:
    Trainer(callbacks=[OptfuseCallback()])."""

    def __init__(self, mode: str | Forward | Backward = "forward", **options: Any) -> None:
        """Takes mode and options as fuse() does."""
        if isinstance(mode_of(argument("OptfuseCallback", "mode", mode, MODE)), Backward):
            raise Error(
                "optfuse: the Trainer reads the norm of all gradients after each backward pass, "
                "even where it clips none, and backward mode has used them by then; use "
                'OptfuseCallback(mode="forward")'
            )
        self._options = {"mode": mode, **options}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any
    ) -> None:
        if not is_disabled() and owner_of(unwrapped(optimizer)) is None:  # by an earlier train()
            fuse(optimizer, **self._options)
