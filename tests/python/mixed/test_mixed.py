# SPDX-License-Identifier: BSD-3-Clause
"""Random training in which features meet (mixed_programs.py): a sample of what was played."""

from pathlib import Path

import pytest
from several import run_script

SCRIPT = Path(__file__).with_name("mixed_programs.py")
PROGRAMS = 60


@pytest.mark.slow
def test_a_sample_is_equal_or_raises():
    """By itself: it registers classes, and has every gradient a promise."""
    done = run_script([SCRIPT, "1", PROGRAMS], timeout=600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "seed" not in done.stdout, done.stdout
    counts = {word: int(n) for n, word in (line.split(" ", 1) for line in done.stdout.splitlines())}
    assert sum(counts.values()) == PROGRAMS
    assert counts["forward: equal"] > PROGRAMS / 3 and counts["backward: equal"] > 5, counts
