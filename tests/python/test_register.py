# SPDX-License-Identifier: BSD-3-Clause
"""register(): what is promised with it is tried, and what breaks it is refused."""

import pytest
import torch
from common import assert_same, everything, net, refused, same, train, weights
from own_classes import Counter, GlobalNorm, GroupCounter, Listed, Noisy, Searching, Tensors
from own_scripts import MODES, training
from torch import nn
from torch.optim import Adafactor

import optfuse

REFUSED = {
    GlobalNorm: "the parameter differs",
    GroupCounter: "the option 't' of group 0",
    Counter: "the attribute",
    Noisy: "the parameter differs",
    Listed: "its attribute 'all' holds parameters",
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_promise_that_is_not_kept_is_refused(cls):
    words = "attribute 't'" if cls is Counter else REFUSED[cls]
    optfuse.register(cls)
    model = net()
    before = weights(model)
    optimizer = cls(model.parameters())
    random = torch.get_rng_state()
    try:
        refused(lambda: optfuse.fuse(optimizer), words, way_out="as it is")
    finally:
        optfuse.register(cls, per_parameter=False)
    assert type(optimizer) is cls and not optimizer.state
    assert_same("weights", weights(model), before)
    assert torch.equal(torch.get_rng_state(), random), "the trial drew random numbers"


def test_one_parameter_is_no_way_around_the_trial():
    optfuse.register(GlobalNorm)
    try:
        optimizer = GlobalNorm([nn.Parameter(torch.ones(3))])
        refused(lambda: optfuse.fuse(optimizer), "differs", way_out="as it is")
    finally:
        optfuse.register(GlobalNorm, per_parameter=False)


def test_the_trial_takes_over_options_and_state():
    """Fused in the middle of training, from the state that is there."""

    def script(wrap):
        model = net()
        optimizer = Tensors(model.parameters())
        for i in range(3):
            train(model, optimizer, i)
        optimizer = wrap(optimizer)
        for i in range(3, 8):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script)


def test_unknown_classes_are_refused_and_told_of_register():
    class Unknown(Tensors):
        pass

    class Derived(torch.optim.AdamW):
        pass

    for cls in (Unknown, Derived):
        optimizer = cls(net().parameters())
        refused(lambda: optfuse.fuse(optimizer), cls.__name__, way_out="optfuse.register")  # noqa: B023
        optfuse.register(cls)
        optfuse.unfuse(optfuse.fuse(optimizer))
        optfuse.register(cls, per_parameter=False)
        refused(lambda: optfuse.fuse(optimizer), cls.__name__, way_out="optfuse.register")  # noqa: B023


@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_of_a_class_with_kernels_runs_its_own_step(mode):
    class Lucky(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
            return super().step(closure)

    optfuse.register(Lucky)
    same(training(Lucky, steps=6), mode)


def test_what_register_does_not_take():
    refused(lambda: optfuse.register(Searching), "closure", way_out="as it is")
    refused(lambda: optfuse.register(3), "Optimizer", way_out="register()")
    lbfgs = torch.optim.LBFGS(net().parameters())
    refused(lambda: optfuse.fuse(lbfgs), "LBFGS", way_out="as it is")
    sparse = torch.optim.SparseAdam(net().parameters())
    refused(lambda: optfuse.fuse(sparse), "sparse gradients", way_out="as it is")


def test_adafactor_with_its_default_epsilon_needs_one_dtype_a_group():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    refused(lambda: optfuse.fuse(Adafactor([p, q])), "dtypes differ", way_out="group for each")
    optfuse.fuse(Adafactor([p, q], eps=(1e-8, 1e-3)))
