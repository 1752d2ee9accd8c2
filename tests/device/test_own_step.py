# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels, on a GPU that the CPU plays: their own step() on one
parameter, on the stream to which the update belongs."""

import fakecuda
import pytest
import torch
from common import everything
from legal import legal, net, train
from own_classes import Tensors

import optfuse

MODES = ("forward", "backward")
optfuse.register(Tensors)


def training(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.RMSprop, Tensors])
def test_bits_and_order_are_those_of_the_class(make, mode):
    legal(training(make), mode)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Tensors])
def test_another_stream_that_waited_for_step_sees_the_update(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        a, b = fakecuda.stream(), fakecuda.stream()
        a.wait_stream(fakecuda.current())
        with a:
            train(model, optimizer, 3)
            optimizer.zero_grad()
            event = a.record_event()
        wrap.pending() if wrap.fused else None
        b.wait_event(event)
        with b:
            for p in model.parameters():
                yield "weight", p
        fakecuda.synchronize()

    legal(script)
