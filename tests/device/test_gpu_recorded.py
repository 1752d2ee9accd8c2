# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels on a GPU whose step() is recorded: its operators run on the streams on
which they were called, and have the bits of the class. (test_stream_programs.py has random
programs, test_gpu_programs.py what becomes of elementwise operators.)"""

import gpu
import pytest
import torch
from common import Fused, adamw
from gpu import NAME, captured
from gpu_classes import CASES, CLASSES, GPUS, WAYS, Replaces, World, script_of
from legal import in_order, legal, net, play, races_without, settle, train, training
from recorded_classes import Base
from style_classes import ON_ANY_DEVICE
from test_gpu_programs import fused
from torch import nn

import optfuse
from optfuse._fused.recorded import last_counts


@pytest.mark.parametrize(("way", "name", "work"), CASES)
def test_order_and_bits_are_those_of_the_class(way, name, work):
    legal(script_of(CLASSES[name], work, way != "forward"), WAYS[way], prove=False)


MODES = ("forward", "backward")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [*ON_ANY_DEVICE, torch.optim.Adafactor], ids=lambda c: c.__name__)
def test_classes_in_other_styles(make, mode):
    def iteration(model, optimizer, i):
        getattr(optimizer, "train", bool)()
        train(model, optimizer, i)

    legal(training(make, iteration=iteration, steps=8), mode, prove=False)


@in_order("forward", prove=False)
def test_clipping_before_step(wrap):
    world = World(CLASSES["Elementwise"], wrap)
    clip = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
    for i in range(4):
        world.gradients(i)
        world.noted.append(clip(world.params, 0.5))
        world.optimizer.step()
    yield "norms", world.noted
    yield from world.end()


class ReadsOthers(Base):
    """Reads the weights of another optimizer, on a stream of its own."""

    read = staticmethod(lambda: None)

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        self.read()


def reads_in_step(wrap):
    model, own, stream, seen = net(), nn.Parameter(torch.ones(300).to(NAME)), gpu.stream(), []
    optimizer, reader = wrap(adamw(model.parameters())), wrap(ReadsOthers([own]))

    def read():
        with stream:
            seen.append(model[0].weight.detach() + 1)

    for i in range(3):
        train(model, optimizer, i)
        stream.wait_stream(gpu.current())
        own.grad = torch.ones_like(own)
        wrap.pending(optimizer) if wrap.fused else None
        reader.read = read
        reader.step()
        del reader.read
        gpu.current().wait_stream(stream)
    with stream:
        yield "seen", seen
    gpu.synchronize()


def test_a_step_that_reads_pending_weights_on_another_stream():
    legal(reads_in_step)


# Backward mode


def test_a_captured_pass_is_left_to_step(monkeypatch):
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "ahead_capture")
    script = script_of(CLASSES["Elementwise"], "a_captured_iteration", backward=True)
    with pytest.raises(optfuse.Error, match="which the steps before did not"):
        play(script, Fused("backward"))
    gpu.clear()


class OfTensorRate(Base):
    def one(self, p, group, state):
        p.sub_(p.grad * group["lr"])


@in_order("backward", prove=False)
def test_a_rate_on_the_gpu_is_read_by_the_update(wrap):
    rate = torch.tensor(0.1, device=NAME)
    world = World(lambda groups: OfTensorRate(groups, lr=rate), wrap, backward=True)
    for i in range(6):
        world.steps(1, i)
        rate.mul_(0.5)
    assert not wrap.fused or world.passes_ahead() == 4
    yield from world.end()


class MakesNumbers(Base):
    def one(self, p, group, state):
        state["made"] = torch.ones(()) * 2
        p.sub_(p.grad * state["made"], alpha=group["lr"])


@in_order("backward", prove=False)
def test_new_tensors_are_on_the_default_device_of_step(wrap):
    """Autograd's thread for a GPU has none of its own."""
    torch.set_default_device(GPUS[0])
    try:
        world = World(MakesNumbers, wrap, backward=True)
        world.steps(5)
    finally:
        torch.set_default_device(None)
    yield "devices", [str(world.optimizer.state[p]["made"].device) for p in world.params]
    assert not wrap.fused or world.passes_ahead() > 0
    yield from world.end()


def test_loss_scaling_is_refused_in_backward():
    world = World(CLASSES["Elementwise"], Fused("backward"), backward=True)
    scaler = torch.amp.GradScaler(NAME)
    with pytest.raises(optfuse.Error, match="GradScaler"):
        for _ in range(4):
            scaler.scale(sum((p * p).sum() for p in world.params)).backward()
            scaler.step(world.optimizer)
            scaler.update()


# The guards' controls


def passes_on_other_streams_than_steps(wrap):
    """Three by turns. What updates make is theirs, and dies beside another one."""
    params = [nn.Parameter(torch.randn(20 + i).to(NAME)) for i in range(3)]
    optimizer = wrap(Replaces(params))
    streams, main = [gpu.stream() for _ in range(3)], gpu.current()
    for i in range(9):
        stream = streams[i % 3]
        stream.wait_stream(main)
        with stream:
            sum((p * p).sum() for p in params).backward()
        main.wait_stream(stream)
        optimizer.step()
        stream.wait_stream(main)
        optimizer.zero_grad()
    yield "parameters", params
    gpu.synchronize()


class Counts(Base):
    """With numbers that an operator makes on the GPU at once."""

    def one(self, p, group, state):
        numbers = torch.arange(p.numel(), dtype=p.dtype, device=p.device).view_as(p)
        p.sub_(p.grad * numbers, alpha=group["lr"] * 1e-3)


class Elsewhere(Base):
    """All on a stream of its own; who calls step() waits for it, and it for who calls."""

    scale, stream = None, None

    def one(self, p, group, state):
        with self.stream:
            p.sub_(p.grad * self.scale, alpha=group["lr"])


def who_writes_on_its_stream(wrap):
    params = [nn.Parameter(torch.ones(40, device=NAME)) for _ in range(2)]
    optimizer, stream, main = wrap(Elsewhere(params)), gpu.stream(), gpu.current()
    optimizer.stream, optimizer.scale = stream, torch.ones((40,), device=NAME)
    stream.wait_stream(main)
    for _ in range(5):
        with stream:
            optimizer.scale.add_(1)
        sum((p * p).sum() for p in params).backward()
        stream.wait_stream(main)
        optimizer.step()
        main.wait_stream(stream)
        stream.wait_stream(main)
        optimizer.zero_grad()
    yield "parameters", params
    gpu.synchronize()


class Apart(Base):
    """Has something of its own on a stream that nobody waits for."""

    stream, own = None, None

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        with self.stream:
            self.own.mul_(0.5).add_(1)


def who_looks_on_its_stream(wrap):
    optimizer = wrap(Apart([nn.Parameter(torch.ones(40, device=NAME))]))
    optimizer.stream = gpu.stream()
    with optimizer.stream:
        optimizer.own = torch.ones(40, device=NAME)
    for _ in range(3):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        with optimizer.stream:
            yield "its own", optimizer.own
    gpu.synchronize()


class Tells(Base):
    """An event says that a parameter is new."""

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        group["told"] = torch.accelerator.current_stream(p.device).record_event()


def who_waits_for_an_event_of_step(wrap):
    p, reader = nn.Parameter(torch.ones(40, device=NAME)), gpu.stream()
    optimizer = wrap(Tells([p]))
    reader.wait_stream(gpu.current())
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        reader.wait_event(optimizer.param_groups[0]["told"])
        with reader:
            yield "parameter", p
        gpu.current().wait_stream(reader)


#: By guard: a script that races without it, and the mode.
CONTROLS = {
    "ahead_memory": (passes_on_other_streams_than_steps, "backward"),
    "ahead_at_once": (script_of(Counts, "a_stream_for_each_parameter", True), "backward"),
    "ahead_streams": (who_writes_on_its_stream, "backward"),
    "recorded_stream": (who_looks_on_its_stream, "forward"),
    "recorded_order": (who_waits_for_an_event_of_step, "forward"),
}


@pytest.mark.parametrize("guard", CONTROLS)
def test_an_order_that_is_kept_and_not_without_the_guard(guard, monkeypatch):
    script, mode = CONTROLS[guard]
    legal(script, mode, prove=False)
    races_without(guard, script, monkeypatch, mode)


def lines_of_a_captured_step():
    step = fused(CLASSES["Elementwise"])
    settle()
    with captured(gpu.stream()):
        step()
    settle()
    return last_counts()["lines"]


def test_what_is_captured_runs_at_once(monkeypatch):
    assert lines_of_a_captured_step() == 0
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "recorded_capture")
    assert lines_of_a_captured_step() > 0  # check_guard("recorded_capture"
