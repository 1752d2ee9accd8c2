# SPDX-License-Identifier: BSD-3-Clause
"""Compares the weights of a script's variants, and takes their times."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from optfuse import __version__
from optfuse._library import machine
from optfuse_tools.ab.progress import Progress
from optfuse_tools.script_ab.child import Script, Variant
from optfuse_tools.script_ab.result import AS_WRITTEN, Comparison, judge
from optfuse_tools.script_ab.runs import CannotCompare
from optfuse_tools.script_ab.times import Times
from optfuse_tools.script_ab.weights import Weights


def _circumstances(script: Script, written: dict[str, Any]) -> dict[str, Any]:
    """For whoever reads the report later. written: what a run as written has found."""
    return {
        "seed": script.seed,
        "optfuse": __version__,
        "date": machine.date(),
        "cpu": machine.processor(),
        "command": f"python {shlex.join(script.arguments)}",
        **{name: written[name] for name in ("torch", "python", "threads", "gpu")},
    }


def compare(
    script: Script,
    modes: Sequence[str],
    rounds: int,
    options: dict[str, Any],
    progress: Progress,
) -> Comparison:
    """options: as fuse_settings() gives them. Raises CannotCompare."""
    weights = Weights(script, progress)
    written = weights.as_written()
    fused = [Variant(f"{mode} fusion", mode, fuse=options) for mode in modes]
    flags = [weights.fused(variant) for variant in fused]
    if all(weights[variant.name].note for variant in fused):
        reasons = "; ".join(f"{v.name}: {weights[v.name].note}" for v in fused)
        raise CannotCompare(f"{script.name} can't be fused. {reasons}")
    weights.by_flags(next(filter(None, flags), []))
    times = Times(script, progress, written)
    times.take([row for row in weights.rows if not row.note], weights.variants, rounds)
    weights.compare()
    for row in weights.rows:
        if not row.note:
            judge(row, weights[weights.reference], weights[AS_WRITTEN])
    settings = {
        "rounds": rounds,
        "warm_up": times.warm_up,
        "timed_steps": times.counted,
        **_circumstances(script, written),
    }
    made = [f"{o['name']} ({o['where']}, {o['steps']} steps)" for o in written["optimizers"]]
    return Comparison(
        script.name,
        weights.rows,
        weights.reference,
        weights.differs_from_itself,
        max(one["steps"] for one in written["optimizers"]),
        made,
        settings,
    )
