# SPDX-License-Identifier: BSD-3-Clause
"""A process that goes wrong in a pipeline, or is killed, is an error on all others: at once,
although they live on with their connections, and with its number."""

import signal

import apart
import lost_in_pipeline
import pytest
from lost_in_pipeline import CASES, LATE

SOON = 60.0  # seconds, on a busy machine; the process group's time-out is 300


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return apart.told(tmp_path_factory.mktemp("lost"), lost_in_pipeline)


def others(told, name):
    """(process, what it said), of those that nothing was wrong with."""
    found = [(rank, one) for rank, one in enumerate(told[name]) if rank != CASES[name].wrong]
    assert len(found) == CASES[name].world - 1
    return found


ENDED = [name for name, case in CASES.items() if not case.off]


@pytest.mark.parametrize("name", ENDED)
def test_all_others_name_the_process(told, name):
    case = CASES[name]
    for rank, one in others(told, name):
        assert one["error"], f"process {rank} trained to the end"
        text = one["error"][2]
        lost = f"optfuse: process {rank} of the pipeline has lost process {case.wrong} "
        has_gone_with_it = case.store == "tcp" and "store of torch.distributed is lost" in text
        assert text.startswith(lost) or has_gone_with_it, text
        assert "Start all processes again, from a checkpoint" in text
        assert case.how != "raises" or "ValueError: this process gives up" in text
        limit = LATE + SOON if case.how == "stays away" else SOON
        assert one["seconds"] < limit, f"process {rank} waited {one['seconds']:.1f} s"


@pytest.mark.parametrize("name", ENDED)
def test_the_process_itself_gets_its_own_error(told, name):
    case = CASES[name]
    wrong = told[name][case.wrong]
    if case.how == "killed":
        assert wrong == {"status": -signal.SIGKILL}
    elif case.how == "raises":
        assert wrong["error"] == ["builtins", "ValueError", "this process gives up"]
    else:
        assert "others had lost this process before" in wrong["again"][2]


@pytest.mark.parametrize("name", ENDED)
def test_weights_in_the_middle_of_a_batch_are_not_saved_or_trained_on(told, name):
    for rank, one in enumerate(told[name]):
        if "status" in one:
            continue
        for what in ("again", "saved"):
            assert one[what], f"process {rank} went on: {what}"
            assert "a checkpoint of" in one[what][2], one[what]


def test_nobody_is_told_where_a_process_that_fails_keeps_its_connections(told):
    """A fault that the tests above would find."""
    (name,) = (name for name, case in CASES.items() if case.off == "fail")
    ((_, waited),) = others(told, name)
    assert waited["seconds"] >= LATE and "Timed out" in waited["error"][2]


def test_a_neighbour_is_blamed_where_nobody_says_who_was_the_first(told):
    """A fault that the tests above would find."""
    (name,) = (name for name, case in CASES.items() if case.off == "_first")
    assert "has lost process 1 " in told[name][2]["error"][2]
