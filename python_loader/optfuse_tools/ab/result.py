# SPDX-License-Identifier: BSD-3-Clause
"""The result of ab(): medians with their intervals, equality by bits, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from optfuse._bits import same_bits
from optfuse._table import aligned
from optfuse_tools.ab.interval import GAIN, LOSS, Interval, median_interval
from optfuse_tools.ab.page_faults import WORTH_SAYING, Usage, advice, share
from optfuse_tools.ab.verdict import on_speed

FEWEST_ROUNDS = 5  # of which something can be said about their scatter
STOCK = ("default", "foreach=True", "fused=True", "reference")  # PyTorch's own implementations


@dataclass
class Row:
    """The result of one variant in ab(). `note` says why a variant could not run."""

    name: str
    note: str = ""
    ms: Interval | None = None  # per iteration
    host_ms: Interval | None = None  # per iteration; on a GPU, until all was issued
    device_ms: Interval | None = None  # per iteration; the GPU's own time
    speed: Interval | None = None  # baseline's time / this one's, round by round
    final_loss: float | None = None
    equal_bits: bool | None = None  # parameters against the reference's, at the end
    max_difference: float | None = None  # parameters against the default variant's
    trained: bool | None = None  # whether a parameter changed at all
    page_faults: float | None = None  # per iteration; memory the allocator gave back and took again
    fault_share: float | None = None  # of the processor's time, in page faults
    peak_mb: float | None = None  # resident memory of the process, while this variant ran
    rounds_ms: list[float] = field(default_factory=list)  # each round, per iteration
    rounds_host_ms: list[float] = field(default_factory=list)  # on a GPU, like rounds_ms
    rounds_device_ms: list[float] = field(default_factory=list)
    rounds_faults: list[float] = field(default_factory=list)  # each round, per iteration
    losses: list[float] = field(default_factory=list)  # each iteration, warm-up included
    used: Usage = field(default_factory=Usage)  # in all timed iterations


@dataclass
class Comparison:
    """The result of ab(); print it, or take to_dict() to JSON."""

    rows: list[Row]
    baseline: str  # of `speed`
    reference: str  # of `equal_bits`
    steps: int  # each variant took
    settings: dict[str, Any]
    warnings: list[str] = field(default_factory=list)  # why it may say less than it seems to
    wrong: list[str] = field(default_factory=list)  # weights that are far from the reference's

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self)}

    @property
    def verdict(self) -> str:
        """In one line; or nothing, where all that ran is PyTorch's own."""
        others = (*STOCK, self.baseline)
        judged = [row for row in self.rows if row.equal_bits is not None and row.name not in others]
        timed = [(row.speed.median, row.name, row.speed) for row in judged if row.speed]
        if not timed:
            return ""
        equal = [row.name for row in judged if row.equal_bits]
        weights = f"weights equal those of {self.reference} bit by bit"
        if self.wrong:
            weights = "; ".join(self.wrong)
        elif len(equal) < len(judged):
            differ = [row.name for row in judged if not row.equal_bits]
            weights = f"weights of {', '.join(differ)} have other bits than {self.reference}'s"
        _, name, speed = max(timed, key=lambda one: one[0])
        rounds = self.settings.get("rounds", FEWEST_ROUNDS)
        return f"{weights}; {on_speed(name, speed, self.baseline, rounds, FEWEST_ROUNDS)}"

    def __str__(self) -> str:
        head: tuple[str, ...] = (
            "variant",
            "ms an iteration",
            f"speed, {self.baseline} = 1",
            "final loss",
        )
        on_gpu = any(row.host_ms for row in self.rows)
        head += ("host ms",) if on_gpu else ()
        head += ("peak MB", f"bits of {self.reference}", "from default")
        cells = [head, *(_cells(row, on_gpu) for row in self.rows)]
        above = [f"verdict: {self.verdict}", ""] if self.verdict else []
        return "\n".join(above + aligned(cells) + list(_legend(self)))


def _legend(compared: Comparison) -> Iterator[str]:
    yield from (f"{row.name} left out: {row.note}" for row in compared.rows if row.note)
    names = [row.name for row in compared.rows if not row.note]
    if "default" in names:
        yield "default: the optimizer as written. from default: the largest distance of a weight."
    if "reference" in names:
        yield "reference: the flags of PyTorch whose bits fusion has (docs/numerics.md)."
    if any(row.equal_bits is False for row in compared.rows):
        yield (
            f"differ: at the end some weight has other bits than under {compared.reference}. "
            "PyTorch's\nimplementations round differently from each other; fusion does not, "
            "unless training itself is random."
        )
    if any(row.peak_mb for row in compared.rows):
        yield "peak MB: of the process while this variant ran; it holds the models of all variants."
    yield f"Medians with 95 % bootstrap intervals; {compared.steps} steps each."
    yield from in_page_faults(compared.rows)
    machine = [str(compared.settings[k]) for k in ("date", "cpu") if k in compared.settings]
    if machine:
        counts = [f"{compared.settings[k]} {k}" for k in ("threads",)]
        torch_here = f"torch {compared.settings['torch']}"
        yield f"{', '.join([*machine, *counts, torch_here])}."
    yield from (f"warning: {text}" for text in compared.warnings)


class Faulting(Protocol):
    """The part of a row that in_page_faults() reads."""

    name: str
    fault_share: float | None


def in_page_faults(rows: Sequence[Faulting]) -> Iterator[str]:
    """Where they take a share that is worth a word, that of the variant with the largest."""
    shares = [(row.fault_share, row.name) for row in rows if row.fault_share]
    found, name = max(shares, default=(0.0, ""))
    if found > WORTH_SAYING:
        yield advice(found, f"under {name}")


class Judged(Protocol):
    """The part of a row that undecided() reads."""

    name: str
    speed: Interval | None  # against the baseline


def undecided(rows: Sequence[Judged], rounds: int, fewest: int) -> Iterator[str]:
    """Where the intervals say nothing: of too few rounds, or from a loss to a gain."""
    if rounds < fewest:
        yield f"rounds={rounds} is too few for intervals: take at least {fewest}"
    wide = [r.name for r in rows if r.speed and r.speed.low <= LOSS and r.speed.high >= GAIN]
    if wide:
        yield (
            f"the speed of {', '.join(wide)} is not known, its interval includes {LOSS} and "
            f"{GAIN}: take more rounds or iterations, or a machine with nothing else to do"
        )


def _cells(row: Row, on_gpu: bool) -> tuple[str, ...]:
    if row.ms is None:
        return (row.name, *("-",) * (7 if on_gpu else 6))
    loss = "-" if row.final_loss is None else f"{row.final_loss:.6g}"
    bits = {None: "-", True: "equal", False: "differ"}[row.equal_bits]
    far = "-" if row.max_difference is None else f"{row.max_difference:.1e}"
    host = (str(row.host_ms or "-"),) if on_gpu else ()
    peak = "-" if row.peak_mb is None else f"{row.peak_mb:.0f}"
    return (row.name, str(row.ms), str(row.speed or "-"), loss, *host, peak, bits, far)


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    a, b = real(a).double(), real(b).double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).max().item()


def equal_bits(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def judge(row: Row, baseline: Row) -> None:
    """Fills in what follows from the row's own times and losses and the baseline's times."""
    row.ms = median_interval(row.rounds_ms)
    if row.rounds_host_ms:
        row.host_ms = median_interval(row.rounds_host_ms)
        row.device_ms = median_interval(row.rounds_device_ms)
    pairs = zip(baseline.rounds_ms, row.rounds_ms, strict=True)
    row.speed = median_interval([theirs / own for theirs, own in pairs])
    row.page_faults = statistics.median(row.rounds_faults)
    row.fault_share = share(row.used)
    row.final_loss = row.losses[-1] if row.losses else None


def compare_parameters(
    row: Row,
    own: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    default: Sequence[torch.Tensor],
) -> None:
    """Fills in how far the parameters are from the reference's and the default variant's."""
    row.equal_bits = equal_bits(own, reference)
    row.max_difference = max(_difference(a, b) for a, b in zip(own, default, strict=True))
