# SPDX-License-Identifier: BSD-3-Clause
"""normflows: a flow of affine couplings, by maximum likelihood."""

import normflows
import torch

import optfuse

torch.manual_seed(0)
flows = []
for _ in range(4):
    parameters = normflows.nets.MLP([1, 32, 32, 2], init_zeros=True)
    flows += [normflows.flows.AffineCouplingBlock(parameters), normflows.flows.Permute(2)]
model = normflows.NormalizingFlow(normflows.distributions.base.DiagGaussian(2), flows)
target = normflows.distributions.TwoMoons()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5, fused=True)
optimizer = optfuse.fuse(optimizer)
for _ in range(15):
    optimizer.zero_grad()
    loss = model.forward_kld(target.sample(128))
    loss.backward()
    optimizer.step()
