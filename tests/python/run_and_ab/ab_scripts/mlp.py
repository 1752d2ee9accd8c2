# SPDX-License-Identifier: BSD-3-Clause
"""A loop on random data: mlp.py [HABIT], with something that a comparison has to notice."""

import os
import sys
import time

import torch
from torch import nn

STEPS = 12
habit = sys.argv[1] if len(sys.argv) > 1 else ""
fused = '"mode": "forward"' in os.environ.get("OPTFUSE_RUN", "")

torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
for step in range(1, STEPS + 1):
    x = torch.randn(16, 20)
    if habit == "noise" and step == 4:
        x += time.time_ns() % 1_000_003 / 1e6
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), x[:, :5].argmax(1)).backward()
    if habit == "clips":
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    if habit == "other weights" and step == 5 and fused:
        net[0].weight.data[3, 4] *= 1.0000002
    if habit in ("wrong weights", "nan") and step == 5 and fused:
        net[2].weight.data[1, 2] += 0.5 if habit == "wrong weights" else float("nan")
    if habit == "other end" and step == 9 and fused:
        break
    if habit == "fails" and step == 7:
        raise ValueError("of the script")
    if habit == "fails if fused" and step == 7 and fused:
        raise ValueError("of the script")
    if habit == "few" and step == 5:
        break
if habit == "leaves":
    os._exit(0)
