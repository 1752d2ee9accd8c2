# SPDX-License-Identifier: BSD-3-Clause
"""tests/gpu/run and what it runs, as far as no GPU is needed: verdicts, time
limits, files; and that a broken promise is a failed scenario."""

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
import torch
import trace_updates as tracing
from harness import FAILED, PASSED, UNSURE, On, Scenario, common, play
from part import Command, Part, Ran, Verdict
from results import LARGEST, Results

HERE = Path(__file__).resolve().parent
CPU = On(torch.device("cpu"), "forward", quick=True)


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
    (tmp_path / "a.json").write_text(json.dumps({"cells": cells}))
    assert judge.judge_benchmark([ran("x")], tmp_path).word == word
    (tmp_path / "a.json").write_text(json.dumps({"cells": [{**cells[0], "lines": lines[:1]}]}))
    assert judge.judge_benchmark([ran("x")], tmp_path).word == FAILED


def test_scenarios_name_what_failed() -> None:
    text = "passed  a\nFAILED     0.01 s  b (forward)\n    why\n1 FAILED, 1 passed"
    verdict = judge.judge_scenarios([ran("1 passed"), ran(text, 1)])
    assert verdict.word == FAILED and "b (forward)" in verdict.why


# Files


def test_logs_are_cut_and_the_summary_is_there_from_the_first_part(tmp_path: Path) -> None:
    results = Results(tmp_path / "out")
    part = Part("build", [], 1, "build.log")
    for _ in range(3):
        results.log("build.log", part.name, [ran("x" * (LARGEST // 2), 1)])
    results.add(part, Verdict(FAILED, "no compiler"), 1.0)
    results.check_limits()
    assert (tmp_path / "out" / "build.log").stat().st_size <= LARGEST
    assert "no compiler" in (tmp_path / "out" / "summary.txt").read_text()
    assert (
        json.loads((tmp_path / "out" / "results.json").read_text())["parts"][0]["verdict"] == FAILED
    )


def test_only_files_of_ours_are_replaced(tmp_path: Path) -> None:
    for name in ("build.log", "precious.log"):
        (tmp_path / name).touch()
    Results(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.log"]


# Scenarios


def outcome(body: Any, on: On = CPU) -> str:
    return play(Scenario("x", body, ("cpu",), ("forward",), False), on).verdict


def test_a_script_that_differs_from_stock_fails() -> None:
    def script(wrap: Any) -> Any:
        model = CPU.net()
        optimizer = wrap(common.adamw(model.parameters()))
        CPU.train(model, optimizer, 0)
        yield "weight", model[0].weight.detach() * (1.001 if wrap.fused else 1.0)

    assert outcome(lambda on: on.same(script)) == FAILED


def test_a_script_without_an_update_fails() -> None:
    assert outcome(lambda on: on.same(lambda wrap: iter([("nothing", 1)]))) == FAILED


def test_a_script_that_stock_does_not_repeat_is_not_judged() -> None:
    calls = iter(range(10))
    assert outcome(lambda on: on.same(lambda wrap: iter([("number", next(calls))]))) == UNSURE


def test_an_exception_is_a_failure_and_a_quiet_end_is_none() -> None:
    assert outcome(lambda on: 1 / 0) == FAILED
    assert outcome(lambda on: None) == PASSED


def test_nothing_run_is_no_success() -> None:
    command = [
        sys.executable,
        HERE / "scenarios.py",
        "bits",
        "--device",
        "cpu",
        "--only",
        "no such",
    ]
    assert subprocess.run(command, capture_output=True).returncode == 2


# Times


def test_recorded_classes_are_timed_and_their_bits_compared() -> None:
    command = [sys.executable, HERE / "recorded_times.py", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head[:3] == ["ms", "own", "recorded"] and len(rows) == 8
    assert all(float(took) > 0 for row in rows for took in row[-2:])


# Traces


def event(name: str, ts: float, dur: float = 1, cat: str = "user_annotation", **args: Any) -> Any:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}


def trace_of(launch: float) -> list[Any]:
    """One backward run: forward 10 to 20, backward 30 to 40, step 50 to 60."""
    phases = [("forward", 10), ("backward", 30), ("step", 50)]
    return [
        event("run: backward", 0, 100),
        *(event(f"backward: {name}", at, 10) for name, at in phases),
        event("optfuse::adam 2 parameters", launch),
        event("cuLaunchKernel", launch, cat="cuda_driver", correlation=7),
        event("of_adam_float32", 90, cat="kernel", correlation=7),
    ]


def wrong(events: list[Any]) -> list[str]:
    problems = tracing.problems(tracing.summarize(events), "cuda")
    return [line for line in problems if line.startswith("backward")]


def test_a_trace_says_in_which_phase_a_kernel_was_launched() -> None:
    found = tracing.summarize(trace_of(launch=35))["backward"]
    assert found == {"our ranges": {"backward": 1}, "our kernels": {"backward": 1}}
    assert not wrong(trace_of(launch=35))
    assert wrong(trace_of(launch=55)), "an update inside step() must be a problem"
    assert wrong(trace_of(launch=35)[:-3]), "no update at all must be a problem"
