# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that come to a GPU, or there to another dtype or device, after fuse(). A
trial was passed for one dtype on one device; what has not been tried must not run."""


import pytest
import torch
from fakecuda import NAME
from torch import nn
from torch.optim import (
    ASGD,
    Adadelta,
    Adagrad,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

import optfuse
from optfuse import _gpu_trial
from optfuse.optim import Lion

TRIED = (ASGD, Adadelta, Adagrad, Adamax, Lion, NAdam, RAdam, RMSprop, Rprop)


@pytest.fixture(autouse=True)
def small_trials(monkeypatch):
    """Of their own, and quick."""
    monkeypatch.setattr(_gpu_trial, "known", {})
    monkeypatch.setattr(_gpu_trial, "SIZES", (1, 7, 64))
    monkeypatch.setattr(_gpu_trial, "STEPS", 3)


def model_on(device, dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Linear(5, 4, bias=False, device="cpu").to(device, dtype)


def train(model, optimizer, n=1):
    for i in range(n):
        optimizer.zero_grad()
        torch.manual_seed(i)
        like = next(model.parameters())
        model(torch.randn(3, 5).to(like.device, like.dtype)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("cls", TRIED, ids=lambda cls: cls.__name__)
def test_a_group_on_a_gpu_is_not_added_to_groups_on_the_cpu(cls):
    cpu, gpu = model_on("cpu"), model_on(NAME)
    optimizer = optfuse.fuse(cls(cpu.parameters()))
    with pytest.raises(optfuse.Error, match="to be tried on a GPU; .* fuse it again with all gr"):
        optimizer.add_param_group({"params": list(gpu.parameters())})
    assert len(optimizer.param_groups) == 1
    train(cpu, optimizer, 2)
