# SPDX-License-Identifier: BSD-3-Clause
"""Clipping, in whatever order of streams the program keeps with stock: nothing
races, and the factor lives as long as it is needed."""

import gc

import fakecuda
import torch
from clipped import STEPS, clip
from common import adamw
from fakecuda import NAME
from legal import backward, legal, loss_of, net, races_without, train


def read_on_another_stream(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    train(model, optimizer, 0)
    a, b, c = (fakecuda.stream() for _ in range(3))
    a.wait_stream(fakecuda.current())
    with a:
        backward(model, optimizer, 1)
        clip(optimizer)
        optimizer.step()
    b.wait_stream(a)
    c.wait_stream(a)
    for stream in (b, c):
        with stream:
            yield "gradients", [p.grad for p in model.parameters()]
    with a:
        yield "weights", list(model.parameters())
    for stream in (a, b, c):
        fakecuda.current().wait_stream(stream)


def test_another_stream_that_waited_before_sees_clipped_gradients():
    legal(read_on_another_stream)


def test_without_our_wait_it_would_race(monkeypatch):
    races_without("streams", read_on_another_stream, monkeypatch)


def stepped_on_another_stream(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    for i in range(3):
        a, b = fakecuda.stream(), fakecuda.stream()
        a.wait_stream(fakecuda.current())
        with a:
            backward(model, optimizer, i)
            clip(optimizer)
        b.wait_stream(a)
        with b:
            optimizer.step()
            yield "weights", list(model.parameters())
        fakecuda.current().wait_stream(b)
        a.wait_stream(b)
        with a:
            optimizer.zero_grad()


def test_step_on_another_stream_than_clipping():
    legal(stepped_on_another_stream)


def test_the_factor_lives_as_long_as_an_update_needs_it():
    """Everything that the program has is gone when the update runs, and the memory
    is taken at once by others."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        a = fakecuda.stream()
        for i in range(STEPS):
            a.wait_stream(fakecuda.current())
            with a:
                backward(model, optimizer, i)
                clip(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                gc.collect()
                for n in (1, 4, 48, 3200):
                    yield "other", torch.full((n,), 7.0, device=NAME)
            fakecuda.current().wait_stream(a)
        yield "weights", list(model.parameters())

    legal(script)


def test_parameters_of_two_devices_and_of_the_host():
    def script(wrap):
        models = [net(f"{NAME}:0"), net(f"{NAME}:1"), net("cpu")]
        optimizer = wrap(adamw([p for model in models for p in model.parameters()]))
        for i in range(3):
            optimizer.zero_grad()
            sum(loss_of(model, i).to("cpu") for model in models).backward()
            yield "norm", clip(optimizer)
            optimizer.step()
        for index, model in enumerate(models[:2]):
            torch.accelerator.set_device_index(index)
            yield "weights", list(model.parameters())
        torch.accelerator.set_device_index(0)
        yield "of the host", list(models[2].parameters())

    legal(script)
