# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of classes with their own step(). Importing it registers
the classes of OWN."""

from common import everything, net
from own_classes import Abstract, Flaky, InDicts, NewTensors, Numbers, Stateless, Tensors
from scripts import trained
from torch import nn

import optfuse

MODES = ["forward", "backward"]
OWN = [Abstract, Tensors, Numbers, NewTensors, InDicts, Stateless, Flaky]
for cls in OWN:
    optfuse.register(cls)


def matrices():
    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    return nn.Sequential(*layers)


def training(make, build=net, steps=20, set_to_none=True):
    def between(model, optimizer, i):
        if i % 7 == 3:
            yield from everything(model, optimizer)

    return trained(make, build, between=between, steps=steps, zeroing=set_to_none, pending=False)


def momentum(parameters):
    return Tensors(parameters)
