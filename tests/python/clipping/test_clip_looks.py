# SPDX-License-Identifier: BSD-3-Clause
"""Who looks at a gradient that optfuse.clip_grad_norm_ has clipped finds what torch's
function leaves, whatever happens to it before step() and after it."""

import copy
import ctypes
import os
import threading

import numpy
import pytest
import torch
from clip_scripts import STEPS, TIGHT, backward, clip, gradients, long_net, model_to_clip, twin_of
from common import adamw, assert_same_tensor, everything, same
from torch import nn

import optfuse


def look(model, *_):
    yield "gradients", gradients(model)


def look_at_one(model, *_):
    yield "one", model[0].weight.grad.sum()


def norms(model, *_):
    yield "norms", torch.stack([p.grad.norm() for p in model.parameters()])


def clip_again(model, optimizer, wrap):
    yield "second norm", clip(wrap, model.parameters(), TIGHT / 3)


def clip_with_torch(model, *_):
    yield "second norm", nn.utils.clip_grad_norm_(model.parameters(), TIGHT / 3)
    yield "value", nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def scale_by_hand(model, *_):
    for p in model.parameters():
        p.grad.mul_(0.5)
    model[0].weight.grad[0] = 1.0
    yield from look(model)


def through_data(model, *_):
    for p in model.parameters():
        p.grad.data.mul_(0.5)
    yield from look(model)


def through_address(model, *_):
    grad = model[0].weight.grad
    address = grad.data_ptr()
    values = (ctypes.c_float * grad.numel()).from_address(address)
    yield "address", torch.tensor(list(values))


def through_numpy(model, *_):
    array = model[0].weight.grad.numpy()
    array *= 2
    yield "numpy", torch.from_numpy(numpy.array(array))


def through_an_alias_kept(model, optimizer, wrap):
    model.kept = [p.grad.detach() for p in model.parameters()]
    yield "second norm", clip(wrap, model.parameters(), TIGHT / 3)
    yield "alias", [k.clone() for k in model.kept]


def accumulate_more(model, *_):
    backward(model, 77)
    yield from look(model)


def set_to_zero(model, optimizer, wrap):
    optimizer.zero_grad(set_to_none=False)
    yield from look(model)


def drop_some(model, *_):
    model[0].weight.grad = None
    yield from look(model)


def replace(model, *_):
    for p in model.parameters():
        p.grad = p.grad * 2
    yield from look(model)


def swap_data(model, *_):
    for p in model.parameters():
        p.grad.data = torch.full(p.shape, 0.25)
    yield from look(model)


def copy_them(model, *_):
    yield "copied gradients", copy.deepcopy([p.grad for p in model.parameters()])


def flush(model, optimizer, wrap):
    if wrap.fused:
        optfuse.flush(optimizer)
        optfuse.flush()
    yield from look_at_one(model)


def two_steps(model, optimizer, wrap):
    optimizer.step()
    yield "weight", model[0].weight
    optimizer.step()


def step_then_look(model, optimizer, wrap):
    optimizer.step()
    yield from look(model)


def step_then_clip(model, optimizer, wrap):
    optimizer.step()
    yield "second norm", clip(wrap, model.parameters(), TIGHT / 3)


def forward_then_look(model, optimizer, wrap):
    optimizer.step()
    yield "output", model(torch.ones(1, 33))
    yield from look(model)


def another_group(model, optimizer, wrap):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    yield from look_at_one(model)


def save(model, *_):
    path = f"/tmp/optfuse-test-{os.getpid()}"
    torch.save([p.grad for p in model.parameters()], path)
    yield "saved", torch.load(path)
    os.unlink(path)


ACTIONS = (
    look,
    look_at_one,
    norms,
    clip_again,
    clip_with_torch,
    scale_by_hand,
    through_data,
    through_address,
    through_numpy,
    through_an_alias_kept,
    accumulate_more,
    set_to_zero,
    drop_some,
    replace,
    swap_data,
    copy_them,
    flush,
    two_steps,
    step_then_look,
    step_then_clip,
    forward_then_look,
    another_group,
    save,
)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: a.__name__)
def test_between_clip_and_step(action):
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, model.parameters())
            yield from action(model, optimizer, wrap)
            optimizer.step()
            yield from everything(model, optimizer)
            yield "gradients", gradients(model)

    same(script, prove=action is not through_an_alias_kept)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda a: a.__name__)
def test_after_clip_and_step(action):
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, model.parameters())
            optimizer.step()
            wrap.pending()
            yield from action(model, optimizer, wrap)
            yield from everything(model, optimizer)

    same(script)


def test_without_zero_grad():
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, i)
            yield "norm", clip(wrap, model.parameters())
            optimizer.step()
            wrap.pending()
        yield from everything(model, optimizer)
        yield "gradients", gradients(model)

    same(script)


def test_clip_without_step():
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, optimizer if wrap.fused else model.parameters())
            if i % 2:
                optimizer.step()
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("stepped", (False, True))
def test_another_thread_looks(stepped):
    model, optimizer = model_to_clip()
    stock = twin_of(model)
    nn.utils.clip_grad_norm_(stock.parameters(), TIGHT)
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    if stepped:
        optimizer.step()
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(gradients(model)))
    thread.start()
    thread.join()
    for ours, p in zip(seen, stock.parameters(), strict=True):
        assert_same_tensor("gradient", ours, p.grad)


def test_a_forked_child_looks():
    model, optimizer = model_to_clip()
    stock = twin_of(model)
    nn.utils.clip_grad_norm_(stock.parameters(), TIGHT)
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    child = os.fork()
    if child == 0:
        pairs = zip(model.parameters(), stock.parameters(), strict=True)
        os._exit(0 if all(torch.equal(p.grad, q.grad) for p, q in pairs) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child sees other gradients"
