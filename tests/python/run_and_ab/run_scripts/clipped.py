# SPDX-License-Identifier: BSD-3-Clause
"""plain.py with clipping."""

import torch

step = torch.optim.AdamW.step


def clip_and_step(self, *args):
    torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.01)
    return step(self, *args)


torch.optim.AdamW.step = clip_and_step

import plain  # noqa: E402, F401
