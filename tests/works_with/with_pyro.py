# SPDX-License-Identifier: BSD-3-Clause
"""Pyro: variational inference, which makes an optimizer for each parameter when it first has a
gradient."""

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import PyroOptim

import optfuse


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](3, 1)
        normal = pyro.distributions.Normal(0.0, 1.0)
        self.linear.weight = PyroSample(normal.expand([1, 3]).to_event(2))
        self.linear.bias = PyroSample(normal.expand([1]).to_event(1))

    def forward(self, x, y=None):
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", pyro.distributions.Normal(mean, 0.5), obs=y)


def make(parameters, **options):
    optimizer = torch.optim.Adam(parameters, **options)
    optfuse.fuse(optimizer)
    return optimizer


pyro.set_rng_seed(0)
x = torch.randn(100, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
model = Regression()
guide = AutoNormal(model)
svi = SVI(model, guide, PyroOptim(make, {"lr": 0.03, "fused": True}), loss=Trace_ELBO())
values = [svi.step(x, y) for _ in range(20)]
