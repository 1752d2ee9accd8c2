# SPDX-License-Identifier: BSD-3-Clause
"""gsplat: its DefaultStrategy grows and prunes Gaussians, and exchanges parameters and their state
in the optimizers. Its rasterizer needs CUDA: here PyTorch's operators draw."""

import torch
from gsplat.strategy import DefaultStrategy
from torch import nn

import optfuse

torch.manual_seed(0)
count, side = 60, 24
parameters = nn.ParameterDict(
    {
        "means": nn.Parameter(torch.rand(count, 3)),
        "scales": nn.Parameter(torch.full((count, 3), -2.5)),
        "quats": nn.Parameter(torch.randn(count, 4)),
        "opacities": nn.Parameter(torch.zeros(count)),
        "colors": nn.Parameter(torch.rand(count, 3)),
    }
)
optimizers = {}
for name, parameter in parameters.items():
    optimizer = torch.optim.Adam([parameter], lr=1e-2, fused=True)
    optimizer = optfuse.fuse(optimizer)
    optimizers[name] = optimizer
strategy = DefaultStrategy(refine_start_iter=3, refine_every=4, reset_every=12, grow_grad2d=1e-6)
strategy.check_sanity(parameters, optimizers)
state = strategy.initialize_state(scene_scale=1.0)
rows, columns = torch.meshgrid(*(torch.linspace(0, 1, side),) * 2, indexing="ij")
target = torch.stack([rows, columns, (rows - 0.5).abs()], -1)


def draw(means2d):
    away = torch.stack([columns, rows], -1)[:, :, None] - means2d
    rotated = nn.functional.normalize(parameters["quats"], dim=-1)[:, :2] * away
    weight = (rotated / parameters["scales"][:, :2].exp()).square().sum(-1).mul(-0.5).exp()
    weight = weight * parameters["opacities"].sigmoid()
    return (weight @ parameters["colors"]) / (weight.sum(-1, keepdim=True) + 1e-3)


for step in range(16):
    seen = parameters["means"][:, :2] * 1.0
    info = {"means2d": seen[None], "width": side, "height": side, "n_cameras": 1}
    count = len(seen)
    info |= {"radii": torch.ones(1, count, 2), "gaussian_ids": torch.arange(count)}
    strategy.step_pre_backward(parameters, optimizers, state, step, info)
    loss = (draw(info["means2d"][0]) - target).abs().mean()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    strategy.step_post_backward(parameters, optimizers, state, step, info, packed=False)
