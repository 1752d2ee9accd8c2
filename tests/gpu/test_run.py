# SPDX-License-Identifier: BSD-3-Clause
"""tests/gpu/run and what it runs, as far as no GPU is needed: verdicts, time limits, files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import judge
import part as parts
import pytest
from part import FAILED, Command, Part, Ran, Verdict
from results import LARGEST, Results

HERE = Path(__file__).resolve().parent


def python(code: str) -> Command:
    return Command([sys.executable, "-c", code], {})


def ran(text: str, status: int | None = 0, *arguments: str, **variables: str) -> Ran:
    return Ran(Command(list(arguments), variables), status, text)


def run(tmp_path: Path, *commands: Command, limit: float = 20, **how: Any) -> list[Ran]:
    return parts.run_commands(Part("x", list(commands), limit, "x.log", **how), {}, limit, tmp_path)


# Parts


def test_a_command_over_its_time_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; "
    slow = python(child + "time.sleep(60)'])")
    began = time.monotonic()
    done = run(tmp_path, slow, python("print(1)"), limit=1)
    assert time.monotonic() - began < 10
    assert [one.status for one in done] == [None], "the next command must not begin"
    assert parts.judge_by_status(done).word == FAILED


def test_commands_together_run_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run(tmp_path, *[python("import time; time.sleep(2); print('ok')")] * 4, together=True)
    assert time.monotonic() - began < 7
    assert [one.output for one in done] == ["ok\n"] * 4
    assert parts.judge_by_status(done) == Verdict("ok", "ok")


def test_a_failing_command_fails_its_part_and_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, python("print('what went wrong'); raise SystemExit(3)"))
    assert parts.judge_by_status(done) == Verdict(FAILED, "exit status 3")
    assert "what went wrong" in parts.shown(done)


# Verdicts


def sanitizer(planted: int, clean: int, text: str = "") -> Verdict:
    how = ("compute-sanitizer", "--tool", "memcheck")
    return judge.judge_sanitizers([ran(text, planted, *how), ran(text, clean, *how)])


def test_a_sanitizer_must_find_the_planted_defect_and_no_other() -> None:
    assert sanitizer(planted=9, clean=0).word == "ok"
    assert sanitizer(planted=0, clean=0).word == FAILED
    assert sanitizer(planted=9, clean=9).word == FAILED
    assert sanitizer(1, 1, "========= Error: Device not supported").word == "not run"


def test_a_control_that_holds_without_its_guard_fails() -> None:
    def pair(on: int, off: int) -> Verdict:
        both = [
            ran("", on, OPTFUSE_TEST_GUARDS_OFF=""),
            ran("", off, OPTFUSE_TEST_GUARDS_OFF="key"),
        ]
        return judge.judge_controls(both)

    assert pair(0, 1).word == "ok"
    assert pair(0, 0) == Verdict(FAILED, "key: kept with the guard off (status 0)")
    assert pair(1, 1) == Verdict(FAILED, "broken with every guard on (status 1)")


def test_bandwidth_below_the_target_is_missed() -> None:
    def bench(share: str) -> Verdict:
        head = f"{'':15} {'elements, tensors':>18}\n"
        small = "adam  float32      1048576 in    1     1000.0     2000.0   0.500\n"
        large = f"adam  float32     16777216 in    1     1000.0     1000.0   {share}\n"
        return judge.judge_bandwidth([ran(head + small + large)])

    assert bench("0.910").word == "ok"
    assert bench("0.890").word == "MISSED"
    assert judge.judge_bandwidth([ran("nothing")]).word == FAILED


@pytest.mark.parametrize(("high", "word"), ((1.01, "ok"), (0.99, "MISSED")))
def test_a_cell_slower_than_fused_is_missed(tmp_path: Path, high: float, word: str) -> None:
    speed = {"median": 0.98, "low": 0.97, "high": high}
    lines = [{"name": name, "against_fused": speed} for name in judge.OURS]
    cells = [{"model": "m", "batch": 1, "lines": lines}]
    file = tmp_path / "cells-a.json"
    file.write_text(json.dumps({"cells": cells}))
    assert judge.judge_benchmark([ran("x")], tmp_path).word == word
    file.write_text(json.dumps({"cells": [{**cells[0], "lines": lines[:1]}]}))
    assert judge.judge_benchmark([ran("x")], tmp_path).word == FAILED


@pytest.mark.parametrize(
    ("high", "equal", "word"), ((1.01, True, "ok"), (0.99, True, "MISSED"), (1.01, False, FAILED))
)
def test_a_captured_cell_has_the_bits_and_is_not_slower(
    tmp_path: Path, high: float, equal: bool, word: str
) -> None:
    speed = {"median": 0.98, "low": 0.97, "high": high}
    lines = [{"name": "side-stream fusion", "against_fused": speed, "equal_bits": equal}]
    for name in ("for-loop", "foreach=True"):  # stock's own have other bits
        lines.append({"name": name, "against_fused": speed, "equal_bits": False})
    cells = [{"cell": "m, batch 1, captured", "lines": lines}]
    (tmp_path / "captured-a.json").write_text(json.dumps({"cells": cells}))
    assert judge.judge_captured([ran("x")], tmp_path).word == word
    (tmp_path / "captured-a.json").write_text(json.dumps({"cells": []}))
    assert judge.judge_captured([ran("x")], tmp_path).word == FAILED


def test_a_failed_test_is_named() -> None:
    text = "a.py::b PASSED\nFAILED a.py::c - AssertionError: why\n== 1 failed, 1 passed in 1s =="
    verdict = judge.judge_tests([ran("1 passed"), ran(text, 1)])
    assert verdict.word == FAILED and "a.py::c" in verdict.why
    assert judge.judge_tests([ran("no tests ran", 5)]).word == FAILED


# Files


def test_logs_are_cut_and_the_summary_is_there_from_the_first_part(tmp_path: Path) -> None:
    results = Results(tmp_path / "out")
    part = Part("build", [], 1, "build.log")
    for _ in range(3):
        results.log("build.log", part.name, [ran("x" * (LARGEST // 2), 1)])
    results.add(part, Verdict(FAILED, "no compiler"), 1.0, 240.0)
    results.check_limits()
    assert (tmp_path / "out" / "build.log").stat().st_size <= LARGEST
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert "no compiler" in summary and "1.0 of  240 s" in summary
    assert (
        json.loads((tmp_path / "out" / "results.json").read_text())["parts"][0]["verdict"] == FAILED
    )


def test_only_files_of_ours_are_replaced(tmp_path: Path) -> None:
    for name in ("build.log", "precious.log"):
        (tmp_path / name).touch()
    Results(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.log"]


# Times


def test_recorded_classes_are_timed_and_their_bits_compared() -> None:
    command = [sys.executable, HERE / "recorded_times.py", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head[:3] == ["ms", "own", "recorded"] and len(rows) == 8
    assert all(float(took) > 0 for row in rows for took in row[-2:])
