# SPDX-License-Identifier: BSD-3-Clause
"""Whether a run can be compared with others, and why not."""

from __future__ import annotations

from typing import Any

from optfuse_tools.script_ab.child import Run, Script, Variant


class CannotCompare(Exception):
    """A script can't be compared. The text says why, and what to do."""


def checked(script: Script, done: Run) -> dict[str, Any]:
    """The findings of the probe in a run as written. Raises CannotCompare."""
    name, found = script.name, done.found
    if done.status:
        raise CannotCompare(
            f"{name} as written {done.ending()} after {_steps(done)} steps. Its last lines:\n"
            f"{done.output}"
        )
    if done.elsewhere:
        raise CannotCompare(
            f"{name} trains in processes that it starts, and ab follows the script's own; start "
            "it without a launcher, so that it trains in one process"
        )
    if found is None or not found["optimizers"]:
        raise CannotCompare(
            f"{name} made no torch.optim.Optimizer (or ended by os._exit()), so there is nothing "
            "to compare"
        )
    if found["processes"] > 1:
        raise CannotCompare(
            f"{name} is one of {found['processes']} processes of torch.distributed; ab compares "
            "training in one process"
        )
    if _steps(done) < script.fewest_steps:
        raise CannotCompare(
            f"{name} took {_steps(done)} steps of an optimizer; ab needs {script.fewest_steps}, "
            "the first of which are warm-up. Give it more data or epochs"
        )
    return found


def why_left_out(script: Script, variant: Variant, done: Run) -> str:
    """Nothing: it can be compared."""
    if done.status or done.found is None:
        return f"{done.ending()}: {without_prefix(done.last_words())}"
    if _steps(done) < script.fewest_steps:
        return f"the script took {_steps(done)} steps with it"
    modes = done.found.get("modes")
    if modes is None or variant.mode in (mode for _, mode in modes):
        return ""
    said = [without_prefix(text) for text in done.found["said"]]
    return said[0] if said else "no optimizer was fused"


def _steps(done: Run) -> int:
    """The steps of the optimizer that took most."""
    return max((one["steps"] for one in done.found["optimizers"]), default=0) if done.found else 0


def without_prefix(text: str) -> str:
    """Without the beginning that every message of ours has."""
    return text.removeprefix("optfuse.Error: ").removeprefix("optfuse: ")
