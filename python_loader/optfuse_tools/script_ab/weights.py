# SPDX-License-Identifier: BSD-3-Clause
"""The runs that look at parameters after each step, one of each variant."""

from __future__ import annotations

from typing import Any

from optfuse_tools.ab.progress import Progress
from optfuse_tools.ab.verdict import limit_of, sentence
from optfuse_tools.script_ab.child import Run, Script, Variant, run
from optfuse_tools.script_ab.result import AS_WRITTEN, Row
from optfuse_tools.script_ab.runs import CannotCompare, checked, why_left_out, without_prefix
from optfuse_tools.script_ab.sketches import distances, first_beyond

Digests = list[list[Any]]  # after each step: the number of the optimizer, and of its parameters


def first_difference(ours: Digests, theirs: Digests) -> int | None:
    """The step, of its optimizer, after which parameters differ first, or that one of the two has
    not taken."""
    at = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
    )
    if at is None:
        if len(ours) == len(theirs):
            return None
        at = min(len(ours), len(theirs))
    longer = max(ours, theirs, key=len)
    return sum(index == longer[at][0] for index, _ in longer[: at + 1])


class Weights:
    """The findings of the first runs, and the variants that can be timed."""

    def __init__(self, script: Script, progress: Progress) -> None:
        self.rows: list[Row] = []
        self.variants: dict[str, Variant] = {}  # by their rows' names
        self.reference = AS_WRITTEN
        self.differs_from_itself: int | None = None
        self._script = script
        self._progress = progress
        self._found: dict[str, dict[str, Any]] = {}  # by the probe, by their rows' names

    def as_written(self) -> dict[str, Any]:
        """The findings of the first of two runs; the second tells whether runs can be compared at
        all. Raises CannotCompare."""
        variant = Variant(AS_WRITTEN)
        done = self._look(variant)
        found = checked(self._script, done)
        again = checked(self._script, self._look(variant, f"{AS_WRITTEN}, again"))
        self.differs_from_itself = first_difference(again["digests"], found["digests"])
        self._add(variant, done)
        return found

    def fused(self, variant: Variant) -> list[dict[str, Any]]:
        """The flags that PyTorch has to be given for the same bits, if any, by optimizer."""
        done = self._look(variant)
        if done.found is not None and done.found["given_up"]:
            raise CannotCompare(
                f"{self._script.name} calls optfuse.fuse() itself, of what it makes at "
                f"{done.found['given_up'][0]}; ab compares a script that is not fused: take that "
                "call out"
            )
        self._add(variant, done)
        return done.found["flags"] if done.found is not None else []

    def by_flags(self, flags: list[dict[str, Any]]) -> None:
        """The reference, where it is not the script as written."""
        names = [f"{k}={v}" for given in flags for k, v in given.items() if v is not None]
        if names:
            name = "fused=True" if "fused=True" in names else names[0]
            variant = Variant(name, flags=flags)
            self._add(variant, self._look(variant))
            self.rows.insert(1, self.rows.pop())
            self.reference = name

    def compare(self) -> None:
        """Fills in what the rows that are not left out have in common with the reference."""
        if self[self.reference].note:
            self.reference = AS_WRITTEN
        for row in self.rows:
            if not row.note:
                digests = (self._found[name]["digests"] for name in (row.name, self.reference))
                row.first_difference = first_difference(*digests)
                row.equal_bits = row.first_difference is None
        differ = [row for row in self.rows if row.mode and row.equal_bits is False]
        if differ and self.differs_from_itself is None:
            self._look_for_wrong(differ)

    def _look_for_wrong(self, rows: list[Row]) -> None:
        """Fills in where weights are farther from the reference's than rounding explains."""
        theirs = self._found[self.reference]
        stock = [self._found[r.name] for r in self.rows if not r.mode and r.name in self._found]
        if len(stock) < 2:  # as written it is the reference
            stock += self._another(len(theirs["optimizers"]))
        spread = max((far.distance for far in distances(stock, theirs)), default=0.0)
        for row in rows:
            far = first_beyond(limit_of(spread), self._found[row.name], theirs)
            if far is not None:
                label = dict(theirs["labels"])[far.optimizer][far.index]
                row.wrong = sentence(
                    row.name, label, self.reference, far.step, far.distance, spread
                )

    def _another(self, optimizers: int) -> list[dict[str, Any]]:
        """Another of PyTorch's implementations, if it runs."""
        flags = [{"fused": None, "foreach": False}] * optimizers
        done = self._look(Variant("foreach=False", flags=flags))
        return [done.found] if done.found is not None and not done.status else []

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def _look(self, variant: Variant, what: str = "") -> Run:
        self._progress.show(f"optfuse ab: comparing weights, {what or variant.name}")
        return run(self._script, variant, True, self._progress.tick)

    def _add(self, variant: Variant, done: Run) -> None:
        row = Row(variant.name, variant.mode, why_left_out(self._script, variant, done))
        if done.found is not None:
            row.said = [without_prefix(text) for text in done.found.get("said", [])]
            self._found[row.name] = done.found
        self.rows.append(row)
        self.variants[row.name] = variant
