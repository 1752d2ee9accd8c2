# SPDX-License-Identifier: BSD-3-Clause
"""For Lightning's Trainer, where configure_optimizers() can't be edited."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from optfuse._arguments.check import argument
from optfuse._arguments.modes import MODE, Backward, Forward, mode_of
from optfuse._fuse import fuse
from optfuse._options import owner_of

_ONE = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
_Callback: Any = importlib.import_module(_ONE).Callback


class OptfuseCallback(_Callback):  # type: ignore[misc]
    """Fuses the module's optimizers when fit() has made them:
    Trainer(callbacks=[OptfuseCallback()])."""

    def __init__(self, mode: str | Forward | Backward = "forward", **options: Any) -> None:
        """Takes mode and options as fuse() does. In backward mode a DistributedDataParallel model
        is found."""
        super().__init__()
        self._mode = mode_of(argument("OptfuseCallback", "mode", mode, MODE))
        self._options = options

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        mode, model = self._mode, trainer.strategy.model
        if isinstance(mode, Backward) and isinstance(model, DistributedDataParallel):
            mode = mode.behind(model)
        for optimizer in trainer.strategy.optimizers:
            if owner_of(optimizer) is None:
                fuse(optimizer, mode, **self._options)
        # Lightning wraps each in a subclass of its class, which is another now.
        trainer.strategy.optimizers = trainer.strategy.optimizers
