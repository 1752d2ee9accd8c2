# SPDX-License-Identifier: BSD-3-Clause
"""Random training in which features meet (mixed_programs.py): a sample of what was played."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mixed_programs.py")
PROGRAMS = 60


@pytest.mark.slow
def test_a_sample_is_equal_or_raises():
    """By itself: it registers classes, and has every gradient a promise."""
    command = [sys.executable, str(SCRIPT), "1", str(PROGRAMS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "seed" not in done.stdout, done.stdout
    counts = {word: int(n) for n, word in (line.split(" ", 1) for line in done.stdout.splitlines())}
    assert sum(counts.values()) == PROGRAMS
    assert counts["forward: equal"] > PROGRAMS / 3 and counts["backward: equal"] > 5, counts
