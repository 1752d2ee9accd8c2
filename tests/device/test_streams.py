# SPDX-License-Identifier: BSD-3-Clause
"""Streams: whatever order a program keeps with the stock optimizer, ours keeps
too, although an update runs later than step(), or earlier."""

import functools
import gc
import threading

import gpu
import pytest
import torch
from common import Fused, adamw, assert_same, everything, sgd, snapshot
from gpu import NAME
from legal import (
    backward,
    in_order,
    kept,
    legal,
    loss_of,
    net,
    play,
    races_without,
    train,
    training,
)

import optfuse
from optfuse._process import drain_all

MODES = ("forward", "backward")


def prepared(wrap, make=adamw, build=net):
    """A model that has been trained for a while; its updates are not pending."""
    model = build()
    optimizer = wrap(make(model.parameters()))
    train(model, optimizer, 0)
    if wrap.fused:
        optfuse.flush(optimizer)
    gpu.synchronize()
    return model, optimizer


def use(model):
    with torch.no_grad():
        return loss_of(model, 7)


WIDTH, LAYERS, BUCKET = 128, 24, 1 << 17  # two layers' gradients


def many_launches_a_pass(wrap):
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(NAME)
    optimizer = wrap(adamw(model.parameters(), capturable=True))
    x = torch.ones(8, WIDTH, device=NAME)
    for _ in range(6):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield "bytes", torch.tensor(gpu.bytes_reserved())


BESIDE = {"side_stream": True, "bucket_bytes": BUCKET}


def test_a_side_stream_needs_no_more_memory_the_further_the_host_is_ahead():
    """The host asks for nothing of the device's meanwhile."""
    said, found = play(many_launches_a_pass, Fused("backward", **BESIDE))
    assert not found
    reserved = [number.item() for _, number in said]
    assert reserved[-1] == reserved[1], [number - reserved[0] for number in reserved]


def test_memory_is_given_away_too_early_without_our_wait(monkeypatch):
    races_without("let_go", many_launches_a_pass, monkeypatch, "backward", **BESIDE)


# The wait that a program makes is enough


def after_an_update(act):
    """A script: stream `a` has trained."""

    def script(wrap):
        model, optimizer = prepared(wrap)
        a, b, c = (gpu.stream() for _ in range(3))
        with a:
            train(model, optimizer, 1)
        yield from act(model, optimizer, a, b, c)

    script.__name__ = act.__name__
    return script


def uses(model, *streams):
    for stream in streams:
        with stream:
            yield "used", use(model)


@after_an_update
def waited_for_stream(model, optimizer, a, b, c):
    b.wait_stream(a)
    yield from uses(model, b)


@after_an_update
def waited_for_event(model, optimizer, a, b, c):
    event = a.record_event()
    b.wait_event(event)
    c.wait_event(event)
    yield from uses(model, b, c, a)


@after_an_update
def waited_for_by_the_host(model, optimizer, a, b, c):
    a.synchronize()
    yield from uses(model, b)


@after_an_update
def read_by_two_streams_and_then_written(model, optimizer, a, b, c):
    b.wait_stream(a)
    c.wait_stream(a)
    yield from uses(model, b, c)
    b.wait_stream(c)
    with b, torch.no_grad():
        model[0].weight.mul_(0.5)
        yield "written", model[0].weight


@after_an_update
def copied_to_the_host(model, optimizer, a, b, c):
    b.wait_stream(a)
    with b:
        yield "copied", model[2].weight.cpu()


@after_an_update
def copied_to_the_host_without_waiting(model, optimizer, a, b, c):
    b.wait_stream(a)
    host = torch.empty(model[2].weight.shape, pin_memory=True)
    with b:
        host.copy_(model[2].weight.detach(), non_blocking=True)
    b.synchronize()
    yield "copied", host


WAITS = (
    waited_for_stream,
    waited_for_event,
    waited_for_by_the_host,
    read_by_two_streams_and_then_written,
    copied_to_the_host,
    copied_to_the_host_without_waiting,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("script", WAITS)
def test_a_use_on_another_stream_comes_after_the_update(script, mode):
    legal(script, mode)


@pytest.mark.parametrize("script", WAITS)
def test_a_use_on_another_stream_comes_after_an_update_on_the_side_stream(script):
    legal(script, "backward", side_stream=True)


def test_without_our_waits_the_side_stream_races(monkeypatch):
    races_without("streams", waited_for_stream, monkeypatch, "backward", side_stream=True)


# Other resources of an update


@in_order("forward")
@after_an_update
def test_state_and_gradients_are_in_order_too(model, optimizer, a, b, c):
    b.wait_stream(a)
    c.wait_stream(a)
    with b:
        yield "state", optimizer.state[model[2].weight]["exp_avg"]
        yield "step", optimizer.state[model[2].weight]["step"]
    with c:
        yield "gradient", model[0].weight.grad


@in_order("forward")
@after_an_update
def test_a_second_step_on_another_stream_comes_after_the_first(model, optimizer, a, b, c):
    b.wait_stream(a)
    with b:
        optimizer.step()
        yield "weights", list(model.parameters())


@in_order(*MODES)
def test_each_step_on_another_stream(wrap):
    model, optimizer = prepared(wrap)
    last = gpu.current()
    for i in range(5):
        stream = gpu.stream()
        stream.wait_stream(last)
        with stream:
            train(model, optimizer, i)
        last.wait_stream(stream)  # the gradients' memory goes back to it
        last = stream
    with last:
        yield "weights", list(model.parameters())


@in_order("forward")
def test_step_on_another_stream_than_backward(wrap):
    model, optimizer = prepared(wrap)
    a, b = gpu.stream(), gpu.stream()
    for i in range(3):
        with a:
            backward(model, optimizer, i)
        b.wait_stream(a)
        with b:
            optimizer.step()
        a.wait_stream(b)
    with a:
        yield "used", use(model)


@in_order("forward")
def test_two_optimizers_on_two_streams(wrap):
    model = net()
    first = wrap(adamw(model.parameters()))
    second = wrap(sgd(model[0].parameters()))
    a, b = gpu.stream(), gpu.stream()
    gpu.synchronize()
    for i in range(3):
        with a:
            train(model, first, i)
        b.wait_stream(a)
        with b:
            second.step()
        a.wait_stream(b)
    with a:
        yield "weights", list(model.parameters())


# Memory


@in_order("forward")
def test_gradients_of_another_stream_are_freed_when_the_update_has_run(wrap):
    model, optimizer = prepared(wrap)
    a, b = gpu.stream(), gpu.stream()
    for i in range(3):
        with a:
            backward(model, optimizer, i)
        b.wait_stream(a)
        with b:
            optimizer.step()
        a.wait_stream(b)  # the last that stock needs
        with a:
            optimizer.zero_grad()
        with b:
            yield "used on its stream", model[2].weight
        with a:  # takes the gradient's memory, if it is free
            yield "other", torch.full((400, 8), 1.0, device=NAME)
        a.wait_stream(b)


@in_order(*MODES, prove=False)
def test_a_model_is_deleted_while_its_update_is_under_way(wrap):
    model, optimizer = prepared(wrap)
    a = gpu.stream()
    with a:
        train(model, optimizer, 1)
    gpu.current().wait_stream(a)  # the parameters' own stream
    kept.clear()
    del model, optimizer
    if wrap.fused:
        wrap.optimizers.clear()
    gc.collect()
    for _ in range(3):
        yield "new memory", torch.zeros(400, 8, device=NAME)


# Scalars on the device


def test_a_learning_rate_on_the_device_is_that_of_its_step():
    def make(params):
        return adamw(params, lr=torch.tensor(1e-2, device=NAME))

    def between(model, optimizer, i):
        optimizer.param_groups[0]["lr"].mul_(0.5)  # before anything uses a parameter

    legal(training(make, between=between))


def test_a_loss_scale_is_that_of_its_step():
    def iteration(model, optimizer, i):
        if i == 0:
            optimizer.grad_scale, optimizer.found_inf = (
                torch.tensor(v, device=NAME) for v in (16.0, 0.0)
            )
        optimizer.zero_grad()
        (loss_of(model, i) * optimizer.grad_scale).backward()
        optimizer.step()
        optimizer.grad_scale.mul_(2)
        optimizer.found_inf.fill_(float(i == 1))  # the third step is left out

    legal(training(iteration=iteration, steps=4))


@pytest.mark.parametrize(("mode", "bucket_bytes"), [("forward", 1), *((m, 0) for m in MODES)])
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("flag", [0.5, 1.0, 2.0, 1e-9, float("inf")])
def test_counters_are_those_of_any_flag(flag, make, mode, bucket_bytes):
    """PyTorch counts the step, updates unless the flag is 1, and subtracts the flag."""

    def iteration(model, optimizer, i):
        if i == 0:
            optimizer.found_inf = torch.tensor(0.0, device=NAME)
        train(model, optimizer, i)
        optimizer.found_inf.fill_(flag if i == 1 else 0.0)

    legal(training(make, iteration=iteration, steps=4), mode, bucket_bytes=bucket_bytes)


def test_another_thread_tells_scalars_while_they_are_read():
    """As the hooks of two devices, each of which may begin a backward pass."""
    ended = threading.Event()

    def tell(plan, rate):
        while not ended.is_set():
            torch.ops.optfuse.set_device_scalars(plan, [rate], None, None)

    def script(wrap):
        rate = torch.tensor(1e-2, device=NAME)
        model, optimizer = prepared(wrap, functools.partial(adamw, lr=rate))
        others = [
            threading.Thread(target=tell, args=(optimizer._optfuse_link.plan, rate))
            for _ in range(2 if wrap.fused else 0)
        ]
        for other in others:
            other.start()
        for i in range(600):
            train(model, optimizer, i)
        ended.set()
        for other in others:
            other.join()
        yield "weights", list(model.parameters())

    legal(script)


@in_order(*MODES)
def test_other_threads_infer_between_steps(wrap):
    model, optimizer = prepared(wrap)
    seen = []

    def infer():
        seen.append(use(model))
        gpu.synchronize()

    for i in range(4):
        train(model, optimizer, i)
        thread = threading.Thread(target=infer)
        thread.start()
        thread.join()
        yield "output", seen[-1]
    yield from everything(model, optimizer)


@in_order(*MODES)
def test_two_models_train_in_two_threads(wrap):
    pairs, streams = [prepared(wrap) for _ in range(2)], [gpu.stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(gpu.current())

    def work(pair, stream):
        with stream:
            for i in range(24):
                train(*pair, i)

    threads = [threading.Thread(target=work, args=one) for one in zip(pairs, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in streams:
        gpu.current().wait_stream(stream)
    for pair in pairs:
        yield from everything(*pair)
    for stream in streams:
        stream.wait_stream(gpu.current())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_flag_without_fused_raises_as_in_stock(kind, mode):
    model = net()
    optimizer = optfuse.fuse(kind(model.parameters(), lr=1e-2), mode=mode)
    train(model, optimizer, 0)
    before = snapshot(list(model.state_dict().values()))
    optimizer.found_inf = torch.tensor(0.0, device=NAME)
    with pytest.raises(AssertionError, match="grad_scale and found_inf to be None"):
        train(model, optimizer, 1)
    assert_same("weights", list(model.state_dict().values()), before)


@in_order("forward")
def test_a_grad_scaler_adds_the_flags_of_two_devices(wrap):
    models = net(f"{NAME}:0"), net(gpu.second())
    optimizer = wrap(adamw([p for model in models for p in model.parameters()]))
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**10, growth_interval=2)
    for i in range(4):
        optimizer.zero_grad()
        for model in models:
            loss = loss_of(model, i) * (torch.inf if i == 1 else 1.0)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    yield "weights", [list(model.parameters()) for model in models]
    yield "state", optimizer.state_dict()["state"]


# Devices


@in_order(*MODES)
def test_a_model_on_two_devices(wrap):
    first, second = net(f"{NAME}:0"), net(gpu.second())
    optimizer = wrap(adamw([*first.parameters(), *second.parameters()]))
    for i in range(4):
        optimizer.zero_grad()
        (loss_of(first, i).to(gpu.second()) + loss_of(second, i)).backward()
        optimizer.step()
    yield "first", list(first.parameters())
    torch.accelerator.set_device_index(1)
    yield "second", list(second.parameters())
    torch.accelerator.set_device_index(0)


@in_order(*MODES)
def test_a_rate_on_one_of_two_devices(wrap):
    """In one group stock may read it in the memory of the other device; in two it does not."""
    models = net(f"{NAME}:0"), net(gpu.second())
    rate = torch.tensor(1e-2, device=NAME)
    groups = [{"params": list(model.parameters())} for model in models]
    if wrap.fused:
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    optimizer = wrap(adamw(groups, lr=rate))
    for i in range(4):
        optimizer.zero_grad()
        for model in models:
            loss_of(model, i).backward()
        optimizer.step()
    yield "weights", [list(model.parameters()) for model in models]


@pytest.mark.parametrize("mode", MODES)
def test_the_current_device_may_be_another_one(mode):
    legal(training(model=lambda: net(gpu.second())), mode)  # on device 0


def visits_of_steps(steps=3):
    """How often our events went to their device from another one."""
    gpu.only_played()
    visits = 0
    model, other = net(gpu.second()), gpu.stream(1)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for i in range(steps):
        backward(model, optimizer, i)  # with events of the engine's
        optfuse.clip_grad_norm_(optimizer, 0.05)
        before = torch.ops.fakecuda.visits()
        optimizer.step()
        with other, torch.no_grad():
            model[0].weight.grad.add(1)
        torch.accelerator.set_device_index(0)
        optfuse.flush(optimizer)
        visits += torch.ops.fakecuda.visits() - before
        gpu.synchronize(1)
    return visits


def test_no_step_makes_a_context_on_a_device_that_is_only_current():
    assert visits_of_steps() == 0


@in_order("backward", prove=False)
def test_a_learning_rate_on_the_device_reaches_each_stream_of_backward(wrap):
    rate = torch.tensor(1e-2, device=NAME)
    models, sides = [net(), net()], [gpu.stream(), gpu.stream()]
    optimizer = wrap(adamw([p for m in models for p in m.parameters()], lr=rate))
    for i in range(3):
        for side in sides:
            side.wait_stream(gpu.current())
        optimizer.zero_grad()  # frees gradients that are the sides'
        losses = []
        for model, side in zip(models, sides, strict=True):
            with side:
                losses.append(loss_of(model, i))
            gpu.current().wait_stream(side)
        sum(losses).backward()
        optimizer.step()
    yield "weights", [list(model.parameters()) for model in models]
    for side in sides:
        side.wait_stream(gpu.current())


def is_marked(p):
    return "TESTING_ONLY_GenericWrapper" in str(torch._C._dispatch_keys(p))


def test_step_after_backward_takes_the_marks_off():
    """Each use of a marked weight costs a look-up."""
    gpu.only_played()
    drain_all()  # those of other tests: marks stay while anything is in flight
    model = net()
    params = list(model.parameters())
    optimizer = optfuse.fuse(adamw(params), optfuse.Backward(side_stream=True))
    train(model, optimizer, 0)
    backward(model, optimizer, 1)
    assert any(map(is_marked, params)), "no update has waited: the test would prove nothing"
    optimizer.step()
    assert not any(map(is_marked, params))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_counters_of_a_pass_on_another_stream_are_those_of_stock(mode, saved):
    """backward() has its caller's stream wait for what it did elsewhere, also for counters that are
    counted at its end."""

    def script(wrap):
        there = gpu.stream()
        with there:
            model, optimizer = prepared(wrap, functools.partial(adamw, capturable=True))
        gpu.synchronize()
        here = torch.accelerator.current_stream()
        for i in range(2, 4):
            there.wait_stream(here)
            optimizer.zero_grad()
            with there:
                loss = loss_of(model, i)
            here.wait_stream(there)
            loss.backward()
            optimizer.step()
            state = optimizer.state_dict()["state"] if saved else optimizer.state
            yield "counters", [entry["step"] for entry in state.values()]
        there.wait_stream(here)

    gpu.settle()
    legal(script, mode, prove=False, bucket_bytes=1)
