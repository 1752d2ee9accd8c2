# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that go wrong: a rank that raises does so before it communicates, so that the others get
torch.distributed's own error and never hang; a job that is killed goes on from its checkpoint."""

import functools
from pathlib import Path

import apart
import failing
import pytest
import restarted
import torch
from common import assert_same
from several import TAKEN_DOWN, torchrun

HERE = Path(__file__).parent
SLACK = 60.0  # seconds beyond the time-out of the process group, on a busy machine


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return apart.told(tmp_path_factory.mktemp("failing"), failing)


@pytest.mark.parametrize("case", failing.CASES)
def test_the_other_rank_gets_an_error_of_torch_distributed(told, case):
    (well, broken), stays = told[case], "stays" in case
    assert broken["error"], "rank 1 did not notice"
    assert broken["error"][0].startswith("optfuse"), f"rank 1 got {broken['error']}"
    assert well["error"], "rank 0 trained to the end, alone"
    module, name, text = well["error"]
    passed_on = "reduction of gradients between processes has failed" in text
    assert not module.startswith("optfuse") or passed_on, f"rank 0 got {well['error']}"
    words = ("Timed out", "timed out", "timeout") if stays else ("onnection", "gloo", "Gloo")
    assert any(word in text for word in words), f"rank 0 got {name}: {text}"
    assert well["seconds"] < failing.TIMEOUT + SLACK, f"rank 0 waited {well['seconds']:.1f} s"


@functools.cache
def ended(folder, mode):
    """Weights and state at the end of a job, and what it said."""
    for i in range(5):  # see several.py; a life that torch takes down so is one too many
        done = job(folder / str(i), mode)
        if done.returncode == 0 or TAKEN_DOWN not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / str(i) / "end"), done.stdout


def job(folder, mode):
    folder.mkdir(parents=True)
    command = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command += [str(HERE / "restarted.py"), str(folder), mode]
    # The store of the first life has addresses that a second one must not find.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return torchrun(*command, cwd=HERE, timeout=300, **apart)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return ended(tmp_path_factory.mktemp("undisturbed") / "job", "stock")[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_one(undisturbed, mode, tmp_path):
    found, said = ended(tmp_path / "job", mode)
    again = restarted.KILLED // restarted.EVERY * restarted.EVERY
    assert f"life 1 begins with step {again}" in said, f"it was not killed, or began anew: {said}"
    assert_same("the end", found, undisturbed)
