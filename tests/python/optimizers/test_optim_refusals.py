# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and options that classes refuse. Those that they take are deeds:
programs/deeds/classes.py, layouts.py."""

import numpy as np
import pytest
import torch
from common import assert_same, net, snapshot, train
from optim_classes import CLASSES, accepts, build
from torch import nn

import optfuse
from optfuse._rules import RULES

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
with_kernels = pytest.mark.parametrize(
    "cls", [c for c in CLASSES if c in RULES], ids=lambda c: c.__name__
)


@with_kernels
@both_modes
def test_complex_parameters_are_refused(cls, mode):
    params = [nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))]
    optimizer = build(cls, params, **({"fused": False} if accepts(cls, "fused") else {}))
    with pytest.raises(optfuse.Error, match="parameter 0 of group 0 .* it is complex"):
        optfuse.fuse(optimizer, mode=mode)
    assert type(optimizer) is cls


@with_kernels
@both_modes
def test_sparse_gradients_are_refused_with_the_parameter_named(cls, mode):
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optfuse.fuse(build(cls, table.parameters()), mode=mode)
    before = snapshot(table.weight.detach())
    with pytest.raises(optfuse.Error, match=r"parameter 0 of group 0 .*sparse"):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert_same("the weight", table.weight.detach(), before)


@pytest.mark.parametrize("what", ["complex parameters", "sparse gradients"])
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_a_step_that_is_recorded_refuses_what_it_refuses_in_stock(cls, what):
    dtype = torch.complex64 if what == "complex parameters" else torch.float32
    weight = nn.Parameter(torch.randn(5, 3, dtype=dtype))
    optimizer = optfuse.fuse(build(cls, [weight]))
    before = snapshot(weight.detach())
    gradient = torch.ones_like(weight)
    weight.grad = gradient.to_sparse() if what == "sparse gradients" else gradient
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support {what}"):
        optimizer.step()
    assert_same("the weight", weight.detach(), before)


LOOPS = ("RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD")


@both_modes
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("to", (np.float32, np.float16, torch.tensor))
def test_numbers_of_other_precisions_are_refused(to, name, mode):
    """PyTorch's for-loop computes with them in Python."""
    model = net()
    optimizer = build(getattr(torch.optim, name), model.parameters())
    (group,) = optimizer.param_groups
    group.update(
        (key, to(value)) for key, value in group.items() if type(value) is float and value < 1e4
    )
    with pytest.raises(optfuse.Error, match=r"option '.*make it a float, as by float\("):
        optfuse.fuse(optimizer, mode)
    train(model, optimizer, 0)  # stock's
    assert type(optimizer).__name__ == name
