# SPDX-License-Identifier: BSD-3-Clause
"""Messages of tests/bootstrap.py where a step fails."""

from __future__ import annotations

import sys

import pytest
from tree import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import bootstrap


def test_a_step_that_finds_no_room_says_what_to_do() -> None:
    with pytest.raises(SystemExit, match="with status 1: make room for .* and start this again"):
        bootstrap.run([sys.executable, "-c", "open('/dev/full', 'w').write('x' * 99999)"])
    with pytest.raises(SystemExit, match="with status 3$"):
        bootstrap.run([sys.executable, "-c", "raise SystemExit(3)"])
