# SPDX-License-Identifier: BSD-3-Clause
"""The mark by which the first use finds a pending update, and which of them a launch takes off."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import optfuse


def is_marked(tensor):
    return "TESTING_ONLY_GenericWrapper" in str(torch._C._dispatch_keys(tensor))


@pytest.fixture
def pending():
    """A parameter with a pending update, and its state."""
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(AdamW([p]), mode="forward")
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    state = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
    yield p, state
    optfuse.unfuse(optimizer)


def test_parameter_gradient_and_state_are_marked_while_the_update_is_pending(pending):
    p, state = pending
    assert all(is_marked(tensor) for tensor in (p, p.grad, *state))


def test_a_launch_takes_the_marks_of_parameter_and_state_off(pending):
    """The next step() would look behind each for an update in vain."""
    p, state = pending
    p.detach()
    assert not any(is_marked(tensor) for tensor in (p, *state))


def test_state_that_was_replaced_keeps_the_mark_of_its_own_update():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(AdamW([p]), mode="forward")
    p.grad = torch.ones(3)
    optimizer.step()
    before = optimizer.state[p]["exp_avg"]
    optimizer.state[p]["exp_avg"] = torch.zeros(3)
    assert is_marked(before)
    assert before.tolist() == pytest.approx([0.1] * 3)
    p.grad = torch.ones(3)
    optimizer.step()
    assert is_marked(optimizer.state[p]["exp_avg"]) and not is_marked(before)
    optfuse.unfuse(optimizer)
