# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.GradScaler in forward mode, and scales that a script sets. The bits are deeds
(programs/deeds/scaling.py)."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import adamw, assert_same_tensor, loss_of, net, same
from torch import nn

import optfuse

STEPS = 5
TIGHT = 0.05
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
FOLDS = pytest.mark.parametrize("fold", (True, False), ids=("folded", "not folded"))


def clip(wrap, parameters, max_norm=TIGHT, **options):
    function = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
    return function(parameters, max_norm, **options)


def scaler_of(scale=65536.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


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


# Scales that a script sets


def set_scale(optimizer, scales):
    for name in ("grad_scale", "found_inf"):
        setattr(optimizer, name, torch.tensor(scales[name]) if name in scales else None)


@both_modes
def test_options_that_select_an_implementation_without_scales_raise_as_in_stock(mode):
    model = net()
    optimizer = optfuse.fuse(torch.optim.Adam(model.parameters(), foreach=False), mode=mode)
    for i in range(4):
        optimizer.zero_grad()
        set_scale(optimizer, {"grad_scale": 4.0} if i == 2 else {})
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, i).backward()
        if i == 2:
            with pytest.raises(AssertionError):
                optimizer.step()
            assert all(map(torch.equal, model.parameters(), before))
            set_scale(optimizer, {})
        optimizer.step()
        assert not any(map(torch.equal, model.parameters(), before))


def test_a_scale_and_a_delay():
    model = net()
    optimizer = optfuse.fuse(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        optfuse.Forward(delay={model[0].weight: 1}),
    )
    before = model[0].weight.detach().clone()
    set_scale(optimizer, {"grad_scale": 1e30})
    loss_of(model, 0).backward()
    optimizer.step()
    optfuse.drain(optimizer)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad.abs().max() < 1e-20
