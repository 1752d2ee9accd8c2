# SPDX-License-Identifier: BSD-3-Clause
"""One scenario for each guard of the library (plugin/guard.h): a promise that
breaks as soon as this guard is off. A scenario raises AssertionError if it sees
wrong numbers or misses an error.

Run as a program, with the test-only library in OPTFUSE_LIBRARY, it plays each
scenario twice, guard on and guard off, each time in a process of its own, and
prints one line of JSON: {name: [on, off]}, with "kept", "broken: ..." or
"crashed: ..." each. It is run in tests/python:

    python -m guard_scenarios [NAME ...]
"""

# Each module adds its scenarios.
from guard_scenarios import (  # noqa: F401
    backward,
    clipping,
    data_parallel,
    delays,
    dtensors,
    layouts,
    own_step,
    pending,
    promises,
    recorded,
    reordering,
)
from guard_scenarios.player import play
from guard_scenarios.registry import SCENARIOS

__all__ = ["SCENARIOS", "play"]
