# SPDX-License-Identifier: BSD-3-Clause
"""Runs optfuse's promises against stock PyTorch on one device, without pytest.

    scenarios.py bits --device cuda             bits of fused=True over 200 steps
    scenarios.py transparency --device cuda     nobody can see a pending update

Exit status 1 if a promise was broken, 2 if nothing was run."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import bits  # noqa: F401 - each module adds its scenarios
import graphs  # noqa: F401
import harness
import memory
import own_rules  # noqa: F401
import reads  # noqa: F401
import recorded  # noqa: F401
import streams  # noqa: F401
import torch
import training  # noqa: F401
from harness import FAILED, On, Outcome, Scenario, play

PARTS = {
    "bits": ("bits", "own_rules"),  # the longest last
    "recorded": ("recorded",),
    "transparency": ("reads", "training", "streams", "graphs", "memory"),
}
ODD = "no scenario was run"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=harness.BOTH, default="cuda")
    parser.add_argument("--quick", action="store_true", help="leave out what is slow")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="scenarios whose name holds this, or that"
    )
    parser.add_argument("--mode", choices=harness.MODES, help="only this one")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th, from the I-th")
    parser.add_argument("--json", type=Path, help="where the outcomes go, too")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def chosen_ones(chosen: argparse.Namespace) -> list[tuple[Scenario, str]]:
    every = [one for module in PARTS[chosen.part] for one in harness.SCENARIOS[module]]
    pairs = [
        (one, mode)
        for one in every
        for mode in one.modes
        if chosen.device in one.devices
        and not (chosen.quick and one.slow)
        and any(text in one.name for text in chosen.only or [""])
        and chosen.mode in (None, mode)
    ]
    index, of = map(int, chosen.share.split("/"))
    return pairs[index::of]


def repeatable(device: str) -> None:
    """Stock must give the same bits twice, or there is nothing to compare with."""
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or streams differ
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.cuda.init()


def summary(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))


def main() -> int:
    chosen = arguments()
    pairs = chosen_ones(chosen)
    if chosen.list:
        print("\n".join(f"{one.name} ({mode})" for one, mode in pairs))
        return 0
    repeatable(chosen.device)
    gc.freeze()  # what is loaded stays; collecting after each needn't look at it
    outcomes = []
    for one, mode in pairs:
        outcome = play(one, On(torch.device(chosen.device), mode, chosen.quick))
        outcomes.append(outcome)
        print(outcome, flush=True)
        if chosen.json:  # after each, so that a kill at the time limit leaves the others
            facts = {"outcomes": [asdict(o) for o in outcomes], "memory": memory.PEAKS}
            chosen.json.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    print(summary(outcomes) or ODD, flush=True)
    if not outcomes:
        return 2
    return 1 if any(o.verdict == FAILED for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
