# SPDX-License-Identifier: BSD-3-Clause
"""The report of `python -m optfuse ab`: the verdict, the table and their legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from optfuse._table import aligned
from optfuse_tools.ab.interval import Interval, median_interval
from optfuse_tools.ab.page_faults import Usage, share
from optfuse_tools.ab.result import in_page_faults, undecided
from optfuse_tools.ab.verdict import is_known, on_speed, times

AS_WRITTEN = "as written"
FEWEST_ROUNDS = 3  # of which something can be said about their scatter
BOOTSTRAPPED = 5  # rounds; of fewer the range says more


@dataclass
class Row:
    """The findings about one variant. `note` says why it is left out."""

    name: str
    mode: str = ""  # nothing: PyTorch's own update
    note: str = ""
    said: list[str] = field(default_factory=list)  # of optimizers that are not fused in this mode
    ms: Interval | None = None  # per iteration
    speed: Interval | None = None  # the reference's time / this one's, round by round
    speed_as_written: Interval | None = None
    peak_mb: float | None = None  # resident memory of the process
    peak_gpu_mb: float | None = None  # allocated by PyTorch
    equal_bits: bool | None = None  # parameters against the reference's, after each step
    first_difference: int | None = None  # the step after which they differ first
    wrong: str = ""  # a sentence, where rounding does not explain it
    fault_share: float | None = None  # of the processor's time, in page faults
    used: Usage = field(default_factory=Usage)  # in all timed iterations
    rounds_ms: list[float] = field(default_factory=list)  # each round, per iteration
    rounds_peak_mb: list[float] = field(default_factory=list)
    rounds_peak_gpu_mb: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)  # each step but the first, over rounds


@dataclass
class Comparison:
    """Print it, or take to_dict() to JSON."""

    script: str
    rows: list[Row]
    reference: str  # the row whose bits fusion has
    differs_from_itself: int | None  # the step after which two runs as written differ
    steps: int
    optimizers: list[str]  # of which class, and where made
    settings: dict[str, Any]

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    @property
    def fused(self) -> list[Row]:
        return [row for row in self.rows if row.mode and not row.note]

    @property
    def weights(self) -> str:
        """In one word or two."""
        if not self.fused:
            return "not compared"
        if self.differs_from_itself is not None:
            return "not reproducible"
        return "equal" if all(row.equal_bits for row in self.fused) else "differ"

    @property
    def _stock(self) -> str:
        """The reference, in a sentence."""
        return f"the script {AS_WRITTEN}" if self.reference == AS_WRITTEN else self.reference

    @property
    def verdict(self) -> str:
        """In one line."""
        if not self.fused:
            return f"{self.script} can't be fused: {next(r.note for r in self.rows if r.mode)}"
        return f"{self._verdict_on_weights()}; {self._verdict_on_speed()}"

    def _verdict_on_weights(self) -> str:
        if self.weights == "not reproducible":
            return (
                f"not reproducible: two runs of {self.script} as written differ from step "
                f"{self.differs_from_itself} on, so weights can't be compared"
            )
        if self.weights == "equal":
            steps = f"each of {self.steps} steps"
            return f"weights equal those of {self._stock} bit by bit after {steps}"
        wrong = [row.wrong for row in self.fused if row.wrong]
        if wrong:
            return "; ".join(wrong)
        first = min(self.fused, key=lambda row: row.first_difference or self.steps + 1)
        return (
            f"weights of {first.name} differ from those of {self._stock} from step "
            f"{first.first_difference} on"
        )

    def _verdict_on_speed(self) -> str:
        timed = [(row.speed.median, row.speed, row) for row in self.fused if row.speed]
        _, speed, best = max(timed, key=lambda one: one[0])
        rounds = self.settings["rounds"]
        said = on_speed(best.name, speed, self._stock, rounds, FEWEST_ROUNDS)
        written = best.speed_as_written
        known = is_known(speed, rounds, FEWEST_ROUNDS)
        if self.reference == AS_WRITTEN or written is None or not known:
            return said
        return f"{said}, and {times(written.median)} times as fast as the script {AS_WRITTEN}"

    @property
    def warnings(self) -> list[str]:
        return list(undecided(self.rows, self.settings["rounds"], FEWEST_ROUNDS))

    def to_dict(self) -> dict[str, Any]:
        found = {"weights": self.weights, "verdict": self.verdict, "warnings": self.warnings}
        return {**found, **asdict(self)}

    def cells(self) -> list[list[str]]:
        """The lines of the table; the first row is its head."""
        on_gpu = any(row.peak_gpu_mb is not None for row in self.rows)
        written = self.reference != AS_WRITTEN
        head = ["variant", "ms an iteration", f"speed, {self.reference} = 1"]
        head += [f"speed, {AS_WRITTEN} = 1"] if written else []
        head += ["peak MB", *(["peak GPU MB"] if on_gpu else []), f"weights of {self.reference}"]
        table = [head]
        for row in self.rows:
            cells = [row.name, _shown(row.ms), _shown(row.speed)]
            cells += [_shown(row.speed_as_written)] if written else []
            cells += [_megabytes(row.peak_mb), *([_megabytes(row.peak_gpu_mb)] if on_gpu else [])]
            table.append([*cells, self._on_weights(row)])
        return table

    def _on_weights(self, row: Row) -> str:
        if row.equal_bits is None or self.differs_from_itself is not None:
            return "-"
        return "equal" if row.equal_bits else f"differ from step {row.first_difference} on"

    def legend(self) -> Iterator[str]:
        """The sentences under the table."""
        yield from (f"{row.name} left out: {row.note}" for row in self.rows if row.note)
        for row in self.rows:
            yield from (f"{row.name}: {text}" for text in row.said if not row.note)
        rounds, steps = self.settings["rounds"], self.settings["timed_steps"]
        scatter = "95 % bootstrap intervals" if rounds >= BOOTSTRAPPED else "their range"
        yield (
            f"Medians of {_many(rounds, 'round')}, with {scatter}; a round has the median of "
            f"{steps} iterations. Peaks are those of the process."
        )
        yield f"Optimizers: {', '.join(self.optimizers)}."
        yield from in_page_faults(self.rows)
        known = [str(self.settings[name]) for name in ("date", "cpu") if name in self.settings]
        if known:
            threads, release = self.settings["threads"], self.settings["torch"]
            known += [f"{threads} threads", f"torch {release}", self.settings["command"]]
            yield f"{', '.join(known)}."
        if any(row.equal_bits is False for row in self.rows) and self.differs_from_itself is None:
            yield (
                f"differ: some weight has other bits than with {self.reference}. PyTorch's "
                "implementations round differently from each other (docs/numerics.md)."
            )
        yield from (f"warning: {text}" for text in self.warnings)

    def __str__(self) -> str:
        return "\n".join([f"verdict: {self.verdict}", "", *aligned(self.cells()), *self.legend()])


def _many(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _shown(interval: Interval | None) -> str:
    return "-" if interval is None else str(interval)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def scatter(samples: Sequence[float]) -> Interval:
    """The interval of the rounds' figures."""
    if len(samples) < BOOTSTRAPPED:
        return Interval(median(samples), min(samples), max(samples))
    return median_interval(samples)


def judge(row: Row, reference: Row, written: Row) -> None:
    """Fills in what follows from the rounds of these three."""
    row.ms = scatter(row.rounds_ms)
    row.speed = _speed(row, reference)
    row.speed_as_written = _speed(row, written)
    row.fault_share = share(row.used)
    row.peak_mb = median(row.rounds_peak_mb)
    row.peak_gpu_mb = median(row.rounds_peak_gpu_mb) if row.rounds_peak_gpu_mb else None


def _speed(row: Row, base: Row) -> Interval:
    return scatter([b / own for b, own in zip(base.rounds_ms, row.rounds_ms, strict=True)])
