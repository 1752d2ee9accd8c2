# SPDX-License-Identifier: BSD-3-Clause
"""Clipping together with a loss scale that the update divides by."""

import pytest
import torch
from clipped import LIMIT, clip
from common import adamw
from fakecuda import NAME
from legal import legal, loss_of, net


def scaled(unscale, growth=2):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**100, growth_interval=growth)
        for i in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            yield "norm", clip(optimizer, LIMIT if unscale else 1e30)
            scaler.step(optimizer)
            scaler.update()
            yield "scale", scaler.get_scale()
            if i % 3 == 0:
                yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())
        yield "state", optimizer.state_dict()["state"]

    return script


@pytest.mark.parametrize("unscale", [True, False])
def test_with_a_grad_scaler_that_overflows(unscale):
    legal(scaled(unscale))


def divided(wrap):
    """step() divides the gradients that were clipped, and leaves them divided."""
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    scale, inf = (torch.tensor(v, device=NAME) for v in (16.0, 0.0))
    for i in range(4):
        optimizer.zero_grad()
        (loss_of(model, i) * scale).backward()
        clip(optimizer)
        optimizer.grad_scale, optimizer.found_inf = scale, inf
        optimizer.step()
        inf.fill_(float(i == 1))  # the third step is left out
        yield "weights", list(model.parameters())
        yield "gradients", [p.grad for p in model.parameters()]


def test_clipping_before_the_update_divides():
    legal(divided)
