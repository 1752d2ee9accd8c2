# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.GradScaler in forward mode: weights, gradients as anyone sees them,
skipped steps and the scaler's state are those of stock, folded or not."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import adamw, assert_same_tensor, batch, everything, loss_of, net, same, sgd
from torch import nn

import optfuse

STEPS = 5
TIGHT = 0.05
FOLDS = pytest.mark.parametrize("fold", (True, False), ids=("folded", "not folded"))


def clip(wrap, parameters, max_norm=TIGHT, **options):
    function = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
    return function(parameters, max_norm, **options)


def gradients(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def scaler_of(scale=65536.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


def break_one(model, value):
    model[2].weight.grad[1, 1] = value


def loop(make=adamw, scale=65536.0, unscale=True, clips=True, look=False, bad=(1, 3), **options):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        scaler = scaler_of(scale)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i in bad:
                break_one(model, (math.inf, math.nan)[i // 2])
            if unscale:
                scaler.unscale_(optimizer)
            if clips:
                yield "norm", clip(wrap, model.parameters(), **options)
            if look:
                yield "gradients", gradients(model)
            scaler.step(optimizer)
            scaler.update()
            yield "scaler", scaler.state_dict()
            yield from everything(model, optimizer)
        yield "gradients", gradients(model)

    return script


@FOLDS
@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("unscale", (True, False))
@pytest.mark.parametrize("clips", (True, False))
def test_training(fold, make, unscale, clips):
    same(loop(make, unscale=unscale, clips=clips and unscale), fold=fold)


@FOLDS
@pytest.mark.parametrize("scale", (1.0, 3.0, 0.1, 1e30, 1e-30, 7e4))
def test_scales_that_are_no_powers_of_two(fold, scale):
    same(loop(scale=scale), fold=fold)


@FOLDS
@pytest.mark.parametrize("norm_type", (1.0, math.inf, 3.0))
@pytest.mark.parametrize("foreach", (None, False))
def test_other_norms(fold, norm_type, foreach):
    same(loop(norm_type=norm_type, foreach=foreach), fold=fold)


@FOLDS
def test_gradients_read_in_between(fold):
    same(loop(look=True), fold=fold)
    same(loop(look=True, clips=False), fold=fold)


@FOLDS
def test_clipping_twice_and_by_torch(fold):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = scaler_of()
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            scaler.unscale_(optimizer)
            yield "first", clip(wrap, model.parameters())
            yield "second", clip(wrap, model.parameters(), TIGHT / 2)
            yield "third", clip(wrap, model[0].parameters(), TIGHT / 9)
            if i % 2:
                yield "torch's", nn.utils.clip_grad_norm_(model.parameters(), TIGHT / 20)
            scaler.step(optimizer)
            scaler.update()
            yield from everything(model, optimizer)
            yield "gradients", gradients(model)

    same(script, fold=fold)


@FOLDS
def test_accumulation_of_scaled_gradients(fold):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = scaler_of()
        for i in range(STEPS):
            for micro in range(2):
                scaler.scale(loss_of(model, 2 * i + micro)).backward()
            scaler.unscale_(optimizer)
            loss_of(model, 99).backward()  # adds to unscaled gradients
            yield "norm", clip(wrap, model.parameters())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield from everything(model, optimizer)

    same(script, fold=fold)


@FOLDS
def test_max_grad_norm(fold):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()), max_grad_norm=TIGHT)
        scaler = scaler_of()
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 2:
                break_one(model, math.inf)
            if not wrap.fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
            scaler.step(optimizer)
            scaler.update()
            yield "scaler", scaler.state_dict()
            yield from everything(model, optimizer)

    same(script, fold=fold)


@FOLDS
def test_two_optimizers_and_one_scaler(fold):
    def script(wrap):
        model = net()
        first, second = wrap(adamw(model[:2].parameters())), wrap(sgd(model[2:].parameters()))
        scaler = scaler_of()
        for i in range(STEPS):
            model.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 1:
                break_one(model, math.nan)
            scaler.unscale_(first)
            yield "norm", clip(wrap, model[:2].parameters())
            for optimizer in (first, second):
                scaler.step(optimizer)
            scaler.update()
            yield "scaler", scaler.state_dict()
            yield from everything(model, first)
            yield from everything(model, second)

    same(script, fold=fold)


@FOLDS
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_other_dtypes(fold, dtype):
    def script(wrap):
        model = net().to(dtype)
        optimizer = wrap(adamw(model.parameters()))
        scaler = scaler_of()
        for i in range(STEPS):
            optimizer.zero_grad()
            x, y = (t.to(dtype) for t in batch(i))
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.unscale_(optimizer)
            yield "norm", clip(wrap, model.parameters())
            scaler.step(optimizer)
            scaler.update()
            yield from everything(model, optimizer)

    same(script, fold=fold)


@FOLDS
def test_float16_gradients_and_no_gradients_raise_as_in_stock(fold):
    def script(wrap):
        model = net().to(torch.float16)
        optimizer = wrap(adamw(model.parameters(), fused=False))  # else stock's scaler asks it
        scaler = scaler_of()
        scaler.scale(torch.ones(()))
        for p in (None, *model.parameters()):
            if p is not None:
                p.grad = torch.ones_like(p)
            try:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            except (ValueError, AssertionError, RuntimeError) as error:
                yield "error", str(error)

    same(script, prove=False, fold=fold)


@FOLDS
def test_gradients_that_others_may_see(fold):
    def script(wrap):
        params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(8, 5))]
        optimizer = wrap(adamw(params))
        scaler = scaler_of()
        for i in range(STEPS):
            kept = torch.linspace(-1, 1 + i, 80) * 65536
            scaler.scale(torch.ones(()))
            params[0].grad = kept[:40]
            params[1].grad = kept[40:].view(8, 5)
            scaler.unscale_(optimizer)
            yield "norm", clip(wrap, params)
            scaler.step(optimizer)
            scaler.update()
            yield "kept", kept
            yield "params", params

    same(script, prove=False, fold=fold)


def test_unscaling_writes_no_gradient():
    if not torch.ops.optfuse.norms_are_torchs():
        pytest.skip("PyTorch's norm has other roundings here; its operators read the gradients")
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    scaler = scaler_of()
    for i in range(2):  # the first step makes the state
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i)).backward()
        stock = copy.deepcopy([p.grad for p in model.parameters()])
        grad = model[0].weight.grad
        address = grad.data_ptr()
        from_memory = torch.frombuffer(
            (__import__("ctypes").c_float * grad.numel()).from_address(address),
            dtype=torch.float32,
        )
        before = from_memory.clone()
        scaler.unscale_(optimizer)
        norm = optfuse.clip_grad_norm_(optimizer, TIGHT)
        if i == 1:
            assert_same_tensor("memory", from_memory, before)
        scaler.step(optimizer)
        model[0].weight.sum()
        if i == 1:
            assert_same_tensor("memory", from_memory, before)
        scaler.update()
        factor = torch.clamp(TIGHT / (norm + 1e-6), max=1.0)
        wanted = stock[0] * torch.tensor(1.0 / 65536) * factor
        assert_same_tensor("gradient", grad, wanted)


def test_a_disabled_scaler_does_nothing():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            yield from everything(model, optimizer)

    same(script)


def test_frameworks_may_clip():
    """Some refuse clipping for optimizers that say they unscale by themselves."""
    optimizer = optfuse.fuse(adamw(net().parameters()))
    assert not optimizer._step_supports_amp_scaling


def first_iteration():
    """The optimizer after it: PyTorch's own clipping looks at gradients before any step()."""
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    scaler = scaler_of()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    scaler.step(optimizer)
    return model, optimizer


def test_updates_wait_although_a_thread_looks_at_gradients_before_its_first_step():
    with ThreadPoolExecutor(1) as new_thread:
        _, optimizer = new_thread.submit(first_iteration).result()
        found = optfuse.summary(optimizer)
    assert found.pending == found.created > 0 and not found.threads_seen, str(found)
