# SPDX-License-Identifier: BSD-3-Clause
"""Trains under DistributedDataParallel: parallel.py ORDER [OPTION], the optimizer before the model
or after it. Its batches are those of its rank."""

import sys

import torch
import torch.distributed as dist
from common_net import Net, batch, show
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def train(order, options):
    net = Net()
    if order == "before":
        optimizer = adamw(net.parameters())
    model = DistributedDataParallel(net, **dict.fromkeys(options, True))
    if order == "after":
        optimizer = adamw(model.parameters())
    for step in range(5):
        x, y = batch(step * dist.get_world_size() + dist.get_rank())
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        show(net, optimizer)


dist.init_process_group("gloo")
train(sys.argv[1], sys.argv[2:])
# A process that leaves while the other still talks to it, or a model that outlives its group, now
# and then ends stock's run, too, by std::terminate.
dist.barrier()
dist.destroy_process_group()
