# SPDX-License-Identifier: BSD-3-Clause
"""In the script's process: fuses its optimizers as `python -m optfuse run` does, and times them or
looks at their parameters."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from optfuse._library.bindings import BACKWARD
from optfuse._link import link_of
from optfuse._options import is_fused, is_recorded
from optfuse_tools.ab.variants import reference_flags
from optfuse_tools.run import session
from optfuse_tools.script_ab import probe


class Session(probe.Session):
    """Fuses the optimizers of one process."""

    def __init__(self, settings: dict[str, Any], models: session.Models) -> None:
        super().__init__(settings, models)
        self._fuses = session.Session(settings, models)
        self._flags: list[dict[str, bool | None]] = []
        self._modes: dict[int, str] = {}  # of optimizers that have stepped

    def start_anew(self) -> None:
        super().start_anew()
        self._fuses.start_anew()

    def prepare(self, optimizer: Optimizer, where: str) -> None:
        self._flags.append(_missing_flags(optimizer))
        self._fuses.made(optimizer, where)

    def wrapped(self, model: Any) -> None:
        self._fuses.wrapped(model)
        self.put_clocks()

    def look(self, optimizer: Optimizer, index: int) -> None:
        self._modes[index] = _mode(optimizer)

    def facts(self) -> dict[str, Any]:
        return {
            "modes": sorted(self._modes.items()) if self._settings["looks"] else None,
            "said": self._fuses.lines,
            "given_up": self._fuses.given_up,
            "flags": self._flags,
        }


def _mode(optimizer: Optimizer) -> str:
    """Or nothing: not fused."""
    if not is_fused(optimizer):
        return "forward" if is_recorded(optimizer) else ""
    return "backward" if link_of(optimizer).mode == BACKWARD else "forward"


def _missing_flags(optimizer: Optimizer) -> dict[str, bool | None]:
    """Flags that make it the reference; empty: the optimizer is the reference as written."""
    flags = reference_flags(optimizer)
    fused = flags.get("fused") and all(group["fused"] for group in optimizer.param_groups)
    return {} if fused else flags
