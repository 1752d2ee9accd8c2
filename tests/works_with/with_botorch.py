# SPDX-License-Identifier: BSD-3-Clause
"""BoTorch: a model fitted and candidates found by an optimizer of PyTorch. One start at a time:
gradients of several have other strides than they, and PyTorch's fused=True, which is compared with,
mixes up their elements."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.generation.gen import gen_candidates_torch
from botorch.models import SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_torch
from gpytorch.mlls import ExactMarginalLogLikelihood

import optfuse


def make(params, **options):
    optimizer = torch.optim.Adam(params, fused=True, **options)
    optfuse.fuse(optimizer)
    return optimizer


torch.manual_seed(0)
x = torch.rand(12, 2, dtype=torch.float64)
y = -(x - 0.3).square().sum(1, keepdim=True)
model = SingleTaskGP(x, y)
mll = ExactMarginalLogLikelihood(model.likelihood, model)
fit_gpytorch_mll_torch(mll, step_limit=12, optimizer=make)
improvement = LogExpectedImprovement(model, best_f=y.max())
options = {"maxiter": 8}
for _ in range(3):
    start = torch.rand(1, 1, 2, dtype=torch.float64)
    candidates, _ = gen_candidates_torch(start, improvement, 0, 1, optimizer=make, options=options)
