# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose updates arrive late."""

import torch
from common import adamw, net, train

import optfuse
from guard_scenarios.registry import guards, must_raise


def delayed():
    model = net()
    opt = optfuse.fuse(adamw(model.parameters()), optfuse.Forward(delay={model: 2}))
    for i in range(4):
        train(model, opt, i)
    return model, opt


@guards("late_write")
def a_change_that_a_waiting_version_would_undo_is_refused():
    model, opt = delayed()
    with torch.no_grad():
        model[0].weight.zero_()
    must_raise(lambda: train(model, opt, 4), "step() after a change of a delayed parameter")


@guards("exchange")
def an_array_over_a_delayed_parameter_sees_its_versions():
    model, opt = delayed()
    array = model[0].weight.detach().numpy()
    train(model, opt, 4)
    assert (array == model[0].weight.detach().numpy()).all(), "it shows another version"
