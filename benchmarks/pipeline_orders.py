# SPDX-License-Identifier: BSD-3-Clause
"""The orders of torch.distributed.pipelining's schedules, for simulation: their lists of actions,
as tasks of a plan. torch's backward of a stage is one action, whose message leaves at its end: dW,
then dX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from optfuse_layers.pipeline.plan import KINDS

Row = tuple[int, int, int, int]  # kind, layer, batch, process
FORWARD, INPUT, WEIGHT, UPDATE = (
    KINDS.index(kind) for kind in ("forward", "input_gradient", "weight_gradient", "update")
)
TURNS = 2  # stages a process of those that have several
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")


def process_of(name: str, stage: int, processes: int) -> int:
    if name in LOOPED:
        return stage % processes
    return stage if stage < processes else 2 * processes - 1 - stage


def actions(name: str, processes: int, micro_batches: int) -> dict[int, list[Any]]:
    """By processes, from the class's own method, which asks for these attributes alone."""
    rounds = max(1, micro_batches // processes)
    asked = SimpleNamespace(
        pp_group_size=processes,
        n_local_stages=TURNS,
        num_stages=TURNS * processes,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    of = getattr(schedules, f"Schedule{name}")
    return {p: of._calculate_single_rank_operations(asked, p) for p in range(processes)}


def tasks(of: dict[int, list[Any]], micro_batches: int) -> Iterator[Row]:
    """Stage s is layer s + 1: layer 0 takes no time, so that stage 0 has a dX."""
    for process, one in of.items():
        for action in _flat(one):
            layer, batch = action.stage_index + 1, action.microbatch_index
            for kind in _kinds(action.computation_type.name):
                if (kind, layer) == (FORWARD, 1):
                    yield FORWARD, 0, batch, process
                yield kind, layer, batch, process
                if (kind, layer) == (INPUT, 1):
                    yield WEIGHT, 0, batch, process
                    if batch == micro_batches - 1:
                        yield UPDATE, 0, batch, process
                if kind == WEIGHT and batch == micro_batches - 1:
                    yield UPDATE, layer, batch, process


def _flat(of: Iterable[Any]) -> Iterator[Any]:
    for action in of:
        if action is not None:
            yield from action.sub_actions or (action,)


def _kinds(name: str) -> tuple[int, ...]:
    return {
        "FORWARD": (FORWARD,),
        "FULL_BACKWARD": (WEIGHT, INPUT),
        "BACKWARD_INPUT": (INPUT,),
        "BACKWARD_WEIGHT": (WEIGHT,),
    }[name]


def with_whole_backwards(rows: list[Row]) -> list[Row]:
    """The dW of each layer before its dX where it came right after, of plans with a layer a
    stage."""
    found = list(rows)
    for i, (first, second) in enumerate(zip(rows, rows[1:], strict=False)):
        if (first[0], second[0]) == (INPUT, WEIGHT) and first[1:] == second[1:]:
            found[i], found[i + 1] = second, first
    return found
