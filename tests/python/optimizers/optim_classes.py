# SPDX-License-Identifier: BSD-3-Clause
"""Every optimizer class that fuses, made so that stock computes the reference; but those that round
once (test_rounding.py)."""

import inspect

from common import net
from torch import nn

from optfuse._rules import NATIVE, RULES
from optfuse.optim import ROUNDING

CLASSES = sorted({*RULES, *NATIVE} - {*ROUNDING}, key=lambda cls: cls.__name__)
#: Options that a class needs beside a learning rate to have all of its state.
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}
#: Classes whose fused implementation on the CPU is the reference (docs/numerics.md).
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def accepts(cls, option):
    return option in inspect.signature(cls).parameters


def build(cls, params, **options):
    """A stock optimizer whose flags select the reference."""
    flags = {}
    if cls.__name__ in FUSED:
        flags = {"fused": True}
    elif accepts(cls, "foreach"):
        flags = {"foreach": False}
    return cls(params, **{"lr": 0.01, **flags, **OPTIONS.get(cls.__name__, {}), **options})


def model_for(cls):
    """Muon takes matrices only."""
    if cls.__name__ != "Muon":
        return net()
    sizes = (6, 8, 8, 3)
    layers = [nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
