# SPDX-License-Identifier: BSD-3-Clause
"""Each word of docs/hazards.md is what deeds say, and have shown."""

from dataclasses import replace

import pytest

from programs.cases import ENDS, failures
from programs.deed import EITHER
from programs.hazards import WORDS, rows
from programs.play import MODES

ROWS = rows()


def shown(row, name, mode):
    """The words for what a deed has done, here or in test_each.py."""
    key = name, mode, row.cases(name)[0].is_late
    if not ENDS[key]:
        failures(name, mode)
    return ENDS[key]


def wrong(row, mode):
    """Outcomes that the row leaves out, and words that no deed of it has shown."""
    words = set(WORDS.findall(getattr(row, mode)))
    if {"launches first", "left to step()"} & words:
        words.add("equal")
    said = set().union(*(row.said(name, mode) for name in row.deeds())) - {EITHER}
    seen = set().union(*(shown(row, name, mode) for name in row.deeds()))
    if "`test_" in row.names:
        seen |= words
    left_out = [f"it does not say: {one.what}" for one in said if one.what not in words]
    return left_out + [f"no deed shows: {word}" for word in words - seen]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.you[:50])
def test_each_row_is_what_its_deeds_show(row):
    said = [row.printed(), *(fault for mode in MODES for fault in wrong(row, mode))]
    assert all(getattr(row, mode) == row.cell(mode) != "" for mode in MODES), (
        "run_programs --hazards"
    )
    assert said[1:] == [], said[0]


def test_most_rows_have_deeds():
    assert len(ROWS) > 70


def test_a_word_that_no_deed_shows_is_found():
    row = replace(ROWS[0], backward="raises")
    assert wrong(ROWS[0], "backward") == [] and row.cell("backward") == "equal"
    assert wrong(row, "backward") == ["it does not say: equal", "no deed shows: raises"]
