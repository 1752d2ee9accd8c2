# SPDX-License-Identifier: BSD-3-Clause
"""Every guard has a negative control: in a test-only build, with this guard switched off, a deed
sees wrong numbers or misses an error. So each deed could fail, and each guard is needed."""

import json
import os
import re
from pathlib import Path

import pytest
from common import HERE, python

import programs.deeds  # noqa: F401 - fills the table
from optfuse._library.bindings import lib
from programs.deed import DEEDS, GUARDS

ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def controls():
    """The failures with all guards, and without the one that a deed needs."""
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    code = "from programs.faults import of_deeds\nof_deeds()"
    done = python(code, timeout=2500, OPTFUSE_LIBRARY=library)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "deed_and_guard", [f"{name} {fault[0]}" for name in DEEDS for fault in DEEDS[name].faults]
)
def test_a_deed_fails_without_its_guard(deed_and_guard, controls):
    with_guard, without = controls[deed_and_guard]
    assert not with_guard, f"with all guards on: {with_guard[0]}"
    assert without, "it is as well without the guard"


def test_the_release_build_has_no_switch():
    """Neither the variable nor the function is in it, and naming every guard
    in the variable changes nothing."""
    content = Path(lib._name).read_bytes()
    assert b"OPTFUSE_TEST_GUARDS_OFF" not in content and b"of_guard_enabled" not in content
    done = python(
        "from programs.cases import failures\n"
        "for name in ('step_again', 'clip_and_wait', 'backward_through_changed_weights'):\n"
        "    assert not failures(name, 'forward') + failures(name, 'backward')\n",
        OPTFUSE_TEST_GUARDS_OFF=",".join(GUARDS),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


# Guards that only a GPU's parameters meet have their control there.
ELSEWHERE = {
    "batched_bits": "tests/python/recorded/test_products.py",
    "coupled": "tests/python/final/test_final.py",
    "final_clip": "tests/python/final/test_final.py",
    "streams": "tests/plugin/test_guards.c",
    "capture": "tests/plugin/test_guards.c",
    "tried": "tests/device/test_gpu_rules.py",
    "let_go": "tests/device/test_streams.py",
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
    "recorded_launch": "tests/device/test_gpu_programs.py",
    "recorded_order": "tests/device/test_gpu_recorded.py",
    "recorded_stream": "tests/device/test_gpu_recorded.py",
}


def test_every_guard_of_the_source_has_a_deed():
    found = set()
    for layer in ("plugin", "shim"):
        for path in sorted((ROOT / layer).rglob("*.[ch]*")):
            if path.suffix == ".pyc":
                continue
            found |= set(re.findall(r"(?<!define )OF_GUARD\((\w+)\)", path.read_text()))
    for path in (ROOT / "python_loader").rglob("*.py"):
        found |= set(re.findall(r'guard\("(\w+)"\)', path.read_text()))
    assert found, "no guards were found: has the source moved?"
    assert found == {*GUARDS, *ELSEWHERE}, "guards and deeds differ"
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / file).read_text(), f"{name} is not in {file}"
