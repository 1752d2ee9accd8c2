# SPDX-License-Identifier: BSD-3-Clause
"""Backward(final=True) on a GPU, equal to the hooks that trainers write."""

import functools
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from common import assert_same
from gpu import NAME
from legal import to_host
from torch import nn
from trainers import ByScale, Eager

import optfuse
from optfuse import optim

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "adafactor": torch.optim.Adafactor,
    "by scale": ByScale,
    "our Adafactor": optim.Adafactor,
    "our CAME": functools.partial(optim.CAME, lr=1e-2),
}


def model_of(dtype, devices):
    """Its layers lie on these, one after the other."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24), nn.Linear(24, 70), nn.Linear(70, 24)]
    return [layer.to(devices[i % len(devices)], dtype) for i, layer in enumerate(layers)]


def trained(make, dtype, devices, fused):
    model, seen = model_of(dtype, devices), []
    params = [p for layer in model for p in layer.parameters()]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}]
    if fused:
        optimizer = optfuse.fuse(make(groups), optfuse.Backward(final=True))
    else:
        optimizer = Eager(make, groups).whole
    for i in range(5):
        torch.manual_seed(i)
        x = torch.randn(5, 24).to(dtype)
        for layer in model:
            x = torch.tanh(layer(x.to(layer.weight.device)))
        x.float().square().mean().backward()
        seen.append([p.grad is None for p in params])
    state = [dict(optimizer.state[p]) for p in params]
    return to_host([seen, [p.detach() for p in params], state])


@pytest.mark.parametrize("devices", ((NAME,), ("cpu", NAME)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_final_updates_are_those_of_hooks(kind, dtype, devices):
    make = OPTIMIZERS[kind]
    assert_same("all", *(trained(make, dtype, devices, fused) for fused in (True, False)))


class Slow(torch.optim.SGD):
    gradients: ClassVar[list[int]] = []  # that each step() has found

    def step(self, closure=None):
        time.sleep(5e-3)
        self.gradients.append(sum(p.grad is not None for p in self.param_groups[0]["params"]))
        super().step()


def test_updates_of_two_devices_take_turns():
    """Their gradients are complete on two threads."""
    Slow.gradients.clear()
    params = [nn.Parameter(torch.ones(3).to(at)) for at in 2 * ("cpu", NAME)]
    optfuse.fuse(Slow(params, lr=0.1), optfuse.Backward(final=True))
    for _ in range(3):
        sum((p * p).sum().cpu() for p in params).backward()
    assert Slow.gradients == 12 * [1]


def test_the_part_of_the_run_on_a_gpu_starts():
    """tests/gpu/fused_pass.py, of a small model."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "gpu"))
    import fused_pass

    found = list(fused_pass.rows(torch.device(NAME), 32))
    assert len(found) == 2 + len(fused_pass.CLASSES) + len(fused_pass.ROUNDED) + 1
