# SPDX-License-Identifier: BSD-3-Clause
"""Random programs of each class without kernels that the tests have, and of classes that are drawn:
each has a step() of another way to compute, to keep or to read what it needs."""

import pytest

from programs.optimizers import WITHOUT_KERNELS
from programs.runner import explain, run


def play(kind, count, least):
    """least: how many of its programs have to run to their end in backward mode."""
    tally = run(1, count, kind=kind)
    shown = "\n\n".join(str(explain(failure)) for failure in tally.failures[:2])
    assert not tally.failures, f"{len(tally.failures)} programs failed, such as\n{shown}"
    ends = [tally.ends[mode, "equal"] for mode in ("forward", "backward")]
    assert ends[0] >= 0.9 * count and ends[1] >= least, ends


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_programs_of_a_class(name):
    play(name, 12, 1)


@pytest.mark.slow
def test_programs_of_drawn_classes():
    play("drawn", 240, 40)
