# SPDX-License-Identifier: BSD-3-Clause
"""Behind a layer whose gradient is promised stand stock's own nodes. Hooks, saved tensors and
checkpoints there are deeds of the programs (test_promised_deeds.py)."""

import pytest
import torch
from common import adamw
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from promises.scripted import MODES, batch, equal, script_of


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("when", ("fuse", "unfuse"))
@pytest.mark.parametrize("mode", MODES)
def test_fused_between_forward_and_backward(mode, when, bias):
    """Rows, inputs and outputs are as many, so that nothing but the order tells them apart."""

    def trained(changes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias), nn.Tanh(), nn.Linear(8, 8, bias))
        optimizer = adamw(model.parameters())
        if changes and when == "unfuse":
            optimizer = optfuse.fuse(optimizer, mode)
        x = torch.randn(8, 8).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        if changes and when == "fuse":
            optimizer = optfuse.fuse(optimizer, mode)
        elif changes:
            optfuse.unfuse(optimizer)
        loss.backward()
        optimizer.step()
        return [x.grad, *(p.detach().clone() for p in model.parameters())]

    for a, b in zip(trained(True), trained(False), strict=True):
        assert torch.equal(a, b)


def test_compiled_autograd_computes_the_gradient():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss = model(batch(i)).square().mean()
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            loss.backward()
        optimizer.step()

    equal(script_of(iteration), "forward", promised=False)
