# SPDX-License-Identifier: BSD-3-Clause
"""Clipping on a GPU: norms, gradients and updates have the bits of torch's function and step(), in
whatever order of streams the program keeps, and nobody waits for a norm. (tests/python/clipping,
which is played on GPUs, too, has who looks at gradients.)"""

import gc

import gpu
import pytest
import torch
from common import Fused, Stock, adamw, fuse_with, sgd
from gpu import NAME, captured, settle
from legal import backward, compare, in_order, legal, loss_of, net, play, races_without, train

import optfuse
from optfuse._library.bindings import lib
from optfuse._link import link_of
from optfuse._process import drain_all

LIMIT = 0.05  # far below the norms: every step is clipped
STEPS = 4


def clip(optimizer, limit=LIMIT, **options):
    """torch's own function, where the optimizer is stock's."""
    return optfuse.clip_grad_norm_(optimizer, limit, **options)


def clipped(make=adamw, looks_after=()):
    """Once nobody looks at the gradients, and zero_grad() drops them."""

    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            yield "norm", clip(optimizer)
            optimizer.step()
            for layer in looks_after:
                yield "after step()", model[layer].weight.grad
            if i == 1:
                yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())
        yield "state", optimizer.state_dict()["state"]

    return script


@pytest.mark.parametrize("make", [adamw, torch.optim.RMSprop, torch.optim.Adafactor])
def test_optimizers_with_kernels_and_without(make):
    legal(clipped(make))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("how", ["kept", "given"])
@in_order("forward")
def test_memory_that_copies_on_write(wrap, how, foreach):
    """PyTorch's multi-tensor function clips a lazy clone, too, and its loop doesn't."""
    params = [torch.nn.Parameter(torch.ones(300, device=NAME)) for _ in range(3)]
    optimizer = wrap(sgd(params))
    for i in range(STEPS):
        others = []
        params[2].grad = torch.ones(300, device=NAME)  # is updated later
        for p in params[:2]:
            g = torch.linspace(-1, 1 + i, 300).to(NAME)
            lazy = torch._lazy_clone(g)
            p.grad, other = (g, lazy) if how == "kept" else (lazy, g)
            others.append(other)
        yield "norm", clip(optimizer, foreach=foreach)
        yield "gradients", [p.grad.clone() for p in params[:2]]
        optimizer.step()
        yield "others", others
    yield "weights", params


@in_order("forward")
def test_one_gradient_is_clipped_alone_and_then_all(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    for i in range(STEPS):
        backward(model, optimizer, i)
        yield "norm", optfuse.clip_grad_norm_(model[0].weight, LIMIT)
        yield "norm", clip(optimizer)
        optimizer.step()
    yield "weights", list(model.parameters())


# Together with a loss scale


@pytest.mark.parametrize("unscale", [True, False])
@in_order("forward")
def test_with_a_grad_scaler_that_overflows(wrap, unscale):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**100, growth_interval=2)
    for i in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        yield "norm", clip(optimizer, LIMIT if unscale else 1e30)
        scaler.step(optimizer)
        scaler.update()
        yield "scale", scaler.get_scale()
        if i % 3 == 0:
            yield "gradients", [p.grad for p in model.parameters()]
    yield "weights", list(model.parameters())
    yield "state", optimizer.state_dict()["state"]


def divided(wrap):
    """step() divides the gradients that were clipped, and leaves them divided."""
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    scale, inf = (torch.tensor(v, device=NAME) for v in (16.0, 0.0))
    for i in range(4):
        optimizer.zero_grad()
        (loss_of(model, i) * scale).backward()
        clip(optimizer)
        optimizer.grad_scale, optimizer.found_inf = scale, inf
        optimizer.step()
        inf.fill_(float(i == 1))  # the third step is left out
        yield "weights", list(model.parameters())
        yield "gradients", [p.grad for p in model.parameters()]


# Streams


def read_on_another_stream(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    train(model, optimizer, 0)
    a, b, c = (gpu.stream() for _ in range(3))
    a.wait_stream(gpu.current())
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
        gpu.current().wait_stream(stream)


def stepped_on_another_stream(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    for i in range(3):
        a, b = gpu.stream(), gpu.stream()
        a.wait_stream(gpu.current())
        with a:
            backward(model, optimizer, i)
            clip(optimizer)
        b.wait_stream(a)
        with b:
            optimizer.step()
            yield "weights", list(model.parameters())
        gpu.current().wait_stream(b)
        a.wait_stream(b)
        with a:
            optimizer.zero_grad()


def the_factor_lives_as_long_as_an_update_needs_it(wrap):
    """Everything that the program has is gone when the update runs, and the memory
    is taken at once by others."""
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    a = gpu.stream()
    for i in range(STEPS):
        a.wait_stream(gpu.current())
        with a:
            backward(model, optimizer, i)
            clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            for n in (1, 4, 48, 3200):
                yield "other", torch.full((n,), 7.0, device=NAME)
        gpu.current().wait_stream(a)
    yield "weights", list(model.parameters())


ORDERS = (divided, read_on_another_stream, stepped_on_another_stream)


@pytest.mark.parametrize("script", [*ORDERS, the_factor_lives_as_long_as_an_update_needs_it])
def test_whatever_order_a_script_keeps(script):
    legal(script)


def test_without_our_wait_it_would_race(monkeypatch):
    races_without("streams", read_on_another_stream, monkeypatch)


@in_order("forward")
def test_parameters_of_two_devices_and_of_the_host(wrap):
    models = [net(f"{NAME}:0"), net(gpu.second()), net("cpu")]
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


# Guards


def kept(script, stock):
    """Whether ours gives these bits."""
    try:
        ours, found = play(script, Fused("forward"))
        compare(ours, stock)
    except (AssertionError, RuntimeError):  # an address that stays sealed, too
        return False
    finally:
        settle()
    return not found


def check_guard(name, script, monkeypatch):
    stock, _ = play(script, Stock())
    assert kept(script, stock), f"{name!r} is on, and the promise is broken"
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", name)
    assert not kept(script, stock), f"{name!r} can be off without harm"
    monkeypatch.delenv("OPTFUSE_TEST_GUARDS_OFF")


def test_guards(monkeypatch):
    gpu.only_played()
    check_guard("factors", clipped(), monkeypatch)
    check_guard("unread", clipped(looks_after=(2,)), monkeypatch)
    check_guard("clipstream", stepped_on_another_stream, monkeypatch)
    check_guard("divided", divided, monkeypatch)


# The cost: the update applies the factor and nobody waits for it

READS_A_NUMBER = "aten::_local_scalar_dense"  # the host waits for it
MULTIPLIES = "aten::mul"  # once for the factor itself, and a gradient each time
OURS_ALONE = ["of_cuda_adam_float32_3_small", "of_cuda_advance_steps"]


def trained(**options):
    model = net()
    optimizer = fuse_with(adamw(model.parameters()), "forward", **options)
    train(model, optimizer, 0)
    optfuse.flush(optimizer)
    return optimizer, model


def work_of(optimizer, model):
    """The kernels and operators on the device after a backward pass, up to the next use of a
    weight: the products of gradients."""
    backward(model, optimizer, 1)

    def work():
        clip(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.detach().sign()

    names = gpu.operators(work)
    assert READS_A_NUMBER not in names, names
    assert [name for name in names if name.startswith("of_cuda")] == OURS_ALONE, names
    return names.count(MULTIPLIES) - 1


def test_nobody_waits_and_no_gradient_is_written():
    assert work_of(*trained()) == 0


def test_without_folding_torchs_operator_multiplies():
    assert work_of(*trained(fold=False)) == 6
    legal(clipped(), fold=False)


def test_where_no_update_waits_torchs_operator_multiplies():
    """As after compiled code has met one."""
    optimizer, model = trained()
    lib.of_shim_stop_deferring(link_of(optimizer).plan)
    assert work_of(optimizer, model) == 6


def test_gradients_that_others_see_are_multiplied_at_once():
    optimizer, model = trained()
    backward(model, optimizer, 1)
    views = [p.grad.view(-1) for p in model.parameters()]
    before = [view.cpu() for view in views]
    clip(optimizer)
    after = [view.cpu() for view in views]
    assert all(abs(a).sum() < abs(b).sum() for a, b in zip(after, before, strict=True))


# Captures


@pytest.mark.parametrize(("released", "bytes_an_element"), [(True, 32), (False, 40)])
def test_in_a_capture_gradients_are_multiplied_where_the_update_reads_them(
    released, bytes_an_element
):
    """In memory, too, if somebody has them in the end: in one launch."""

    def end_of_an_iteration():
        clip(optimizer)
        optimizer.step()
        if released:
            optimizer.zero_grad()
        optfuse.flush(optimizer)  # what capture_end calls first

    optimizer, model = trained()
    elements, names = sum(p.numel() for p in model.parameters()), []
    drain_all()
    settle()
    with captured(gpu.stream()):
        backward(model, optimizer, 1)
        moved = gpu.bytes_moved(lambda: names.extend(gpu.operators(end_of_an_iteration)))
    multiplied = [name for name in names if name.startswith("of_cuda_scaling")]
    assert names.count(MULTIPLIES) == 1 and READS_A_NUMBER not in names, names  # the factor
    assert len(multiplied) == (not released), names
    assert moved // elements == bytes_an_element
    settle()


def test_a_capture_that_ends_unseen_with_a_clipped_gradient_is_named():
    optimizer, model = trained()
    drain_all()
    settle()
    with captured(gpu.stream()):
        backward(model, optimizer, 1)
        clip(optimizer)
    with pytest.raises(optfuse.Error, match="left behind by it.*flush the optimizer before"):
        model[0].weight.grad.add(1)
    optimizer.zero_grad()
    train(model, optimizer, 2)
    settle()


def test_a_capture_refuses_a_gradient_that_was_clipped_outside():
    optimizer, model = trained()
    backward(model, optimizer, 1)
    clip(optimizer)
    stream = gpu.stream()
    stream.wait_stream(gpu.current())
    with captured(stream), pytest.raises(optfuse.Error, match="captured"):
        model[0].weight.grad.add(1)
    drain_all()  # what capture_begin calls first
    with captured(stream):
        model[0].weight.grad.add(1)
    settle()
