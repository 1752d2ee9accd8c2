# SPDX-License-Identifier: BSD-3-Clause
"""Prints how many gradients of a wide layer may be promises."""

import sys

import torch
from torch import nn

model = nn.Linear(600, 600)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.randn(3, 600)).square().mean().backward()
optimizer.step()
if "optfuse" in sys.modules:
    print(len(sys.modules["optfuse"].summary(optimizer).promised))
