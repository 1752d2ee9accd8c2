# SPDX-License-Identifier: BSD-3-Clause
"""A loop as many are."""

import argparse

import torch
from common_net import Net, batch, show
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--mode", default="none")  # its own, which is not that of the command
options = parser.parse_args()

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(options.steps):
    x, y = batch(step)
    optimizer.zero_grad()
    cross_entropy(net(x), y).backward()
    optimizer.step()
    scheduler.step()
show(net, optimizer)
