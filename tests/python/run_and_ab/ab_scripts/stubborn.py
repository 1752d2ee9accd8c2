# SPDX-License-Identifier: BSD-3-Clause
"""Catches whatever ends it, for as long as it can."""

import contextlib

import torch

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
while True:
    with contextlib.suppress(BaseException):
        weight.grad = torch.rand(4)
        optimizer.step()
