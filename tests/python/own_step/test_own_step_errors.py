# SPDX-License-Identifier: BSD-3-Clause
"""Errors of a class's own step() arrive with the parameter named, and end the
optimizer."""

import pickle

import pytest
import torch
from common import loss_of, net, refused, train
from own_classes import Flaky, Interrupted, Tensors
from own_scripts import MODES
from torch import nn
from torch.optim import Adafactor

import optfuse
from optfuse._own_step import trial


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_class_names_the_parameter(mode):
    model = net()
    optimizer = optfuse.fuse(Flaky(model.parameters()), mode=mode)
    for i in range(2):
        train(model, optimizer, i)
    optimizer.zero_grad()

    def again():
        (loss_of(model, 2) * float("inf")).backward()
        optimizer.step()
        model[0].weight.sum()

    refused(again, "shape (", "ValueError: a gradient is not finite", way_out="checkpoint")
    refused(optimizer.step, way_out="checkpoint")


def test_an_error_inside_step_has_its_cause():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Flaky([p]))
    p.grad = torch.full((3,), float("nan"))
    with pytest.raises(optfuse.Error) as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("where", ["first use", "step"])
def test_an_interrupt_stays_one(where, monkeypatch):
    p = nn.Parameter(torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(trial, "STEPS", 2)
        optfuse.register(Interrupted)
        eager = [p] if where == "step" else []
        optimizer = optfuse.fuse(Interrupted([p]), eager=eager)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            p.grad = torch.ones(3)
            optimizer.step()
        assert where == "first use"
        p.sum()
    refused(optimizer.step, "it was interrupted", way_out="checkpoint")


def test_state_that_can_not_be_updated_raises_in_step():
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = optfuse.fuse(Adafactor([p]))
    for _ in range(2):
        p.grad = torch.ones(3, 4)
        optimizer.step()
    entry = optimizer.state[p]
    entry["row_var"] = torch.zeros(()).expand_as(entry["row_var"])
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    p.grad = torch.ones(3, 4)
    with pytest.raises(optfuse.Error, match="single memory location"):
        optimizer.step()


def test_a_sparse_gradient_is_refused_with_its_parameter():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optfuse.fuse(Tensors(table.parameters()))
    table(torch.tensor([1])).sum().backward()
    refused(optimizer.step, "shape (5, 3)", "sparse", way_out="sparse=False")
