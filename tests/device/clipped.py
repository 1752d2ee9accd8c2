# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of clipping on the fake GPU."""

import torch
from common import adamw
from fakecuda import NAME
from legal import net

import optfuse

LIMIT = 0.05  # far below the norms: every step is clipped
STEPS = 4


def clip(optimizer, limit=LIMIT, **options):
    """torch's own function, where the optimizer is stock's."""
    return optfuse.clip_grad_norm_(optimizer, limit, **options)


def clipped_steps(make=adamw, dtype=torch.float32, limit=LIMIT, **options):
    def script(wrap):
        model = net().to(dtype)
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            x = torch.full((5, 6), 0.1 * (i + 1), dtype=dtype, device=NAME)
            model(x).square().sum().backward()
            yield "norm", clip(optimizer, limit, **options)
            optimizer.step()
            if i == 1:  # otherwise nobody looks, and zero_grad() drops them
                yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())
        yield "state", optimizer.state_dict()["state"]

    return script
