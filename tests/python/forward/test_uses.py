# SPDX-License-Identifier: BSD-3-Clause
"""Whatever Python can do with a pending tensor launches its update first: sweep_uses.py does all of
that, by functions that were bound before optfuse was imported."""

import re
from pathlib import Path

import pytest
from several import run_script

SWEEP = Path(__file__).with_name("sweep_uses.py")


def swept(*arguments):
    """The output of the sweep, in a process of its own."""
    shown = "import faulthandler; faulthandler.enable()"
    done = run_script([SWEEP, *arguments], first=shown, timeout=3000)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def count(said, what):
    return int(re.search(rf"^{what}: (\d+)", said, re.MULTILINE)[1])


@pytest.mark.parametrize(
    "arguments", [[], pytest.param(["--full"], marks=pytest.mark.full)], ids=("one sample", "six")
)
def test_every_use_of_a_pending_tensor_is_that_of_stock(arguments):
    """One call each, with a sample of PyTorch's own where it has some; or with six."""
    said = swept(*arguments)
    assert count(said, "called") > 1200
    assert count(said, "excepted") <= 20
    assert count(said, "never reached") < 200
