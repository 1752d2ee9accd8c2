# SPDX-License-Identifier: BSD-3-Clause
"""Steps that count, fused and alone, of which later ones may do something else."""

import random

import torch
from traced_classes import Base

import optfuse
from optfuse._link import link_of

STEPS, LATER = 70, 50  # the longest run of a trial has 21 steps


class Replayed(Base):
    """Counts its steps for each parameter, and draws numbers from the count."""

    def begin_state(self, p, state):
        if not state:
            state["n"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["n"] += 1
        return state["n"]

    def update(self, p, grad, state, group):
        n = self.begin_state(p, state)
        beta = group["betas"][0]
        state["m"].mul_(beta).add_(grad, alpha=1 - beta)
        self.later(p, grad, state, group, n > LATER)
        p.add_(state["m"], alpha=-group["lr"] / (1 - beta**n))

    def later(self, p, grad, state, group, is_late):
        pass


def trained(make, mode, shapes=((31,), (7, 5), (20,))):
    torch.manual_seed(0)
    random.seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(params)
    if mode is not None:
        optfuse.fuse(optimizer, mode=mode)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum((p * torch.randn(p.shape)).sum() for p in params).backward()
        optimizer.step()
        scheduler.step()
    return optimizer, params


def played(cohort):
    """In how many steps a replay of it was right."""
    return sum(turn.played for turn in cohort.turns.values())


def learned(cohort):
    """How many replays it has had."""
    return sum(turn.learned for turn in cohort.turns.values())


def assert_same(ours, theirs, where):
    assert torch.equal(ours.detach().nan_to_num(7.0), theirs.detach().nan_to_num(7.0)), where


def compare(make, mode, *shapes):
    theirs, expected = trained(make, None, *shapes)
    ours, found = trained(make, mode, *shapes)
    for i, (p, q) in enumerate(zip(found, expected, strict=True)):
        assert_same(p, q, f"parameter {i}")
        assert list(ours.state[p]) == list(theirs.state[q])
        for key, value in theirs.state[q].items():
            if isinstance(value, torch.Tensor):
                assert_same(ours.state[p][key], value, key)
            else:
                assert ours.state[p][key] == value, key
    return link_of(ours).traced
