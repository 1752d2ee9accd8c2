# SPDX-License-Identifier: BSD-3-Clause
"""Traced optimizers whose parameters or state become others in the middle of training. Forward
mode leaves such a step to the class; backward mode refuses it."""

import pytest
import torch
import traced_classes
from common import assert_same, same
from torch import nn

import optfuse


def convolution():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))


def train(model, optimizer, i):
    torch.manual_seed(i)
    optimizer.zero_grad()
    model(torch.randn(3, 3, 3, 3)).square().sum().backward()
    optimizer.step()


def everything(model, optimizer):
    """With strides of the same order: what they are is no promise."""
    yield "weights", [p.detach().contiguous() for p in model.parameters()]
    entries = [optimizer.state[p] for p in model.parameters()]
    for entry in entries:
        yield "state", {k: v + 0 if torch.is_tensor(v) else v for k, v in entry.items()}


def each_state_tensor(optimizer, change):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if torch.is_tensor(value) and value.is_floating_point() and value.dim():
                entry[key] = change(value)


def in_channels_last(tensor):
    is_image = tensor.dim() == 4
    return tensor.to(memory_format=torch.channels_last) if is_image else tensor


CHANGES = {
    "another memory format": lambda model, _: model.to(memory_format=torch.channels_last),
    "state of another memory format": lambda _, o: each_state_tensor(o, in_channels_last),
    "state of more precision": lambda _, o: each_state_tensor(o, torch.Tensor.double),
    "state of less precision": lambda _, o: each_state_tensor(o, torch.Tensor.bfloat16),
}
STRIDES = [traced_classes.TrustRatio, traced_classes.Centered, traced_classes.OtherDtypes]
DTYPES = [traced_classes.Replaces]
CASES = [(cls, name) for cls in STRIDES for name in CHANGES if "format" in name]
CASES += [(cls, name) for cls in DTYPES for name in CHANGES if "precision" in name]


def changed(cls, change):
    def script(wrap):
        model = convolution()
        optimizer = wrap(cls(model.parameters()))
        for i in range(6):
            train(model, optimizer, i)
            if i == 1:
                change(model, optimizer)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("cls, name", CASES)
def test_forward_mode_goes_on(cls, name):
    same(changed(cls, CHANGES[name]))


@pytest.mark.parametrize("cls, name", CASES)
def test_backward_mode_refuses_what_it_can_not_follow(cls, name):
    model = convolution()
    optimizer = optfuse.fuse(cls(model.parameters()), mode="backward")
    for i in range(2):
        train(model, optimizer, i)
    CHANGES[name](model, optimizer)
    before = [p.detach().clone() for p in model[0].parameters()]
    with pytest.raises(optfuse.Error, match='nothing was updated|Nothing was updated.*"forward"'):
        for i in range(2):
            train(model, optimizer, 2 + i)
    assert_same("weights", [p.detach() for p in model[0].parameters()], before)


@pytest.mark.parametrize("cls", [traced_classes.AdaBelief, traced_classes.FactoredState])
def test_a_lazy_parameter_is_refused_as_for_classes_with_kernels(cls):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    for make in (cls, torch.optim.AdamW):
        with pytest.raises(optfuse.Error, match="it is not initialized yet; run one forward pass"):
            optfuse.fuse(make(model.parameters()))


@pytest.mark.parametrize("cls", [traced_classes.FactoredState, traced_classes.PointState])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_state_with_shapes_of_its_own_from_before(mode, cls):
    """In fuse(), and in a group that is added."""

    def script(wrap):
        model = convolution()
        first = cls(model.parameters())
        for i in range(2):
            train(model, first, i)
        optimizer = cls(model[0].parameters())
        for p in model[0].parameters():
            optimizer.state[p] = first.state[p]
        optimizer = wrap(optimizer)
        for i in range(2):
            train(model, optimizer, 2 + i)
        optimizer.zero_grad()
        model.zero_grad()
        for p in model[2].parameters():
            optimizer.state[p] = first.state[p]
        optimizer.add_param_group({"params": list(model[2].parameters())})
        for i in range(3):
            train(model, optimizer, 4 + i)
        yield from everything(model, optimizer)

    same(script, mode)
