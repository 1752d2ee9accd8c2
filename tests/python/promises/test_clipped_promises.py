# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that are promises are clipped without being computed, where their norm is surely below
max_norm (generated_clips.py). Full runs have played 3,000 programs."""

import json
import os

import pytest
import torch
from common import adamw, python_ok
from programs.deeds.late_norms import AT_LAUNCH, FOR_A_LOOK, FOR_THE_CLIP, SCREENED
from torch import nn

import optfuse
from promises.counted import total
from promises.scripted import batch, equal, first, loss_of, script_of, wide

PROGRAMS = 200
OUTCOMES = (SCREENED, FOR_THE_CLIP, FOR_A_LOOK, AT_LAUNCH)


def played(**environment):
    code = f"""
import json
from promises.generated_clips import play
print(json.dumps(play(first=1, n={PROGRAMS})))
"""
    return json.loads(python_ok(code, timeout=600, **environment))


def test_random_clips_have_the_bits_of_stock():
    tally = played()
    assert tally["programs"] == PROGRAMS
    assert tally.get("differ", 0) == 0, "\n".join(tally["wrong"])
    for outcome in OUTCOMES:
        assert tally.get(outcome, 0) >= PROGRAMS // 10, tally


def test_a_bound_that_is_too_small_is_found():
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    tally = played(OPTFUSE_LIBRARY=library, OPTFUSE_TEST_GUARDS_OFF="norm_bound")
    assert tally["differ"] > 0


def clipped(model, optimizer, i, max_norm=1e3):
    optimizer.zero_grad()
    loss_of(model, i).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def test_a_norm_far_below_max_norm_leaves_promises_as_they_are():
    def iteration(model, optimizer, i):
        clipped(model, optimizer, i)
        optimizer.step()

    equal(script_of(iteration), "forward", panels=True, made=False)


def test_a_norm_above_max_norm_has_gradients_computed():
    def iteration(model, optimizer, i):
        yield "norm", clipped(model, optimizer, i, max_norm=1e-3)
        optimizer.step()

    equal(script_of(iteration), "forward", panels=False, made=True)


def test_a_norm_that_is_looked_at_behind_the_update_computes_no_gradient():
    def iteration(model, optimizer, i):
        norm = clipped(model, optimizer, i)
        optimizer.step()
        optimizer.zero_grad()
        yield "loss", loss_of(model, i)
        yield "norm", norm

    equal(script_of(iteration), "forward", panels=True, made=False)


def norms_of_gradients_alone(error_if_nonfinite):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        grads = [p.grad for p in model.parameters()]
        norm = nn.utils.get_total_norm(grads, error_if_nonfinite=error_if_nonfinite)
        yield "is finite", norm.isfinite()
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e3, norm)
        optimizer.step()

    equal(script_of(iteration), "forward", panels=True, made=False)


@pytest.mark.parametrize("error_if_nonfinite", (False, True))
def test_get_total_norm_and_clip_grads_with_norm(error_if_nonfinite):
    """In a process of its own: such a norm is late while every fused optimizer is in forward mode,
    and other tests may leave some that are not."""
    python_ok(
        "from promises.test_clipped_promises import norms_of_gradients_alone\n"
        f"norms_of_gradients_alone({error_if_nonfinite})"
    )


def test_where_denormals_count_as_zeros_gradients_are_computed():
    def iteration(model, optimizer, i):
        yield "norm", clipped(model, optimizer, i)
        optimizer.step()

    assert torch.set_flush_denormal(True)
    try:
        equal(script_of(iteration), "forward", panels=False, made=True)
    finally:
        torch.set_flush_denormal(False)


def test_a_norm_nobody_looks_at_keeps_no_factors():
    """Those of gradients that were dropped go with the next norm."""
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    norms = [clipped(model, optimizer, i) for i in range(3)]
    assert total(optimizer, "made") == 0
    optimizer.zero_grad()
    expected = []
    for i in range(3):
        grads = torch.autograd.grad(loss_of(model, i), list(model.parameters()))
        expected.append(nn.utils.get_total_norm(grads))
    assert torch.equal(torch.stack(norms), torch.stack(expected))
    assert first(model).grad is None and batch(0) is not None
    optfuse.unfuse(optimizer)
