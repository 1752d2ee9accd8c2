# SPDX-License-Identifier: BSD-3-Clause
"""A whole group, or the default device, decides of updates on a GPU that the CPU plays."""

import pytest
import torch
from common import assert_same
from gpu import NAME
from legal import legal, net, train
from tried import MODES, Subclass

import optfuse


def assert_same_state(make, fuse, at_first, later):
    """With these default devices, which are set before fuse() and before the first step()."""

    def state(wrap):
        torch.manual_seed(0)
        torch.set_default_device(at_first)
        model = net()
        optimizer = wrap(make(model.parameters()))
        torch.set_default_device(later)
        for i in range(2):
            train(model, optimizer, i)
        return [entry for p in model.parameters() for entry in optimizer.state[p].items()]

    try:
        stock, ours = state(lambda o: o), state(fuse)
    finally:
        torch.set_default_device(None)
    assert len(stock) == len(ours)
    for (name, a), (_, b) in zip(stock, ours, strict=True):
        assert not isinstance(a, torch.Tensor) or a.device == b.device, name
        assert_same(name, a, b)


@pytest.mark.parametrize("later", ["cpu", NAME])
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.NAdam])
def test_step_makes_state_on_the_default_device_that_is_set_then(make, later):
    assert_same_state(make, optfuse.fuse, NAME, later)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop])
def test_a_trial_is_for_one_default_device(make, mode):
    """Kernels pass with counters on the CPU, and look for them there."""
    for device in ("cpu", NAME, "cpu"):
        assert_same_state(make, lambda o: optfuse.fuse(o, mode), device, device)


# One parameter makes PyTorch take its for-loop for all of a group


def plain(device=NAME):
    torch.manual_seed(1)
    return torch.randn(300).to(device).requires_grad_()


STOPPERS = {"on the CPU": lambda: plain("cpu"), "a subclass": lambda: Subclass(plain().detach())}
CHOOSERS = (torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad)


def with_it(cls, stopper, idle=False):
    def script(wrap):
        params = [plain(), STOPPERS[stopper]()]
        optimizer = wrap(cls(params, lr=1e-2))
        for i in range(8):
            torch.manual_seed(i)
            factors = [torch.randn(300).to(p.device) for p in params]
            optimizer.zero_grad()
            used = list(zip(params, factors, strict=True))[: 1 if idle else 2]
            sum((p * factor).sum().cpu() for p, factor in used).backward()
            optimizer.step()
        yield "parameters", [p.detach() for p in params]

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stopper", STOPPERS)
@pytest.mark.parametrize("cls", CHOOSERS, ids=lambda cls: cls.__name__)
def test_the_way_is_that_of_the_whole_group(cls, stopper, mode):
    legal(with_it(cls, stopper), mode, prove=False)


@pytest.mark.parametrize("stopper", STOPPERS)
def test_what_has_no_gradient_is_not_asked(stopper):
    legal(with_it(torch.optim.NAdam, stopper, idle=True), prove=False)
