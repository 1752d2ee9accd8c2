# SPDX-License-Identifier: BSD-3-Clause
"""docs/performance.md says which commit each file of results is of, and benchmarks/run --stale how
old that is."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stale(benchmarks):
    import stale

    return stale


def test_the_page_names_the_commit_of_each_file(stale):
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    written = page.split(stale.BEGIN)[1].partition(stale.END)[0]
    assert written == stale.page_table(), "benchmarks/stale.py docs/performance.md writes it again"


def test_other_files_would_be_another_table(stale, monkeypatch, tmp_path):
    before = stale.page_table()
    (tmp_path / "cells.json").write_text(json.dumps({"machine": {"commit": "0123456+"}}), "utf-8")
    monkeypatch.setattr(stale, "RESULTS", tmp_path)
    assert stale.commits() == {"cells.json": ["0123456+"]}
    assert stale.page_table() != before and "0123456+" in stale.page_table()


def test_ages_are_those_of_the_oldest_commit_that_is_known(stale):
    if not stale.git("log", "-3", "--format=%h"):
        pytest.skip("no repository")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert stale.age([head]) == (stale.git("log", "-1", "--format=%cs"), "0")
    assert stale.age(["0" * 40]) == ("", "")
