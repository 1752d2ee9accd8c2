# SPDX-License-Identifier: BSD-3-Clause
"""Every learning-rate scheduler of PyTorch, in both modes."""

import inspect
import warnings

import pytest
import torch
from common import adamw, everything, net, same, sgd, train
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR


def sequence(o):
    return lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)], [2])


SCHEDULERS = {
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.StepLR(o, 2), lrs.LinearLR(o)]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 3),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-3, 0.1, step_size_up=3),  # changes momentum, betas
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda i: 1 / (1 + i)),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=4),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4], 0.5),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda i: 0.9),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),  # changes momentum, betas
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 6),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": sequence,
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "SWALR": lambda o: SWALR(o, 0.05, 3),
}
BASES = {"LRScheduler", "_LRScheduler"}


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("which", SCHEDULERS)
def test_every_scheduler_of_torch(which, make, mode):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        scheduler = SCHEDULERS[which](optimizer)
        for i in range(8):
            train(model, optimizer, i)
            scheduler.step(*([1.0] if which == "ReduceLROnPlateau" else []))
            yield "options", [{**g, "params": 0} for g in optimizer.param_groups]
        yield from everything(model, optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that misses step() only warns
        warnings.filterwarnings("ignore", message="The epoch parameter in")
        same(script, mode)


def test_no_scheduler_is_left_out():
    known = {
        name
        for name, cls in inspect.getmembers(lrs, inspect.isclass)
        if issubclass(cls, torch.optim.lr_scheduler.LRScheduler) and name not in BASES
    }
    assert known <= set(SCHEDULERS), f"not tested: {known - set(SCHEDULERS)}"
