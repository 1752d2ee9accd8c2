# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels, on a GPU that the CPU plays: their own step() on one
parameter, on the stream to which the update belongs."""

import fakecuda
import pytest
import torch
from common import adamw, assert_same, everything, refused
from fakecuda import NAME
from legal import legal, net, train
from own_classes import REAL, Numbers, Reaching, Tensors

import optfuse

MODES = ("forward", "backward")
optfuse.register(Tensors)


def training(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.RMSprop, Tensors])
def test_bits_and_order_are_those_of_the_class(make, mode):
    legal(training(make), mode)


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


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Tensors])
def test_backward_makes_state_on_the_default_device(make):
    """Autograd's thread for a GPU has no default device of its own."""
    assert_same_state(make, lambda o: optfuse.fuse(o, "backward"), NAME, NAME)


@pytest.mark.parametrize("later", ["cpu", NAME])
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.NAdam, Tensors])
def test_step_makes_state_on_the_default_device_that_is_set_then(make, later):
    assert_same_state(make, optfuse.fuse, NAME, later)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop])
def test_a_trial_is_for_one_default_device(make, mode):
    """Kernels pass with counters on the CPU, and look for them there."""
    for device in ("cpu", NAME, "cpu"):
        assert_same_state(make, lambda o: optfuse.fuse(o, mode), device, device)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Tensors])
def test_another_stream_that_waited_for_step_sees_the_update(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        a, b = fakecuda.stream(), fakecuda.stream()
        a.wait_stream(fakecuda.current())
        with a:
            train(model, optimizer, 3)
            optimizer.zero_grad()
            event = a.record_event()
        wrap.pending() if wrap.fused else None
        b.wait_event(event)
        with b:
            for p in model.parameters():
                yield "weight", p
        fakecuda.synchronize()

    legal(script)


# One parameter makes PyTorch take its for-loop for all of a group


class Subclass(torch.nn.Parameter):
    pass


class Other(torch.optim.NAdam):
    """With a step() that nobody knows."""


optfuse.register(Other, subclasses=True)


def plain(device=NAME):
    torch.manual_seed(1)
    return torch.randn(300).to(device).requires_grad_()


STOPPERS = {"on the CPU": lambda: plain("cpu"), "a subclass": lambda: Subclass(plain().detach())}
CHOOSERS = (torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, Other)


def with_it(cls, stopper, mode="forward", idle=False):
    def script(wrap):
        params = [plain(), STOPPERS[stopper]()]
        optimizer = wrap(cls(params, lr=1e-2), mode=mode)
        for i in range(8):
            torch.manual_seed(i)
            factors = [torch.randn(300).to(p.device) for p in params]
            optimizer.zero_grad()
            used = list(zip(params, factors, strict=True))[: 1 if idle else 2]
            sum((p * factor).sum().cpu() for p, factor in used).backward()
            optimizer.step()
        if wrap.fused:
            assert set(optfuse.summary(optimizer).isa.values()) == {"own step()"}
        yield "parameters", [p.detach() for p in params]

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stopper", STOPPERS)
@pytest.mark.parametrize("cls", CHOOSERS, ids=lambda cls: cls.__name__)
def test_the_way_is_that_of_the_whole_group(cls, stopper, mode):
    legal(with_it(cls, stopper, mode), prove=False)


@pytest.mark.parametrize("stopper", STOPPERS)
def test_what_has_no_gradient_is_not_asked(stopper):
    legal(with_it(torch.optim.NAdam, stopper, idle=True), prove=False)


class Reading(Numbers):
    """Reads other weights when it is told to, on a stream of its own."""

    read = None

    def update(self, group, p, state):
        super().update(group, p, state)
        if Reading.read is not None:
            Reading.read()


optfuse.register(Reading)


def reads_in_step(wrap):
    model, own, stream, seen = net(), plain(), fakecuda.stream(), []
    optimizer, reader = wrap(adamw(model.parameters())), wrap(Reading([own]))

    def read():
        with stream:
            if wrap.fused:
                optfuse.flush(optimizer)
            seen.append(model[0].weight.detach() + 1)

    for i in range(3):
        train(model, optimizer, i)
        stream.wait_stream(fakecuda.current())
        own.grad = torch.ones_like(own)
        wrap.pending(optimizer) if wrap.fused else None
        Reading.read = read
        reader.step()
        Reading.read = None
        fakecuda.current().wait_stream(stream)
    with stream:
        yield "seen", seen
    fakecuda.synchronize()


def test_an_own_step_that_reads_weights_on_another_stream():
    """Inside step() streams are taken as steady, but not while the class runs."""
    legal(reads_in_step)


def test_a_trial_reaches_nothing_on_the_gpu():
    optfuse.register(Reaching)
    params = [plain(), plain()]
    before = params[0].detach().cpu()
    optimizer = Reaching(params, lambda real: real.data.add_(1))
    REAL[:] = params[:1]
    try:
        refused(lambda: optfuse.fuse(optimizer), "data pointer", way_out="as it is")
    finally:
        REAL.clear()
    assert_same("the parameter", params[0].detach().cpu(), before)
