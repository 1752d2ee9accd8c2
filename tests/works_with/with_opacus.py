# SPDX-License-Identifier: BSD-3-Clause
"""Opacus: gradients of each sample, clipped, with noise, which step() puts into .grad."""

import torch
from digits import dataset
from opacus import PrivacyEngine
from torch import nn

import optfuse

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten()),
    *(nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
optimizer = optfuse.fuse(optimizer)
loader = torch.utils.data.DataLoader(dataset, batch_size=128)
model, private, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    noise_generator=torch.Generator().manual_seed(0),
)
for image, label in loader:
    private.zero_grad()
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    private.step()
