# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse ab`: what its report says and draws of times and weights that are given."""

import functools
import re
import sys
from dataclasses import replace

from html_pages import Page, has_matplotlib

from optfuse_tools.script_ab.page import _colored, page
from optfuse_tools.script_ab.result import Comparison, Row, judge, scatter

SETTINGS = {"rounds": 5, "warm_up": 2, "timed_steps": 10, "seed": 0}


def row(name, times, mode="", **found):
    return Row(name, mode, rounds_ms=list(times), rounds_peak_mb=[100.0] * len(times), **found)


def comparison(ours, *, rounds=5, reference="fused=True", itself=None, **found):
    """The verdict on rounds of 10 ms as written and 8 ms by the reference."""
    written = row("as written", [10.0] * rounds, equal_bits=False, first_difference=1)
    by_flags = row("fused=True", [8.0] * rounds, equal_bits=True)
    found = {"equal_bits": True, **found}
    fusion = row("forward fusion", ours[:rounds], "forward", **found)
    rows = [written, by_flags, fusion]
    base = by_flags if reference == "fused=True" else written
    for one in rows:
        judge(one, base, written)
    settings = {**SETTINGS, "rounds": rounds}
    return Comparison("train.py", rows, reference, itself, 12, ["AdamW (train.py:3)"], settings)


FASTER, SLOWER, SAME = [5.0] * 5, [16.0] * 5, [7.0, 8.0, 9.0, 8.0, 7.9]


def test_verdicts_on_speed():
    assert comparison(FASTER).verdict == (
        "weights equal those of fused=True bit by bit after each of 12 steps; forward fusion is "
        "1.60 times as fast as fused=True (1.60 to 1.60), and 2.0 times as fast as the script as "
        "written"
    )
    assert "; forward fusion is slower than fused=True: 0.50 times" in comparison(SLOWER).verdict
    assert comparison([7.9, 8.0, 8.1, 8.0, 8.05]).verdict.endswith(
        "; forward fusion is as fast as fused=True, as far as can be seen (0.99 to 1.01 times), "
        "and 1.25 times as fast as the script as written"
    )
    assert comparison(SAME).verdict.endswith(
        "; forward fusion is 1.00 times as fast as fused=True, or anything from 0.89 to 1.14 "
        "times: run more rounds, or a quieter machine"
    )
    assert comparison(FASTER, rounds=2).verdict.endswith(
        "; forward fusion is 1.60 times as fast as fused=True in 2 rounds, which are too few to be "
        "sure: run more"
    )
    assert "is 1.60 times as fast as fused=True (" in comparison(FASTER, rounds=3).verdict
    assert comparison(FASTER, reference="as written").verdict.endswith(
        "forward fusion is 2.0 times as fast as the script as written (2.0 to 2.0)"
    )


def test_wrong_weights_are_the_headline():
    wrong = comparison(FASTER, equal_bits=False, first_difference=7, wrong="WEIGHTS ARE WRONG")
    assert wrong.verdict.startswith("WEIGHTS ARE WRONG; forward fusion is ")
    assert wrong.weights == "differ"


def test_verdicts_on_weights():
    assert comparison(FASTER).weights == "equal"
    differ = comparison(FASTER, equal_bits=False, first_difference=7)
    assert differ.weights == "differ"
    assert differ.verdict.startswith("weights of forward fusion differ from those of fused=True")
    assert "differ from step 7 on" in str(differ) and "round differently" in str(differ)
    itself = comparison(FASTER, equal_bits=False, first_difference=7, itself=4)
    assert itself.weights == "not reproducible" and "from step 4 on" in itself.verdict
    assert "differ from step 7" not in str(itself)
    failed = comparison(FASTER)
    failed.rows[2] = replace(failed.rows[2], note="it failed")
    assert failed.weights == "not compared"
    assert failed.verdict == "train.py can't be fused: it failed"


def test_few_rounds_show_their_range():
    assert (scatter([1.0, 2.0, 9.0]).low, scatter([1.0, 2.0, 9.0]).high) == (1.0, 9.0)
    many = [1.0] + [2.0] * 20 + [9.0]
    assert scatter(many).low == scatter(many).high == 2.0
    assert "with their range" in str(comparison(SAME, rounds=4))
    assert "with 95 % bootstrap intervals" in str(comparison(SAME))
    assert "warning: rounds=2 is too few" in str(comparison(SAME, rounds=2))


def test_a_variant_has_one_colour_whichever_others_are_there():
    found = comparison(FASTER).rows
    colours = {row.name: color for _, row, color in _colored(found)}
    assert len({*colours.values()}) == 3
    assert {row.name: color for _, row, color in _colored(found[1:])} == {
        name: colours[name] for name in list(colours)[1:]
    }
    assert [c for _, _, c in _colored([row("foreach=False", [1.0])])] == [colours["fused=True"]]


def test_what_a_script_prints_is_not_markup():
    """Neither its name nor its errors."""
    row = Row("forward fusion", "forward", note="ended with <b>status</b> 1")
    found = Comparison("<i>.py", [row], "as written", None, 9, [], SETTINGS)
    assert not {"i", "b"} & set(Page(page(found)).tags)


# Training that differs


@functools.cache
def drawing():
    return comparison([5.0, 6.0, 5.5, 5.2, 5.1])


def test_a_page_without_matplotlib_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page(drawing())
    assert "pip install matplotlib" in text and "<svg" not in text


def test_plots_are_drawn_or_what_is_missing_is_said():
    found = drawing()
    for one in found.rows:
        one.steps_ms = [float(i % 7) for i in range(1, 1000)]
    text = page(found)
    parsed = Page(text)
    assert not parsed.open and not parsed.loads
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert ("warm-up</text>" in text) is has_matplotlib()
    assert "cut off" not in text
    found.rows[0].steps_ms = [*range(1, 30), 1000.0]
    assert ("cut off" in page(found)) is has_matplotlib()
