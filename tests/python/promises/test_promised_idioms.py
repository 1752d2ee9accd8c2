# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that are promises and their owners: two optimizers, one that goes, a child process.
What scripts do between backward() and the next one: test_promised_deeds.py."""

import copy
import gc
import os

import pytest
import torch
from common import adamw, assert_same, everything, python_ok, sgd

import optfuse
from promises.counted import total
from promises.scripted import STEPS, equal, loss_of, wide


def test_two_optimizers():
    def script(wrap):
        model = wide()
        halves = list(model.parameters())
        optimizers = [wrap(adamw(halves[:3])), wrap(sgd(halves[3:]))]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, i).backward()
            for optimizer in optimizers:
                optimizer.step()
        yield from everything(model, optimizers[0])

    equal(script, "forward", panels=True)


@pytest.mark.parametrize("end", ("unfuse", "all are gone"))
def test_a_gradient_can_be_read_when_nobody_would_use_it(end):
    torch.manual_seed(0)
    stock = wide()
    model = copy.deepcopy(stock)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for m in (stock, model):
        loss_of(m, 0).backward()
    grads = [p.grad for p in model.parameters()]
    assert total(optimizer, "promised") > 0
    if end == "unfuse":
        optfuse.unfuse(optimizer)
    else:
        del model, optimizer
        gc.collect()
    assert_same("gradients", grads, [p.grad for p in stock.parameters()])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_finds_gradients():
    code = """
import os, copy, torch, optfuse
from torch import nn
torch.manual_seed(0)
stock = nn.Linear(40, 40)
model = copy.deepcopy(stock)
optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
x = torch.randn(5, 40)
for m in (stock, model):
    m(x).square().sum().backward()
assert sum(layer.promised for layer in optfuse.summary(optimizer).promised) == 1
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(stock.weight.grad, model.weight.grad) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    python_ok(code, OPTFUSE_PRODUCTS="force")
