# SPDX-License-Identifier: BSD-3-Clause
"""Every guard has a negative control: in a test-only build, with this guard
alone switched off, the scenario that it protects sees wrong numbers or misses
an error. So each test below could fail, and each guard is needed."""

import json
import os
import re
from pathlib import Path

import pytest
from common import HERE, python

import guard_scenarios
from optfuse._library.bindings import lib

ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def played():
    """The outcome of each scenario, in the test-only build: [guard on, guard off]."""
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    play_all = "from guard_scenarios.player import main\nmain()"
    done = python(play_all, timeout=2500, OPTFUSE_LIBRARY=library)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", guard_scenarios.SCENARIOS)
def test_the_promise_is_kept_with_the_guard_and_broken_without(name, played):
    with_guard, without = played[name]
    assert with_guard == "kept", f"with the guard {name!r} on: {with_guard}"
    assert without.startswith("broken: "), f"with the guard {name!r} off: {without}"


def test_the_release_build_has_no_switch():
    """Neither the variable nor the function is in it, and naming every guard
    in the variable changes nothing."""
    content = Path(lib._name).read_bytes()
    assert b"OPTFUSE_TEST_GUARDS_OFF" not in content and b"of_guard_enabled" not in content
    done = python(
        "import json, warnings, guard_scenarios as g\n"
        "warnings.simplefilter('ignore')\n"
        "alone = [n for n, (_, others) in g.SCENARIOS.items() if not others]\n"
        "played = g.play([(n, tuple(g.SCENARIOS)) for n in alone])\n"
        "print(json.dumps({n: outcome for (n, _), outcome in played.items()}))\n"
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    # stderr may have what torch's profiler says of itself, which a scenario uses.
    for name, outcome in json.loads(done.stdout).items():
        assert outcome == "kept", f"{name}: {outcome}"


# Guards that only a GPU's parameters meet have their control there.
ELSEWHERE = {
    "streams": "tests/plugin/test_guards.c",
    "capture": "tests/plugin/test_guards.c",
    "tried": "tests/device/test_gpu_rules.py",
    "replays": "tests/device/test_cxx.py",
    "clipstream": "tests/plugin/test_guards.c",
    "divided": "tests/device/test_clipping.py",
    "dw_lend": "tests/device/test_side_stream.py",
    "dw_return": "tests/device/test_side_stream.py",
    "dw_join": "tests/device/test_side_stream.py",
    "dw_state": "tests/device/test_side_stream.py",
    "dw_unpack": "tests/device/test_side_stream.py",
    "capture_step": "tests/device/test_captures.py",
    "ahead_at_once": "tests/device/test_gpu_recorded.py",
    "ahead_capture": "tests/device/test_gpu_recorded.py",
    "ahead_memory": "tests/device/test_gpu_recorded.py",
    "ahead_streams": "tests/device/test_gpu_recorded.py",
    "recorded_capture": "tests/device/test_gpu_recorded.py",
    "recorded_launch": "tests/device/test_gpu_recorded.py",
    "recorded_order": "tests/device/test_gpu_recorded.py",
    "recorded_stream": "tests/device/test_gpu_recorded.py",
}


def test_every_guard_of_the_source_has_a_scenario():
    found = set()
    for layer in ("plugin", "shim"):
        for path in sorted((ROOT / layer).rglob("*.[ch]*")):
            if path.suffix == ".pyc":
                continue
            found |= set(re.findall(r"(?<!define )OF_GUARD\((\w+)\)", path.read_text()))
    for path in (ROOT / "python_loader").rglob("*.py"):
        found |= set(re.findall(r'guard\("(\w+)"\)', path.read_text()))
    assert found, "no guards were found: has the source moved?"
    assert found == {*guard_scenarios.SCENARIOS, *ELSEWHERE}, "guards and scenarios differ"
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / file).read_text(), f"{name} is not in {file}"
