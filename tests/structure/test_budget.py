# SPDX-License-Identifier: BSD-3-Clause
"""budget.json has the lines that each floor may have. Whoever raises one says there why."""

from __future__ import annotations

import json

from counts import FLOORS, LIBRARY, lines
from tree import ROOT

BUDGET = json.loads((ROOT / "tests/structure/budget.json").read_text("utf-8"))


def over(counted: dict[str, int]) -> dict[str, str]:
    return {
        floor: f"{n} lines, and {BUDGET[floor]['lines']} are allowed"
        for floor, n in counted.items()
        if n > BUDGET[floor]["lines"]
    }


def test_each_floor_has_a_budget_and_a_reason() -> None:
    assert BUDGET.keys() == FLOORS.keys() - {"benchmarks"}
    assert all(entry["why"] for entry in BUDGET.values())


def test_no_floor_is_larger_than_its_budget() -> None:
    counted = {floor: n for floor, n in lines().items() if floor in BUDGET}
    assert not over(counted), "delete something, or raise it in budget.json and say why"
    assert sum(counted[floor] for floor in LIBRARY) > 10_000  # they were counted


def test_a_line_too_many_is_found() -> None:
    assert over({"plugin": BUDGET["plugin"]["lines"] + 1}).keys() == {"plugin"}
