# SPDX-License-Identifier: BSD-3-Clause
"""Public names and commands, and the modules that have them. Each module is imported when a name of
it is first asked for. Those of optfuse_layers and optfuse_tools, the packages beside this one, are
named here and nowhere else in it: a script that only fuses its optimizer loads neither. This module
imports neither torch nor the library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

#: By public modules: where each of their names is.
HOMES = {
    "optfuse": {
        "accumulate": "optfuse._accumulate",
        **dict.fromkeys(("Backward", "DDPModel", "Delay", "Forward"), "optfuse._arguments.modes"),
        "clip_grad_norm_": "optfuse._clipping.clip_norm",
        **dict.fromkeys(("flush", "fuse", "unfuse"), "optfuse._fuse"),
        "Error": "optfuse._library.bindings",
        "keep_memory": "optfuse._process",
        "masters": "optfuse._masters",
        "random_bits": "optfuse._random_bits",
        "register": "optfuse._registered",
        **dict.fromkeys(("Summary", "explain", "summary"), "optfuse._summary"),
        "optim": "optfuse",
        "pipeline": "optfuse",
        "drain": "optfuse_layers.delay.delayed_updates",
        **dict.fromkeys(("KFAC", "KFACSummary", "kfac"), "optfuse_layers.kfac.kfac"),
        **dict.fromkeys(("Reordering", "reorder"), "optfuse_layers.reorder.reorder"),
        "ab": "optfuse_tools.ab.ab",
    },
    "optfuse.pipeline": {
        **dict.fromkeys(
            ("PlannedLayer", "Place", "PipelinePlan", "Simulated", "Task"),
            "optfuse_layers.pipeline.plan",
        ),
        "plan": "optfuse_layers.pipeline.planning",
        "Pipeline": "optfuse_layers.pipeline.runtime",
    },
}


def resolver_of(module: str) -> Callable[[str], Any]:
    """The __getattr__() of a public module."""

    def resolve(name: str) -> Any:
        home = HOMES[module].get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if home == module:
            return importlib.import_module(f"{module}.{name}")
        found = getattr(importlib.import_module(home), name)
        vars(sys.modules[module])[name] = found  # the next time nobody asks here
        return found

    return resolve


def commands() -> Iterator[ModuleType]:
    """The commands of `python -m optfuse`."""
    for name in ("run", "script_ab", "doctor"):
        yield importlib.import_module(f"optfuse_tools.{name}.command")


def delays_of(delay: Any, optimizer: Any) -> Any:
    """Forward(delay=...) for one optimizer."""
    return importlib.import_module(HOMES["optfuse"]["drain"]).delays_of(delay, optimizer)


def awaited_later() -> Any:
    """The kind of reduction that Forward(ddp=...) asks for."""
    return importlib.import_module("optfuse_layers.reorder.awaited_reduction").AwaitedLater
