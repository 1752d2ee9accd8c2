# SPDX-License-Identifier: BSD-3-Clause
"""A step() that calls code of torch.compile: with a tensor at a time it is taken; with lists, for
which it would be compiled anew for each parameter, it is refused before anything is compiled."""

import pytest
import torch
from common import net, refused, same, train
from own_scripts import MODES, training
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import optfuse


def add_all(params, grads, rate):
    for param, grad in zip(params, grads, strict=True):
        param.sub_(grad * rate)


def add_one(param, grad, rate):
    param.sub_(grad.sign() * rate)


update_all = torch.compile(add_all, backend="eager", fullgraph=True, dynamic=False)
update_one = torch.compile(add_one, backend="eager")


class Together(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            update_all(params, [p.grad for p in params], rate=group["lr"])


class OneByOne(Optimizer):
    """Reads a value, so that it is not traced."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update_one(p, p.grad, group["lr"])
                    self.state[p]["norm"] = p.norm().item()


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("is_registered", (True, False))
def test_lists_are_refused_before_anything_is_compiled(is_registered):
    """And the class compiles its first step as if nobody had asked."""
    optfuse.register(Together, per_parameter=is_registered)
    model = net()
    optimizer = Together(model.parameters())
    try:
        words = ("torch.compile", "add_all", "uncompiled")
        refused(lambda: optfuse.fuse(optimizer), *words, way_out="as it is")
    finally:
        optfuse.register(Together, per_parameter=False)
    assert not counters["stats"]
    for i in range(3):
        train(model, optimizer, i)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_at_a_time_is_taken(mode):
    optfuse.register(OneByOne)
    try:
        same(training(OneByOne), mode, prove=False)
    finally:
        optfuse.register(OneByOne, per_parameter=False)
    assert counters["stats"]["unique_graphs"] > 0
