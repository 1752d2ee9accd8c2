# SPDX-License-Identifier: BSD-3-Clause
"""The three calls of tests/gpu/run: what is in them, that the benchmark gets its
time, that a call which is killed leaves what it found, and that they need nothing
which the machine may lack."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from machine import Machine
from part import Command, Part, run_commands
from plan import CALLS, Plan, sequence
from plan import parts as parts_of
from results import MOST_FILES, Results

HERE = Path(__file__).resolve().parent


def plan_of(tmp_path: Path, device: str = "cuda") -> Plan:
    """The plan for a machine with a GPU, where optfuse has been built."""
    library = tmp_path / "build-gpu" / "build" / "shim" / "liboptfuse_torch-x.so"
    library.parent.mkdir(parents=True)
    library.touch()
    library.with_stem(library.stem + "-guards").touch()
    there = Machine("2.11.0", "13.0", "a GPU", "90", {"PATH": os.environ["PATH"]})
    until = time.monotonic() + 540
    results = Results(tmp_path / "out")
    return Plan(tmp_path, there, device, False, None, results, until)


def test_the_three_calls_have_every_part(tmp_path: Path) -> None:
    names = {call: [p.name for p in parts_of(plan_of(tmp_path / call), call)] for call in CALLS}
    first = ["kernels against plain C", "what failed before", "iterations in graphs"]
    second = ["more iterations in graphs", "bits of stock", "transparency", "negative controls"]
    third = ["benchmark against stock", "kernel bandwidth", "times of recorded classes"]
    third += ["the fused back pass", "compute-sanitizer on the kernels"]
    third += ["K-FAC and another order of backward", "tests of promises"]
    assert names == {
        "1": ["build", *first],
        "2": ["build", *second, "random programs", "a C++ program's bits"],
        "3": ["build", *third, "kernels compiled by the driver"],
    }


def test_the_shares_of_a_call_are_no_more_than_its_seconds() -> None:
    shares = {call: sum(keep for _, keep in sequence(call)) for call in CALLS}
    assert all(share <= 540 for share in shares.values()), shares
    assert shares["1"] <= 540 - 230, "the first call may have to build"


def test_a_call_leaves_no_more_files_than_come_back(tmp_path: Path) -> None:
    for call in (*CALLS, None):
        found = list(parts_of(plan_of(tmp_path / str(call)), call))
        commands = [one.arguments for part in found for one in part.commands]
        sections = [word for one in commands for word in one if word == "--section"]
        logs = {part.log for part in found}
        files = 2 + len(logs) + len(sections)  # a section writes one for each command
        assert len(sections) >= 1 and files <= MOST_FILES, (call, logs, sections)


def test_every_file_of_tests_is_there(tmp_path: Path) -> None:
    named = set()
    for call in CALLS:
        for part in parts_of(plan_of(tmp_path / call), call):
            for argument in (a for one in part.commands for a in one.arguments):
                _, _, file = argument.partition(f"{tmp_path / call}/tests/")
                named.add(file.partition("::")[0])
    missing = [name for name in named if not (HERE.parent / name).exists()]
    assert not missing and len(named) > 25


def test_the_benchmark_keeps_its_time_whatever_the_parts_before_it_take(tmp_path: Path) -> None:
    plan, left = plan_of(tmp_path), 540.0
    for part in parts_of(plan, "1"):
        given = min(part.limit, left - part.after)
        if part.name == "iterations in graphs":
            assert given >= 230
            return
        left -= given
    raise AssertionError("no benchmark")


def test_a_strange_compiler_builds_what_is_needed_and_no_more(tmp_path: Path) -> None:
    setup, compile = next(parts_of(plan_of(tmp_path), "1")).commands
    assert "-Dwerror=false" in setup.arguments
    assert compile.arguments[-1] == "gpu-run"


def test_processes_share_the_cores(tmp_path: Path) -> None:
    environment = plan_of(tmp_path).environment
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    assert environment["PYTHONUNBUFFERED"] == "1"


ENDED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from part import Command, Part, run_commands
code = "print('so far', flush=True); import time; time.sleep(60)"
part = Part("x", [Command([sys.executable, "-c", code])], 60, "checks.log")
run_commands(part, {}, 60, Path(sys.argv[2]))
"""


def test_a_run_that_is_killed_leaves_what_its_part_has_printed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDED, str(HERE), str(tmp_path)])
    log = tmp_path / "now-0.log"
    for _ in range(600):
        if log.exists() and "so far" in log.read_text():
            break
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert "so far" in log.read_text()


def test_what_a_part_has_printed_is_in_its_log_once(tmp_path: Path) -> None:
    results = Results(tmp_path / "out")
    command = Command([sys.executable, "-c", "print('only once')"])
    part = Part("x", [command], 20, "checks.log")
    for _ in range(2):
        results.log(part.log, part.name, run_commands(part, {}, 20, results.folder))
    assert [path.name for path in results.files()] == ["checks.log"]
    assert (tmp_path / "out" / "checks.log").read_text().count("only once\n") == 2


# Machines that lack something

WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "expecttest":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.path[:0] = sys.argv[1:]
import optim_inputs
assert len(optim_inputs.inputs_for_gpus("SGD")) > 10
"""


def test_pytorchs_list_of_optimizers_needs_no_other_package() -> None:
    python = HERE.parent / "python"
    command = [sys.executable, "-c", WITHOUT, str(python), str(python / "optimizers")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
