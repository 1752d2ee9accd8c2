# SPDX-License-Identifier: BSD-3-Clause
"""`python -m optfuse run` with two processes that Accelerate's launcher or Lightning starts: the
weights of stock, bit by bit."""

import os
import re
from pathlib import Path

import pytest
from several import again, python
from test_recipes import skip_without

SCRIPT = str(Path(__file__).parent / "launched.py")
RUN = ("-m", "optfuse", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# It starts processes on the CPU, too, where the script asks for that.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
LAUNCH += ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
LAUNCH += ("--main_process_port=0",)


def trained(*arguments):
    done = again(lambda: python(arguments, os.getcwd()))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall(r"^2 processes, \w+$", done.stdout, re.MULTILINE)
    modes = re.findall(r"^optfuse: fused 1 optimizer \(AdamW\) in (\w+) mode$", done.stderr, re.M)
    return line, modes


@pytest.fixture(scope="module")
def stock():
    """The wrappers of either framework: both have DistributedDataParallel reduce over gloo."""
    skip_without("accelerate", "lightning")
    line, modes = trained(*TORCHRUN, SCRIPT, "accelerate")
    assert not modes
    return line


def test_accelerates_launcher_inside_of_run(stock):
    assert trained(*RUN, *LAUNCH, SCRIPT, "accelerate") == (stock, ["forward"] * 2)


def test_accelerates_launcher_outside_of_run(stock):
    outside = (*LAUNCH, "--module", *RUN[1:], "--mode", "backward")
    assert trained(*outside, SCRIPT, "accelerate") == (stock, ["backward"] * 2)


def test_lightning_starts_the_script_again(stock):
    run = (*RUN, "--mode", "backward", SCRIPT, "lightning")
    assert trained(*run) == (stock, ["backward"] * 2)
