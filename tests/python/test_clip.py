# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.clip_grad_norm_: the norm, the gradients as anyone sees them and the
updates have the bits of torch's function followed by step()."""

import copy
import ctypes
import gc
import math
import os
import threading
from pathlib import Path

import numpy
import pytest
import torch
from common import (
    adamw,
    assert_same_tensor,
    batch,
    everything,
    fused_backward,
    loss_of,
    net,
    refused,
    same,
    sgd,
    snapshot,
    train,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import optfuse
from optfuse import _clip

STEPS = 4
TIGHT = 0.05  # far below every norm here
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def clip(wrap, parameters, max_norm=TIGHT, *args, **options):
    function = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
    return function(parameters, max_norm, *args, **options)


def gradients(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def long_net(dtype=torch.float32):
    """Parameters of more than one block of the kernels, and with tails."""
    return nn.Sequential(nn.Linear(33, 70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)


def backward(model, i, dtype=torch.float32):
    x, y = batch(i, inputs=33)
    (model(x.to(dtype)) - y.to(dtype)).square().mean().backward()


def script_of(make=adamw, dtype=torch.float32, action=None, build=long_net, steps=STEPS, **options):
    """zero_grad, backward, clip, step; `action` runs between clip and step."""

    def script(wrap):
        model = build(dtype)
        optimizer = wrap(make(model.parameters()))
        for i in range(steps):
            optimizer.zero_grad()
            backward(model, i, dtype)
            yield "norm", clip(wrap, model.parameters(), **options)
            if action is not None:
                yield from action(model, optimizer, wrap)
            optimizer.step()
            wrap.pending()
            yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", (TIGHT, 1e9, 0.0))
def test_clip_and_step(make, dtype, max_norm):
    if make is sgd and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("stock's fused SGD is broken in 16 bits")
    same(script_of(make, dtype, max_norm=max_norm))


@pytest.mark.parametrize("norm_type", (1, 2.0, 3, 0, 0.5, math.inf, -math.inf, "inf"))
@pytest.mark.parametrize("foreach", (None, True, False))
def test_norm_types_and_foreach(norm_type, foreach):
    same(script_of(norm_type=norm_type, foreach=foreach))


@pytest.mark.parametrize("options", ({"amsgrad": True}, {"maximize": True}))
def test_options_of_the_rule(options):
    same(script_of(lambda p: adamw(p, **options)))


def test_with_threads(several_threads):
    def build(dtype):
        return nn.Linear(33, 3000).to(dtype)

    def script(wrap):
        model = build(torch.float32)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad()
            model(batch(i, inputs=33)[0]).square().mean().backward()
            yield "norm", clip(wrap, model.parameters())
            optimizer.step()
            yield "gradients", gradients(model)
            yield from everything(model, optimizer)

    same(script)


def test_our_norms_are_those_of_torch(several_threads):
    """At every length of a tail, of several gradients at once, on one thread
    and on three, with infinities and NaN among them."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("PyTorch's norm has other roundings here; its operator is used")
    assert _clip._our_norm_is_torchs()
    sizes = (*range(1, 130), 1000, 4095, 33_333, 400_001)
    for spread in (1.0, 1e-30, 1e25):
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        optimizer = optfuse.fuse(sgd(params))
        for p in params:
            p.grad = torch.randn(p.shape) * spread
        params[50].grad[3], params[60].grad[4] = math.inf, math.nan
        for threads in (1, 3):
            torch.set_num_threads(threads)
            ours = _clip.Gradients(params).norms()
            stock = torch.stack([torch.linalg.vector_norm(p.grad, 2.0) for p in params])
            assert_same_tensor(f"norms of {spread}", ours, stock)
            stock = torch.stack(torch._foreach_norm([p.grad for p in params], 2.0))
            assert_same_tensor(f"foreach norms of {spread}", ours, stock)
        optfuse.unfuse(optimizer)


# Nothing is written, and nothing is seen


def raw(address, n):
    return ctypes.string_at(address, 4 * n)


def model_to_clip():
    torch.manual_seed(0)
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 9)  # makes the state
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    return model, optimizer


def twin_of(model):
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    return twin


def test_no_gradient_is_written():
    """Neither by the clipping nor by the update; its first reader sees it clipped."""
    model, optimizer = model_to_clip()
    weight = model[0].weight
    before = weight.grad.clone()
    address, n = weight.grad.data_ptr(), weight.numel()
    memory = raw(address, n)
    norm = optfuse.clip_grad_norm_(optimizer, TIGHT)
    assert raw(address, n) == memory, "clipping wrote the gradient"
    optimizer.step()
    assert optfuse.summary(optimizer).pending > 0
    weight.sum()
    assert raw(address, n) == memory, "the update wrote the gradient"
    factor = torch.clamp(TIGHT / (norm + 1e-6), max=1.0)
    assert_same_tensor("gradient", weight.grad, before * factor)
    assert raw(address, n) != memory


def test_without_folding_every_gradient_is_written():
    model = long_net()
    optimizer = optfuse.fuse(adamw(model.parameters()), fold=False)
    backward(model, 0)
    grads = [p.grad for p in model.parameters()]
    memory = [raw(g.data_ptr(), g.numel()) for g in grads]
    addresses = [g.data_ptr() for g in grads]
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    for address, before, g in zip(addresses, memory, grads, strict=True):
        assert raw(address, g.numel()) != before, "clipping left the gradient to the update"
    same(script_of(), fold=False)


def test_a_clipped_gradient_is_freed_by_zero_grad():
    model, optimizer = model_to_clip()
    for _ in range(3):
        optfuse.clip_grad_norm_(optimizer, TIGHT)
        optimizer.step()
        grads = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
        optfuse.clip_grad_norm_(optimizer, TIGHT / 2)
        optimizer.step()
        loss_of(model, 1)  # launches
        optimizer.zero_grad()
        left = sum(not g.expired() for g in grads)
        assert left == 0, f"{left} of {len(grads)} gradients are still there"
        loss_of(model, 1).backward()


def test_one_scaling_a_gradient_and_no_more():
    """What is left of gradients that are gone is swept; memory stays."""
    model, optimizer = model_to_clip()
    sizes = []
    for i in range(300):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optfuse.clip_grad_norm_(optimizer, TIGHT)
        optimizer.step()
        if i % 100 == 99:
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert sizes[-1] - sizes[0] < 100, f"resident pages grow: {sizes}"


# Who looks when


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


# Which parameters


def test_a_subset_and_parameters_that_are_not_fused():
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model[:1].parameters()))
        plain = sgd(model[2:].parameters())
        for i in range(STEPS):
            model.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, [model[0].bias, *model[2:].parameters()])
            yield "gradients of some", gradients(model[2:])
            optimizer.step()
            plain.step()
            yield from everything(model, optimizer)

    same(script)


def test_only_parameters_that_are_not_fused():
    model = net()
    loss_of(model, 0).backward()
    twin = twin_of(model)
    ours = optfuse.clip_grad_norm_(model.parameters(), TIGHT)
    assert_same_tensor("norm", ours, nn.utils.clip_grad_norm_(twin.parameters(), TIGHT))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_tensor("gradient", p.grad, q.grad)
    assert optfuse.clip_grad_norm_([], 1.0) == 0


def test_one_tensor_a_generator_and_repeated_parameters():
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i)
            yield "one", clip(wrap, model[0].weight)
            yield "generator", clip(wrap, (p for p in model.parameters()))
            yield "twice", clip(wrap, [model[0].bias, model[0].bias], TIGHT / 9)
            optimizer.step()
            yield from everything(model, optimizer)

    same(script)


def test_two_optimizers_on_one_parameter():
    def script(wrap):
        model = long_net()
        optimizers = [wrap(adamw(model.parameters())), wrap(sgd(model.parameters()))]
        for i in range(STEPS):
            model.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, model.parameters())
            for optimizer in optimizers:
                optimizer.step()
            yield from everything(model, optimizers[0])

    same(script)


def test_mixed_dtypes():
    def script(wrap):
        params = [nn.Parameter(torch.linspace(-1, 1, 40).to(dtype)) for dtype in DTYPES]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = (p.detach() * (3 + i)).clone()
            yield "norm", clip(wrap, params)
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]

    same(script)


def odd_gradients():
    base = torch.linspace(-2, 3, 12 * 11).view(12, 11)
    yield "transposed", base.t().contiguous().t()
    yield "with holes", torch.linspace(0, 1, 24 * 11).view(24, 11)[::2]
    yield "a part of another", torch.linspace(0, 1, 24 * 11).view(24, 11)[3:15]
    yield "negated", torch._neg_view(base.clone())
    yield "from numpy", torch.from_numpy(base.cpu().numpy().copy()).to(base.device)
    yield "empty", torch.empty(0)
    yield "with infinity", base.masked_fill(base > 2.9, math.inf)
    yield "with NaN", base.masked_fill(base > 2.9, math.nan)
    yield "zero", torch.zeros(12, 11)
    yield "denormal", base * 1e-40
    yield "huge", base * 1e30


@pytest.mark.parametrize("name", [name for name, _ in odd_gradients()])
def test_odd_gradients(name):
    def script(wrap):
        grad = dict(odd_gradients())[name]
        params = [nn.Parameter(torch.ones(grad.shape)), nn.Parameter(torch.ones(3))]
        optimizer = wrap(adamw(params))
        for _ in range(2):
            params[0].grad = dict(odd_gradients())[name]
            params[1].grad = torch.arange(3.0)
            # Stock's foreach functions don't take lazily negated tensors, and its
            # fused kernel reads memory in order, whatever the strides.
            yield "norm", clip(wrap, params, foreach=False)
            if not wrap.fused:
                params[0].grad = params[0].grad.contiguous().resolve_neg()
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]

    same(script)


def test_gradients_that_share_memory():
    """Views of one buffer, as in data-parallel training; and one tensor twice."""

    def script(wrap):
        params = [nn.Parameter(torch.ones(40)) for _ in range(4)]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            buffer = torch.linspace(-1, 1 + i, 80)
            params[0].grad, params[1].grad = buffer[:40], buffer[40:]
            params[2].grad = params[3].grad = torch.linspace(0, 1, 40)
            yield "norm", clip(wrap, params)
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]
            yield "buffer", buffer

    same(script, prove=False)


def test_parameters_with_shared_memory():
    def script(wrap):
        flat = torch.linspace(-1, 1, 80)
        params = [nn.Parameter(flat[:40]), nn.Parameter(flat[40:]), nn.Parameter(torch.ones(9))]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = torch.full(p.shape, 1.0 + i)
            yield "norm", clip(wrap, params)
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]

    same(script)


def test_a_gradient_of_a_create_graph_backward():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        with torch.warnings.catch_warnings():
            torch.warnings.simplefilter("ignore")
            loss_of(model, 0).backward(create_graph=True)
        yield "norm", clip(wrap, model.parameters())
        yield "gradients", gradients(model)
        optimizer.step()
        yield from everything(model, optimizer)

    same(script)


# Errors


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_nonfinite_norms_raise_if_asked(value):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            model[0].bias.grad[0] = value
            try:
                clip(wrap, model.parameters(), error_if_nonfinite=True)
            except RuntimeError as error:
                yield "error", str(error)
            yield "gradients", gradients(model)
            optimizer.step()
            yield from everything(model, optimizer)

    same(script)


def test_backward_mode_is_refused():
    model, optimizer = fused_backward()
    with optfuse.accumulate(optimizer):
        loss_of(model, 0).backward()
    before = gradients(model)
    refused(lambda: optfuse.clip_grad_norm_(optimizer, TIGHT), "parameter 0 of group 0")
    refused(lambda: optfuse.clip_grad_norm_(model.parameters(), TIGHT), "backward mode")
    for was, now in zip(before, gradients(model), strict=True):
        assert_same_tensor("gradient", now, was)


# max_grad_norm


@pytest.mark.parametrize("make", (adamw, sgd))
def test_max_grad_norm_is_clip_and_step(make):
    def script(wrap):
        model = long_net()
        optimizer = make(model.parameters())
        optimizer = wrap(optimizer, max_grad_norm=TIGHT)
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i)
            if not wrap.fused:
                nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
            optimizer.step()
            wrap.pending()
            if i % 2:
                yield "gradients", gradients(model)
            yield from everything(model, optimizer)

    same(script)


def test_max_grad_norm_with_a_closure_and_in_a_copy():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()), max_grad_norm=TIGHT)
        model, optimizer = copy.deepcopy((model, optimizer))
        for i in range(STEPS):

            def closure(i=i):
                optimizer.zero_grad()
                loss = loss_of(model, i)
                loss.backward()
                if not wrap.fused:
                    nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
                return loss

            yield "loss", optimizer.step(closure)
            yield from everything(model, optimizer)

    same(script, prove=False)


def test_max_grad_norm_is_refused_in_backward_mode():
    refused(
        lambda: optfuse.fuse(adamw(net().parameters()), mode="backward", max_grad_norm=1.0),
        "max_grad_norm",
    )


# The end of an optimizer that has clipped


@pytest.mark.parametrize("end", ("unfuse", "delete", "step and delete"))
def test_gradients_stay_clipped_when_the_optimizer_goes(end):
    model, optimizer = model_to_clip()
    stock = twin_of(model)
    nn.utils.clip_grad_norm_(stock.parameters(), TIGHT)
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    if end == "unfuse":
        optfuse.unfuse(optimizer)
    elif end == "step and delete":
        optimizer.step()
    del optimizer
    gc.collect()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert_same_tensor("gradient", snapshot(p.grad), q.grad)
