# SPDX-License-Identifier: BSD-3-Clause
"""docs/works-with.md has a row for each script of tests/works_with, and says what was recorded."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from tree import ROOT

FOLDER = ROOT / "tests" / "works_with"
sys.path.append(str(FOLDER))
import page  # noqa: E402
from rows import ROWS, Row, code_of  # noqa: E402
from script_variants import SCRIPTS, variant  # noqa: E402

RESULTS = json.loads((ROOT / "benchmarks" / "results" / "works-with.json").read_text("utf-8"))
FEWEST = 15  # rows in forward mode


def faults(rows: list[Row], scripts: set[str], results: dict[str, Any]) -> list[str]:
    """Reasons why rows, scripts and results don't say the same."""
    named = {row.script for row in rows if row.script}
    found = [f"{script} has no row" for script in sorted(scripts - named)]
    found += [f"{script} is not there" for script in sorted(named - scripts - set(SCRIPTS))]
    run = {row.title for row in rows}
    differs = {(row.title, "backward") for row in rows if row.differs}
    found += [f"{title}: no result" for title in sorted(run - set(results))]
    found += [f"{title}: no row" for title in sorted(set(results) - run)]
    for title, result in results.items():
        modes = result["modes"].items()
        other = {(title, m) for m, o in modes if o.get("bits", "equal") != "equal"}
        found += [f"{t}, {m}: {result['modes'][m]['bits']}" for t, m in sorted(other - differs)]
        known = {(t, m) for t, m in differs if t == title}
        found += [f"{t}, {m}: no other bits" for t, m in sorted(known - other)]
        found += [f"{title}, {m}: no update" for m, o in modes if not o.get("updates", 1)]
    return found


def scripts() -> set[str]:
    return {path.name for path in FOLDER.glob("with_*.py")}


def test_rows_scripts_and_results_are_the_same() -> None:
    assert not faults(ROWS, scripts(), RESULTS)


def test_the_page_says_what_was_recorded() -> None:
    _, rows, _ = page.split(page.PAGE.read_text("utf-8"))
    assert rows == page.table(RESULTS), "tests/works_with/run writes it"


def test_enough_rows_train_in_forward_mode() -> None:
    trained = [t for t, found in RESULTS.items() if "bits" in found["modes"]["forward"]]
    assert len(trained) >= FEWEST, trained


def test_each_row_has_a_script_and_what_raises_has_a_cause() -> None:
    assert all(row.script for row in ROWS)
    assert len({row.title for row in ROWS}) == len(ROWS)
    for found in RESULTS.values():
        for mode in found["modes"].values():
            assert "raises" not in mode or page.cause(mode["raises"])


@pytest.mark.parametrize("row", [r for r in ROWS if r.script], ids=lambda row: row.title)
def test_each_script_has_two_lines_more_than_stock(row: Row) -> None:
    code = code_of(row)
    assert sum("optfuse" in text.lower() for text in code.splitlines()) == 2
    assert "optfuse" not in variant(code, "stock")
    for mode in ("stock", "backward"):
        compile(variant(code, mode), row.script, "exec")


def test_a_row_without_script_a_script_without_row_and_other_bits_are_found() -> None:
    assert faults([*ROWS, Row("new", "new", "with_new.py")], scripts(), RESULTS) == [
        "with_new.py is not there",
        "new: no result",
    ]
    assert faults(ROWS, scripts() | {"with_new.py"}, RESULTS) == ["with_new.py has no row"]
    other = copy.deepcopy(RESULTS)
    title = next(iter(other))
    other[title]["modes"]["forward"]["bits"] = "different: losses"
    assert faults(ROWS, scripts(), other) == [f"{title}, forward: different: losses"]
    known = [replace(row, differs="it does" if row.title == title else row.differs) for row in ROWS]
    assert faults(known, scripts(), RESULTS) == [f"{title}, backward: no other bits"]
