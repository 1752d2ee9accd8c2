# SPDX-License-Identifier: BSD-3-Clause
"""GPyTorch: hyperparameters of a Gaussian process by its marginal likelihood."""

import gpytorch
import torch

import optfuse


class Process(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0, 1, 60)
y = torch.sin(x * 6) + 0.1 * torch.randn(60)
likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(x, y, likelihood)
model.train()
likelihood.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
optimizer = optfuse.fuse(optimizer)
likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
for _ in range(20):
    optimizer.zero_grad()
    loss = -likelihood_of(model(x), y)
    loss.backward()
    optimizer.step()
