# SPDX-License-Identifier: BSD-3-Clause
"""On the fake GPU torch.optim with fused=True and optfuse's CUDA kernels are two
implementations: the plain C rows, and the kernels' own source behind the C ABI.
They give the same bits, and each tells what it reads and writes."""

import gpu
import kernels
import pytest
import torch
from common import assert_same, snapshot
from gpu import NAME

SIZES = (1, 3, 4, 64, 1003, 9000)
ADAM = (
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"amsgrad": True, "betas": (0.5, 0.9), "eps": 1e-3},
)
SGD = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
)


def parameters(dtype):
    torch.manual_seed(0)
    return [torch.randn(n, dtype=dtype).to(NAME).requires_grad_() for n in SIZES]


def put_gradients(params, seed):
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, dtype=p.dtype).to(NAME)


def adam_hyper(group, decoupled):
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize")
    values = {**group, "beta1": group["betas"][0], "beta2": group["betas"][1]}
    return [float(values[name]) for name in names] + [float(decoupled)]


def sgd_hyper(group):
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return [float(group[name]) for name in names]


def adam_by_hand(params, state, group, decoupled, **scalars):
    steps = [s["step"] for s in state]
    kernels.advance(steps, gpu.current())
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    tensors = [
        (p, p.grad, [s.get(name) for name in names], s["step"])
        for p, s in zip(params, state, strict=True)
    ]
    kernels.launch("adam", adam_hyper(group, decoupled), tensors, gpu.current(), **scalars)
    if (flag := scalars.get("found_inf")) is not None:
        kernels.advance(steps, gpu.current(), flag)


def sgd_by_hand(params, state, group, step):
    tensors = [
        (p, p.grad, [s.get("momentum_buffer"), None, None], step)
        for p, s in zip(params, state, strict=True)
    ]
    kernels.launch("sgd", sgd_hyper(group), tensors, gpu.current())


def state_of(optimizer, params):
    return [optimizer.state[p] for p in params]


def twins(make, dtype):
    """Two optimizers of equal parameters and states, after one step of stock."""
    ours, stock = parameters(dtype), parameters(dtype)
    optimizers = make(ours), make(stock)
    for params, optimizer in zip((ours, stock), optimizers, strict=True):
        put_gradients(params, 1)
        optimizer.step()
    return ours, stock, *optimizers


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
@pytest.mark.parametrize("options", ADAM, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_has_the_bits_of_stock(kind, options, dtype):
    def make(params):
        return kind(params, lr=1e-2, fused=True, **options)

    ours, stock, mine, theirs = twins(make, dtype)
    for seed in range(2, 5):
        put_gradients(ours, seed)
        put_gradients(stock, seed)
        theirs.step()
        decoupled = kind is torch.optim.AdamW
        adam_by_hand(ours, state_of(mine, ours), mine.param_groups[0], decoupled)
    assert_same("parameters", snapshot(ours), stock)
    assert_same("state", state_of(mine, ours), state_of(theirs, stock))


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_has_the_bits_of_stock(options, dtype):
    def make(params):
        return torch.optim.SGD(params, lr=1e-2, fused=True, **options)

    ours, stock, mine, theirs = twins(make, dtype)
    for seed in range(2, 5):
        put_gradients(ours, seed)
        put_gradients(stock, seed)
        theirs.step()
        sgd_by_hand(ours, state_of(mine, ours), mine.param_groups[0], seed)
    assert_same("parameters", snapshot(ours), stock)
    assert_same("state", state_of(mine, ours), state_of(theirs, stock))


@pytest.mark.parametrize("inf", [0.0, 0.5, 1.0, 2.0])
def test_scalars_on_the_device_have_the_bits_of_stock(inf):
    def make(params):
        lr = torch.tensor(1e-2, device=NAME)
        return torch.optim.AdamW(params, lr=lr, fused=True)

    ours, stock, mine, theirs = twins(make, torch.float32)
    scale, found = torch.tensor(64.0, device=NAME), torch.tensor(inf, device=NAME)
    theirs.grad_scale, theirs.found_inf = scale, found
    theirs.step()
    group = {**mine.param_groups[0], "lr": 0.0}
    lr = mine.param_groups[0]["lr"]
    adam_by_hand(ours, state_of(mine, ours), group, True, lr=lr, grad_scale=scale, found_inf=found)
    assert_same("parameters", snapshot(ours), stock)
    assert_same("gradients", [p.grad for p in ours], [p.grad for p in stock])
    assert_same("state", state_of(mine, ours), state_of(theirs, stock))


# Memory that they touch


def two_steps(step):
    """One on each of two streams."""
    for stream in (gpu.stream(), gpu.stream()):
        with stream:
            step()


def expect_race(*words):
    found = gpu.races()
    assert found, "a race was expected"
    for word in words:
        assert any(word in text for text in found), f"{word!r} is in none of {found}"
    gpu.clear()


def test_stock_on_two_streams_is_seen():
    params = parameters(torch.float32)
    put_gradients(params, 1)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()
    gpu.synchronize()
    two_steps(optimizer.step)
    expect_race("aten::_fused_adamw_", "aten::_foreach_add_")  # which counts the steps


def test_our_kernels_on_two_streams_are_seen():
    params = parameters(torch.float32)
    put_gradients(params, 1)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()
    gpu.synchronize()
    state, group = state_of(optimizer, params), optimizer.param_groups[0]
    two_steps(lambda: adam_by_hand(params, state, group, True))
    expect_race("of_cuda_adam_float32_3_small", "of_cuda_advance_steps")


def test_memory_of_the_host_is_seen():
    p, grad = torch.ones(4, device=NAME), torch.ones(4)
    kernels.launch("sgd", [0.1, 0, 0, 0, 0, 0], [(p, grad, [None] * 3, 1.0)], gpu.current())
    expect_race("not the device's")


def test_free_memory_is_seen():
    p, grad = torch.ones(4, device=NAME), torch.ones(4, device=NAME)
    address = grad.data_ptr()

    class Gone:
        def data_ptr(self):
            return address

    del grad
    kernels.launch("sgd", [0.1, 0, 0, 0, 0, 0], [(p, Gone(), [None] * 3, 1.0)], gpu.current())
    expect_race("that is free")


def test_a_default_stream_is_that_of_the_current_device():
    """As on a real GPU: its handle does not say which device is meant."""
    other = torch.device(NAME, 1)
    p, grad = torch.ones(4, device=other), torch.ones(4, device=other)
    entry = p, grad, [None] * 3, 1.0
    with pytest.raises(RuntimeError, match="is another GPU's: make GPU 1 current"):
        kernels.launch("sgd", [0.1, 0, 0, 0, 0, 0], [entry], gpu.current(1))
    torch.accelerator.set_device_index(1)
    try:
        kernels.launch("sgd", [0.1, 0, 0, 0, 0, 0], [entry], gpu.current(1))
    finally:
        torch.accelerator.set_device_index(0)
