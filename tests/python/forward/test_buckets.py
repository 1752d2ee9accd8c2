# SPDX-License-Identifier: BSD-3-Clause
"""Buckets on the CPU: small updates run together with their neighbours."""

from __future__ import annotations

import torch
from torch import nn

import optfuse

LAYERS, WIDTH = 6, 16
BYTES = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)  # of all parameters


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        opt.zero_grad()
        net(torch.randn(4, WIDTH, generator=generator)).square().sum().backward()
        opt.step()
    return [p.detach().clone() for p in net.parameters()]


def test_what_fits_a_bucket_runs_together() -> None:
    def launches(bucket: int) -> tuple[int, int]:
        net = model()
        opt = optfuse.fuse(torch.optim.SGD(net.parameters(), 0.1), "backward", bucket_bytes=bucket)
        train(net, opt, 1)
        return optfuse.summary(opt).at_close, optfuse.summary(opt).launches

    assert launches(1) == (0, 2 * LAYERS)
    assert launches(0) == (2 * LAYERS, 1)
    in_buckets, regions = launches(BYTES // 2)
    assert in_buckets == 2 * LAYERS
    assert regions <= 3


def test_in_forward_mode_neighbours_run_at_the_first_use_of_one(several_threads: None) -> None:
    net = model()
    opt = optfuse.fuse(torch.optim.SGD(net.parameters(), 0.1), bucket_bytes=BYTES // 2)
    net(torch.ones(1, WIDTH)).sum().backward()
    opt.step()
    net[0].weight.detach()
    assert 0 < optfuse.summary(opt).pending <= LAYERS
    assert optfuse.summary(opt).launches == 1


def test_reading_a_parameter_runs_what_waits_for_it() -> None:
    net = model()
    opt = optfuse.fuse(torch.optim.SGD(net.parameters(), 0.1), "backward", bucket_bytes=1 << 30)
    before = net[0].weight.detach().clone()
    net(torch.ones(1, WIDTH)).sum().backward()
    assert not torch.equal(net[0].weight.detach(), before)
    opt.step()


def test_a_copy_has_the_buckets_of_the_original() -> None:
    import copy

    net = model()
    opt = optfuse.fuse(torch.optim.SGD(net.parameters(), 0.1), "backward", bucket_bytes=1 << 30)
    net, opt = copy.deepcopy((net, opt))
    train(net, opt, 1)
    assert optfuse.summary(opt).at_close == 2 * LAYERS
