# SPDX-License-Identifier: BSD-3-Clause
"""Every optimizer class that fuses, made so that stock computes the reference."""

import inspect

import torch
from common import net
from torch import nn

from optfuse._rules import NATIVE, RULES

CLASSES = sorted({*RULES, *NATIVE}, key=lambda cls: cls.__name__)
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


def matrices(dtype=torch.float32):
    """Three parameters that any class takes, with other gradients at each step."""
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in ((3, 5), (7, 2), (4, 4))
    ]


def set_gradients(params, step, sign=1.0):
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + i)
        p.grad = (sign * torch.randn(p.shape, generator=generator)).to(p.dtype)
