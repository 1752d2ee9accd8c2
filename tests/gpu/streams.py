# SPDX-License-Identifier: BSD-3-Clause
"""Streams: what is ordered in stock is ordered with us. Each scenario waits
where stock needs it, often before the update is launched, and keeps the device
busy, so that work that forgot to wait would read old values.

The CPU's streams do nothing; there the scripts only prove themselves."""

from __future__ import annotations

from typing import Any

import torch
from harness import On, common, scenario
from torch import Tensor, nn

import optfuse

STEPS = 6
WIDE = 512


def wide(on: On) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDE), nn.Tanh(), nn.Linear(WIDE, 3)).to(on.device)


def keep_busy(on: On) -> None:
    """Some milliseconds of work on the current stream, without waiting for it."""
    if on.is_cuda:
        torch.cuda._sleep(5_000_000)


def done_with(on: On, *streams: Any) -> None:
    """Their memory may be freed now: they wait for what has read it here."""
    for stream in streams:
        stream.wait_stream(on.api.current_stream())


@scenario()
def training_on_a_stream_of_its_own(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        stream = on.api.Stream()
        stream.wait_stream(on.api.current_stream())
        with on.api.stream(stream):
            for i in range(STEPS):
                keep_busy(on)
                on.train(model, optimizer, i)
        on.api.current_stream().wait_stream(stream)
        yield from common.everything(model, optimizer)
        done_with(on, stream)

    on.same(script)


@scenario()
def first_use_on_another_stream_that_waited_before(on: On) -> None:
    """The wait is older than the launch, which happens at the use."""

    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        other = on.api.Stream()
        for i in range(STEPS):
            keep_busy(on)
            on.train(model, optimizer, i)
            wrap.pending()
            other.wait_stream(on.api.current_stream())
            keep_busy(on)  # a launch now is late; who does not wait for it reads old values
            with on.api.stream(other):
                read = [p.detach() * 2 for p in model.parameters()]
            on.api.current_stream().wait_stream(other)
            yield "read", read
        yield from common.everything(model, optimizer)
        done_with(on, other)

    on.same(script)


@scenario()
def first_use_on_one_stream_and_then_on_a_third(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        second, third = on.api.Stream(), on.api.Stream()
        for i in range(STEPS):
            keep_busy(on)
            on.train(model, optimizer, i)
            wrap.pending()
            for stream in (second, third):
                stream.wait_stream(on.api.current_stream())
            keep_busy(on)
            results: list[Tensor] = []
            for stream in (second, third):
                with on.api.stream(stream):
                    results += [p.detach() + 1 for p in model.parameters()]
            for stream in (second, third):
                on.api.current_stream().wait_stream(stream)
            yield "read", results
        yield from common.everything(model, optimizer)
        done_with(on, second, third)

    on.same(script)


@scenario()
def an_event_recorded_after_step_orders_a_use(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        other = on.api.Stream()
        for i in range(STEPS):
            keep_busy(on)
            on.train(model, optimizer, i)
            wrap.pending()
            event = on.api.current_stream().record_event()
            other.wait_event(event)
            keep_busy(on)
            with on.api.stream(other):
                read = model[0].weight.detach().clone()
            on.api.current_stream().wait_stream(other)
            yield "read", read
        yield from common.everything(model, optimizer)
        done_with(on, other)

    on.same(script)


@scenario()
def step_on_another_stream_than_backward(on: On) -> None:
    """Gradients come from the allocator's pool of one stream and are used on
    another; the user drops them once this one has waited, before the launch."""

    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        side = on.api.Stream()
        for i in range(STEPS):
            optimizer.zero_grad()
            on.loss(model, i).backward()
            side.wait_stream(on.api.current_stream())
            with on.api.stream(side):
                keep_busy(on)
                optimizer.step()
            on.api.current_stream().wait_stream(side)
            optimizer.zero_grad()
            rubbish = [torch.full((WIDE, 6), 7.0, device=on.device) for _ in range(8)]
            del rubbish
        yield from common.everything(model, optimizer)
        done_with(on, side)

    on.same(script)


@scenario()
def forward_on_a_side_stream_and_backward_follows_it(on: On) -> None:
    """Autograd runs each backward operator on its forward's stream."""

    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        side = on.api.Stream()
        for i in range(STEPS):
            side.wait_stream(on.api.current_stream())
            optimizer.zero_grad()  # frees gradients, some of which are the side stream's
            x, y = on.batch(i)
            side.wait_stream(on.api.current_stream())
            with on.api.stream(side):
                keep_busy(on)
                hidden = model[0](x)
            on.api.current_stream().wait_stream(side)
            nn.functional.mse_loss(model[2](model[1](hidden)), y).backward()
            optimizer.step()
        yield from common.everything(model, optimizer)
        done_with(on, side)

    on.same(script)


def weight_gradients_beside(on: On, schedule: str) -> None:
    def script(wrap: Any) -> Any:
        model = wide(on)
        if wrap.fused:
            optfuse.reorder(model, schedule, side_stream=True)
        optimizer = wrap(common.adamw(model.parameters()))
        for i in range(STEPS):
            keep_busy(on)
            optimizer.zero_grad()
            loss = on.loss(model, i)
            loss.backward()
            rubbish = [torch.full((WIDE, 6), 7.0, device=on.device) for _ in range(8)]
            yield "rubbish", rubbish
            optimizer.step()
            yield "loss", loss
        yield from common.everything(model, optimizer)

    on.same(script)


@scenario()
def weight_gradients_on_a_side_stream(on: On) -> None:
    """optfuse.reorder(side_stream=True): the script knows nothing of that stream."""
    weight_gradients_beside(on, "stock")


@scenario()
def weight_gradients_on_a_side_stream_after_the_last_dx(on: On) -> None:
    weight_gradients_beside(on, "last")


@scenario(modes=("forward",))
def weights_copied_to_the_host_without_waiting(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = wide(on)
        optimizer = wrap(common.adamw(model.parameters()))
        for i in range(STEPS):
            keep_busy(on)
            on.train(model, optimizer, i)
            wrap.pending()
            weight = model[0].weight.detach()
            host = torch.empty(weight.shape, pin_memory=on.is_cuda)
            host.copy_(weight, non_blocking=True)
            del weight
            on.api.current_stream().synchronize() if on.is_cuda else None
            yield "on the host", host

    on.same(script)


@scenario()
def a_model_deleted_while_its_updates_are_pending(on: On) -> None:
    """Its memory must not be given to others before the updates have run."""

    def script(wrap: Any) -> Any:
        for i in range(STEPS):
            model = wide(on)
            optimizer = wrap(common.adamw(model.parameters()))
            keep_busy(on)
            on.train(model, optimizer, i)
            del model, optimizer
            fresh = [torch.zeros(WIDE, 6, device=on.device) for _ in range(12)]
            yield "fresh memory", fresh

    on.same(script, prove=False)
