# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and Muon in backward mode, without Python: torch's operators in the order of the
class's step(); the bits are deeds (programs/deeds/classes.py). The class makes the state, and
updates where something is not as usual: which of the two has made an update is seen here."""

import copy
import pickle

import pytest
import torch
from common import assert_same, refused, snapshot
from torch.optim import Adafactor, Muon

import optfuse


def one(cls, shape=(4, 6), **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    return p, cls([p], **options)


def step(p, optimizer, i=0):
    (p * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def backward(optimizer):
    return optfuse.fuse(optimizer, "backward")


ALL = (0, 0, 0)
WHO = {
    "as usual": (Adafactor, {}, (0,)),
    "as usual, Muon": (Muon, {"adjust_lr_fn": "original"}, (0,)),
    "foreach": (Adafactor, {"foreach": True}, ALL),
    "a tensor as lr": (Adafactor, {"lr": torch.tensor(0.1)}, ALL),
    "a tensor as Muon's lr": (Muon, {"lr": torch.tensor(0.1, dtype=torch.float64)}, ALL),
}


@pytest.mark.parametrize("name", WHO)
def test_the_class_updates_first_and_where_something_is_unusual(name, python_updates):
    cls, options, updates = WHO[name]
    p, optimizer = one(cls, **options)
    backward(optimizer)
    for i in range(3):
        step(p, optimizer, i)
    assert tuple(python_updates) == updates


ERRORS = {
    "ns_steps": (Muon, "ns_steps", 100, "ValueError: Number of steps"),
    "half a step": (Muon, "ns_steps", 2.5, "TypeError"),
    "coefficients": (Muon, "ns_coefficients", (1.0, 2.0), "ValueError: Coefficients"),
    "no lr": (Adafactor, "lr", None, "TypeError"),
    "three epsilons": (Adafactor, "eps", (None, 1e-3, 1e-3), "ValueError: too many values"),
    "no clipping": (Adafactor, "d", 0.0, "ZeroDivisionError"),
    "overflow": (Adafactor, "beta2_decay", 5e3, "OverflowError"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_class(name):
    cls, key, value, words = ERRORS[name]
    p, optimizer = one(cls)
    optimizer = backward(optimizer)
    for i in range(3):
        step(p, optimizer, i)
    optimizer.param_groups[0][key] = value
    with pytest.raises(Exception, match=words.partition(": ")[2]) as raised:
        step(p, optimizer, 3)
    assert type(raised.value).__name__ == words.partition(":")[0]
    refused(optimizer.step, "step() on parameter 0", words, way_out="checkpoint")


def test_an_empty_parameter_is_an_error_of_the_class():
    p, optimizer = one(Adafactor, (0, 3))
    optimizer = backward(optimizer)
    with pytest.raises(ZeroDivisionError):
        step(p, optimizer)


@pytest.mark.parametrize("cls", (Adafactor, Muon))
def test_state_that_was_loaded_needs_no_python(cls, python_updates):
    p, stock = one(cls)
    for i in range(3):
        step(p, stock, i)
    again = torch.nn.Parameter(p.detach().clone())
    optimizer = backward(cls([again]))
    optimizer.load_state_dict(pickle.loads(pickle.dumps(stock.state_dict())))
    twin, copied = copy.deepcopy((again, optimizer))
    for i in range(3, 6):
        for pair in ((p, stock), (again, optimizer), (twin, copied)):
            step(*pair, i)
    assert not python_updates
    for param, other in ((again, optimizer), (twin, copied)):
        assert_same("parameter", snapshot(param.detach()), p.detach())
        assert_same("state", snapshot(other.state_dict()), stock.state_dict())


def test_summary_says_what_updates():
    _, optimizer = one(Adafactor)
    fused = backward(optimizer)
    assert optfuse.summary(fused).isa == {"float32": "torch's operators"}
    assert "float32 torch's operators; bits of torch's own step()" in str(optfuse.summary(fused))
