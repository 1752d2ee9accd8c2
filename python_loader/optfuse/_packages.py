# SPDX-License-Identifier: BSD-3-Clause
"""Names and commands that optfuse_layers and optfuse_tools, the packages beside this one, have for
it. They are imported here and nowhere else, when something of theirs is first asked for: a script
that only fuses its optimizer loads neither. This module imports neither torch nor the library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_DELAY = "optfuse_layers.delay.delayed_updates"
_KFAC = "optfuse_layers.kfac.kfac"
_PLAN = "optfuse_layers.pipeline.plan"
_REORDER = "optfuse_layers.reorder.reorder"

#: Public names by the modules of this package that they are of, and where they are.
_NAMES = {
    "optfuse": {
        **dict.fromkeys(("KFAC", "KFACSummary", "kfac"), _KFAC),
        **dict.fromkeys(("Reordering", "reorder"), _REORDER),
        "ab": "optfuse_tools.ab.ab",
        "drain": _DELAY,
    },
    "optfuse.pipeline": {
        **dict.fromkeys(("Layer", "Place", "Plan", "Simulated", "Task"), _PLAN),
        "plan": "optfuse_layers.pipeline.planning",
        "Pipeline": "optfuse_layers.pipeline.runtime",
    },
}


def names_of(module: str) -> Callable[[str], Any]:
    """The __getattr__() of a module of this package."""

    def get(name: str) -> Any:
        if name not in _NAMES[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_NAMES[module][name]), name)

    return get


def commands() -> Iterator[ModuleType]:
    """The commands of `python -m optfuse`."""
    for name in ("run", "script_ab", "doctor"):
        yield importlib.import_module(f"optfuse_tools.{name}.command")


def delayed_updates() -> Any:
    """The module that Forward(delay=...) is about."""
    return importlib.import_module(_DELAY)
