# SPDX-License-Identifier: BSD-3-Clause
"""Findings of random programs (run_programs.py), each as small as it gets."""

import pytest

from programs.draw import LAST, Program
from programs.play import judge

EQUAL, RAISED = "equal", "raised"
ITERATION = ("iteration", {"model": 0, "batch": 1, "set_to_none": True})


def backward(batch):
    return "backward", {"model": 0, "batch": batch}


def change(what, **arguments):
    return f"change_{what}", {"optimizer": 0, **arguments}


STEP = ("step", {"optimizer": 0})
ZERO_GRAD = ("zero_grad", {"optimizer": 0, "set_to_none": False})
LATE_SCALE = ("step_with_scale", {"optimizer": 0, "scale": 8.0, "inf": 1.0})

# Each finding: how it ends in backward mode, the model, the optimizer, the deeds. The late changes
# ended with other bits than stock's, in silence.
FOUND = {
    "a scale that is set late": (
        RAISED,
        "mlp in float64",
        ("Adam", {"lr": 0.1, "betas": (0.0, 0.5)}),
        (backward(1), LATE_SCALE, ZERO_GRAD, backward(2)),
    ),
    "a parameter that is replaced": (
        RAISED,
        "layer norm",
        ("AdamW", {"lr": 0.01, "weight_decay": 0.0}),
        (backward(0), change("groups", group=0, index=3, change="replaced"), STEP),
    ),
    "a parameter that is moved to a group with another lr": (
        RAISED,
        "renormalized",
        ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
        (backward(2), change("groups", group=0, index=2, change="moved"), STEP),
    ),
    "state that is replaced": (
        RAISED,
        "tied",
        ("Adam", {"lr": 0.001, "betas": (0.0, 0.5)}),
        (backward(5), change("state", index=2, change="value_of_zeros"), STEP),
    ),
    "the order of state": (
        EQUAL,
        "batch norm",
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        (ITERATION,),
    ),
    # load_state_dict() gives them the parameter's dtype; stock still rounds what it puts there to
    # the default dtype.
    "counters of ASGD that a checkpoint has made float64": (
        EQUAL,
        "mlp in float64",
        ("ASGD", {"lr": 1e-3, "t0": 2}),
        (
            *[ITERATION] * 3,
            ("remember", {"by_reference": False}),
            ("go_back", {"index": 0, "what": "optimizer"}),
            *[ITERATION] * 3,
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    end, model, (kind, options), actions = FOUND[name]
    optimizer = {"kind": kind, "options": options}
    setup = {"models": [model], "optimizers": [optimizer], "bucket_bytes": 1}
    found = judge(Program(1, setup, [*actions, LAST]))
    assert not any(verdict.failure for verdict in found.values()), found
    ends = {mode: verdict.run.end for mode, verdict in found.items()}
    assert ends == {"forward": EQUAL, "backward": end}
