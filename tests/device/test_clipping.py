# SPDX-License-Identifier: BSD-3-Clause
"""Clipping on a GPU that the CPU plays: the update applies the factor, nobody
waits for it, and whoever looks at a gradient finds it clipped, in whatever order
the program keeps with stock."""

import gc

import fakecuda
import pytest
import torch
from common import Fused, Stock, adamw, assert_same, sgd
from fakecuda import NAME
from legal import backward, legal, loss_of, net, play, races_without, settle, train
from test_captures import captured

import optfuse
from optfuse._classes import link_of
from optfuse._link import drain_all
from optfuse._native import lib

LIMIT = 0.05  # far below the norms: every step is clipped
STEPS = 4


def clip(optimizer, limit=LIMIT, **options):
    """torch's own function, where the optimizer is stock's."""
    return optfuse.clip_grad_norm_(optimizer, limit, **options)


def clipped_steps(make=adamw, dtype=torch.float32, limit=LIMIT, **options):
    def script(wrap):
        model = net().to(dtype)
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            x = torch.full((5, 6), 0.1 * (i + 1), dtype=dtype, device=NAME)
            model(x).square().sum().backward()
            yield "norm", clip(optimizer, limit, **options)
            optimizer.step()
            if i == 1:  # otherwise nobody looks, and zero_grad() drops them
                yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())
        yield "state", optimizer.state_dict()["state"]

    return script


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_the_bits_of_torchs_function_and_step(make, dtype):
    legal(clipped_steps(make, dtype))


@pytest.mark.parametrize("limit", [1e9, 0.0, float("inf"), float("nan")])
def test_every_limit(limit):
    legal(clipped_steps(limit=limit))


def test_gradients_of_several_dtypes():
    def script(wrap):
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
        params = [torch.nn.Parameter(torch.ones(300, device=NAME, dtype=t)) for t in dtypes]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = torch.linspace(-1, 1 + i, 300).to(NAME, p.dtype)
            yield "norm", clip(optimizer)
            optimizer.step()
        yield "gradients", [p.grad for p in params]
        yield "weights", params

    legal(script)


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms(norm_type):
    legal(clipped_steps(norm_type=norm_type))


def test_step_clips_by_itself():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            if not wrap.fused:
                clip(optimizer)
            optimizer.step()
        yield "weights", list(model.parameters())

    legal(script, max_grad_norm=LIMIT)


# Who looks, and when


def looks(before_step=(), after_step=(), between=()):
    """Gradients of these layers are read or written around step()."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            clip(optimizer)
            for layer in before_step:
                yield "before step()", model[layer].weight.grad
            for layer in between:
                model[layer].weight.grad.mul_(0.5)
            optimizer.step()
            for layer in after_step:
                yield "after step()", model[layer].weight.grad
            if i % 2:
                yield "weights", list(model.parameters())
        yield "gradients", [p.grad for p in model.parameters()]

    return script


LOOKS = {
    "before": looks(before_step=(0, 4)),
    "after": looks(after_step=(2,)),
    "both": looks(before_step=(0,), after_step=(0, 2)),
    "written": looks(between=(2,)),
}


@pytest.mark.parametrize("script", LOOKS.values(), ids=LOOKS)
def test_a_gradient_that_is_looked_at_is_clipped(script):
    legal(script)


def test_clipping_twice():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            yield "norm", clip(optimizer)
            yield "norm", clip(optimizer, LIMIT / 3)
            optimizer.step()
        yield "weights", list(model.parameters())

    legal(script)


def test_one_gradient_is_clipped_alone_and_then_all():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            yield "norm", optfuse.clip_grad_norm_(model[0].weight, LIMIT)
            yield "norm", clip(optimizer)
            optimizer.step()
        yield "weights", list(model.parameters())

    legal(script)


def test_a_clipped_gradient_is_added_to():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            clip(optimizer)
            loss_of(model, i).backward()  # without zero_grad()
            clip(optimizer)
            optimizer.step()
        yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())

    legal(script)


def test_two_optimizers_step_with_one_clipped_gradient():
    def script(wrap):
        model = net()
        first = wrap(adamw(model.parameters()))
        second = wrap(sgd(model.parameters()))
        for i in range(STEPS):
            backward(model, first, i)
            yield "norm", clip(first)
            first.step()
            second.step()
            if i % 2:
                yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())

    legal(script)


# Streams and memory


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


# Loss scaling


def scaled(unscale, growth=2):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**100, growth_interval=growth)
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

    return script


@pytest.mark.parametrize("unscale", [True, False])
def test_with_a_grad_scaler_that_overflows(unscale):
    legal(scaled(unscale))


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


def test_clipping_before_the_update_divides():
    legal(divided)


# Guards


def kept(script, stock):
    """Whether ours gives these bits."""
    try:
        ours, found = play(script, Fused("forward"))
        for a, b in zip(ours, stock, strict=True):
            assert_same(b[0], a[1], b[1])
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
    check_guard("factors", clipped_steps(), monkeypatch)
    check_guard("unread", LOOKS["after"], monkeypatch)
    check_guard("clipstream", stepped_on_another_stream, monkeypatch)
    check_guard("divided", divided, monkeypatch)


# What it costs


def work_of(optimizer, model):
    """What runs on the device after a backward pass, up to the next use of a weight."""
    backward(model, optimizer, 1)
    torch.ops.fakecuda.set_logging(True)
    clip(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    model[0].weight.detach().sign()
    return names_logged()


def names_logged():
    names = [text.split()[0] for text in torch.ops.fakecuda.launches()]
    torch.ops.fakecuda.set_logging(False)
    return names


def trained(**options):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), **options)
    train(model, optimizer, 0)
    optfuse.flush(optimizer)
    return optimizer, model


READS_A_NUMBER = "aten::_local_scalar_dense"  # the host waits for it
MULTIPLIES = "aten::mul"  # once for the factor itself, and a gradient each time
OURS_ALONE = ["of_cuda_advance_steps", "of_cuda_adam_float32_3_small"]


def kernels_of(names):
    return [name for name in names if name.startswith("of_cuda")]


def test_nobody_waits_and_no_gradient_is_written():
    names = work_of(*trained())
    assert READS_A_NUMBER not in names, names
    assert names.count(MULTIPLIES) == 1 and kernels_of(names) == OURS_ALONE, names


def test_without_folding_torchs_operator_multiplies():
    names = work_of(*trained(fold=False))
    assert READS_A_NUMBER not in names, names
    assert names.count(MULTIPLIES) == 1 + 6 and kernels_of(names) == OURS_ALONE, names
    legal(clipped_steps(), fold=False)


def test_where_no_update_waits_torchs_operator_multiplies():
    """As after compiled code has met one."""
    optimizer, model = trained()
    lib.of_shim_stop_deferring(link_of(optimizer).plan)
    names = work_of(optimizer, model)
    assert READS_A_NUMBER not in names and kernels_of(names) == OURS_ALONE, names
    assert names.count(MULTIPLIES) == 1 + 6, names


def test_gradients_that_others_see_are_multiplied_at_once():
    optimizer, model = trained()
    backward(model, optimizer, 1)
    views = [p.grad.view(-1) for p in model.parameters()]
    before = [view.cpu() for view in views]
    clip(optimizer)
    after = [view.cpu() for view in views]
    assert all(abs(a).sum() < abs(b).sum() for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Adafactor])
def test_optimizers_without_kernels_have_their_gradients_clipped(make):
    legal(clipped_steps(make))


# Captures


def test_in_a_capture_gradients_are_multiplied_at_once():
    optimizer, model = trained()
    drain_all()
    stream = fakecuda.stream()
    with captured(stream):
        backward(model, optimizer, 1)
        torch.ops.fakecuda.set_logging(True)
        clip(optimizer)
        names = names_logged()
        assert names.count(MULTIPLIES) == 1 + 6 and READS_A_NUMBER not in names, names
        optimizer.step()
    settle()


def test_a_capture_refuses_a_gradient_that_was_clipped_outside():
    optimizer, model = trained()
    backward(model, optimizer, 1)
    clip(optimizer)
    stream = fakecuda.stream()
    stream.wait_stream(fakecuda.current())
    with captured(stream), pytest.raises(optfuse.Error, match="captured"):
        model[0].weight.grad.add(1)
    drain_all()  # what capture_begin calls first
    with captured(stream):
        model[0].weight.grad.add(1)
    settle()
