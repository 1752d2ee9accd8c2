# SPDX-License-Identifier: BSD-3-Clause
"""Options that are no floats. PyTorch's for-loop computes with them in Python: NumPy's float32
stays float32 there, and a tensor a tensor."""

import copy

import numpy as np
import pytest
import torch
from common import adamw, batch, loss_of, net, same, sgd
from torch import optim

import optfuse

LOOPS = {
    optim.RMSprop: {"lr": 1e-3, "momentum": 0.5, "centered": True},
    optim.Adadelta: {"lr": 0.3},
    optim.NAdam: {"lr": 1e-2, "weight_decay": 0.01, "decoupled_weight_decay": True},
    optim.RAdam: {"lr": 1e-2, "weight_decay": 0.01, "decoupled_weight_decay": True},
    optim.Adamax: {"lr": 1e-2},
    optim.ASGD: {"lr": 1e-2, "t0": 2.0},
}
#: Those that do more with a rate than to negate it.
COMPUTE_WITH_THE_RATE = (optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD)
CONVERSIONS = {
    "float32": np.float32,
    "float16": np.float16,
    "tensor": torch.tensor,
    "float64": np.float64,
}


def converted(value, convert):
    if type(value) is float:
        return convert(value)
    if type(value) is tuple and all(type(v) is float for v in value):
        return tuple(map(convert, value))
    return value


def with_options(make, convert, only=None):
    """The optimizer, whose numbers are converted."""

    def made(parameters):
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            for key in [key for key in group if key != "params" and only in (None, key)]:
                group[key] = converted(group[key], convert)
        return optimizer

    return made


def script_of(make, dtype=torch.float32, steps=5):
    def script(wrap):
        model = net().to(dtype)
        optimizer = wrap(make(model.parameters()))
        for i in range(steps):
            optimizer.zero_grad()
            model(batch(i)[0].to(dtype)).square().mean().backward()
            optimizer.step()
        yield "parameters", list(model.parameters())

    return script


def looping(cls):
    return lambda parameters: cls(parameters, foreach=False, **LOOPS[cls])


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("cls", LOOPS)
@pytest.mark.parametrize("kind", ("float32", "float16", "tensor"))
def test_other_precisions_are_refused(cls, kind, mode):
    model = net()
    optimizer = with_options(looping(cls), CONVERSIONS[kind])(model.parameters())
    with pytest.raises(optfuse.Error, match=r"make it a float, as by float\(") as raised:
        optfuse.fuse(optimizer, mode)
    assert "option '" in str(raised.value)
    assert type(optimizer) is cls
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("cls", LOOPS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_numpys_float64_is_a_float(cls, dtype):
    same(script_of(with_options(looping(cls), np.float64), dtype))


@pytest.mark.parametrize("cls", [cls for cls in LOOPS if cls not in COMPUTE_WITH_THE_RATE])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_a_rate_that_is_only_negated_may_be_of_any_precision(cls, dtype):
    same(script_of(with_options(looping(cls), np.float32, "lr"), dtype))


@pytest.mark.parametrize("cls", COMPUTE_WITH_THE_RATE)
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_a_scheduler_that_makes_a_float32_of_the_rate_is_refused_at_the_next_step(cls, mode):
    model = net()
    optimizer = optfuse.fuse(looping(cls)(model.parameters()), mode)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = np.float32(0.9) * np.float32(1e-2)
    before = copy.deepcopy(model.state_dict())

    def iterate():
        loss_of(model, 1).backward()
        optimizer.step()

    with pytest.raises(optfuse.Error, match="option 'lr'"):
        iterate()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


FUSED = {
    "adamw": adamw,
    "sgd": sgd,
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1, fused=True),
    "lion": lambda p: optfuse.optim.Lion(p, lr=1e-3, weight_decay=0.1),
    "adan": lambda p: optfuse.optim.Adan(p, lr=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", ("float32", "float64"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_classes_that_compute_in_double_take_all(name, dtype, kind):
    same(script_of(with_options(FUSED[name], CONVERSIONS[kind]), dtype))
