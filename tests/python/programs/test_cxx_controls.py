# SPDX-License-Identifier: BSD-3-Clause
"""Negative controls of the random programs in C++ (tests/cxx/hazard): with a guard of the library
off some program must see other bits."""

import os
import subprocess
from pathlib import Path

import pytest

GUARDS = ("late", "late_state", "late_groups", "version", "seal")
PROGRAMS = 500


def run(count, **variables):
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    program = Path(library).parents[1] / "tests" / "cxx" / "test_cxx-guards"
    if not program.is_file():
        pytest.skip("the build has no tests in C++ (-Dtests=true)")
    command = [program, "hazard", str(count)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


def test_programs_pass_with_all_guards():
    done = run(100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("guard", GUARDS)
def test_programs_find_that_a_guard_is_off(guard):
    done = run(PROGRAMS, OPTFUSE_TEST_GUARDS_OFF=guard)
    found = "has other bits" in done.stderr or "the reference" in done.stderr
    assert done.returncode == 1 and found, done.stdout + done.stderr
