# SPDX-License-Identifier: BSD-3-Clause
"""Classes in the styles of many packages: which of them backward mode updates in backward(), and
why it leaves others to step(). Their bits: iteration_by_a_class in programs/deeds/training.py."""

import random

import pytest
import torch
from common import fuse_with
from programs.models import MODELS
from programs.optimizers import WITHOUT_KERNELS
from style_classes import STYLES

import optfuse

#: In backward mode left to step(), and why; the others are updated in backward().
LEFT = dict.fromkeys(
    ("Signs", "Chooses", "Lamb", "CountsLarge", "EndsAtLarge", "SumOfAll"), "looks at numbers"
)
LEFT |= {
    "Copies": "takes the address of a tensor",
    "MeanWeight": "combines several parameters",
}
#: Does what it did not do in the steps before, when it has run ahead.
RAISES = "CouplesAtTimes"


def explained(name):
    """After 12 steps in backward mode."""
    torch.manual_seed(0)
    random.seed(0)
    build, batch = MODELS["marked"]
    model = build()
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}]
    optimizer = fuse_with(WITHOUT_KERNELS[f"{name}, a style"](groups), "backward")
    for step in range(12):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch(step)), batch(step + 50)[:, 0]).backward()
        optimizer.step()
    return optfuse.explain(optimizer)


@pytest.mark.parametrize("name", sorted(STYLES.keys() - {RAISES}))
def test_backward_mode_updates_in_backward_what_can_be(name):
    said = explained(name)
    why = f"now backward() leaves all to it, since it {LEFT.get(name)}"
    assert (f"ran 0 times at the first gradient of backward(); {why}" in said) == (name in LEFT)
    assert ("ran 10 times" in said) == (name not in LEFT)


def test_parameters_that_depend_on_each_other_in_a_later_step_are_refused():
    with pytest.raises(optfuse.Error, match="combines several parameters.*Nothing was updated"):
        explained(RAISES)
