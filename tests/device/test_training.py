# SPDX-License-Identifier: BSD-3-Clause
"""Training on a GPU that the CPU plays: the bits of torch.optim with fused=True,
which this device computes by the plain C rows of that reference."""

import functools

import gpu
import pytest
import torch
from common import adamw, everything, refused, sgd
from gpu import NAME
from legal import in_order, legal, loss_of, net, settle, to_host, train, training
from test_fake_device import conv_net, images, transformer, words
from torch import nn

import optfuse

MODES = ("forward", "backward")
STEPS = 4
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam, decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "adamw": adamw,
    "adamw, maximize": lambda p: adamw(p, maximize=True),
    "sgd": sgd,
    "sgd, plain": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "sgd, nesterov": lambda p: sgd(p, nesterov=True, weight_decay=0.1),
}


def loop(make, dtype=torch.float32, steps=STEPS):
    def script(wrap):
        model = net().to(dtype)
        optimizer = wrap(make(model.parameters()))
        for i in range(steps):
            optimizer.zero_grad()
            x = torch.full((5, 6), 0.1 * (i + 1), dtype=dtype, device=NAME)
            model(x).square().sum().backward()
            optimizer.step()
            if i != 1:  # once, the next step finds updates that nobody has used
                yield "weights", list(model.parameters())
        yield "state", optimizer.state_dict()["state"]

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer(make, mode):
    legal(loop(make), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype, mode):
    legal(loop(adamw, dtype), mode)
    legal(loop(sgd, dtype), mode)


@pytest.mark.parametrize("reader, owner", [(0, 2), (2, 0)])
@pytest.mark.parametrize("make", [sgd, torch.optim.Rprop])
def test_a_gradient_that_is_another_parameter_is_refused(make, reader, owner):
    """PyTorch's kernels for many tensors read it before or after the other update."""
    params = [torch.nn.Parameter(torch.full((6, 6), i + 1.0, device=NAME)) for i in range(3)]
    optimizer = optfuse.fuse(make(params))
    for borrows in (False, True):
        for p in params:
            p.grad = torch.ones_like(p)
        if borrows:
            params[reader].grad = params[owner].detach()
            before = [p.detach().clone() for p in params]
            refused(optimizer.step, "shares memory with another parameter", way_out="clone()")
            assert all(map(torch.equal, before, params))
            params[reader].grad = params[owner].detach().clone()
        optimizer.step()
    assert not any(map(torch.equal, before, params))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_an_option_that_becomes_a_tensor_on_the_device(make, mode):
    def between(model, optimizer, i):
        optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.5 + i, device=NAME)

    legal(training(make, between=between), mode)


@in_order(*MODES)
def test_parameters_of_the_host_and_of_the_device(wrap):
    here, there = net("cpu"), net()
    optimizer = wrap(adamw([*here.parameters(), *there.parameters()]))
    for i in range(STEPS):
        optimizer.zero_grad()
        (loss_of(here, i).to(NAME) + loss_of(there, i)).backward()
        optimizer.step()
    yield "here", list(here.parameters())
    yield "there", list(there.parameters())


def test_step_counters_of_the_host():
    """Without fused=True stock keeps them there; the weights' bits are the same."""

    def weights(make, wrap):
        torch.manual_seed(0)
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
        settle()
        return to_host(list(model.parameters()))

    stock = weights(adamw, lambda optimizer: optimizer)
    ours = weights(lambda p: adamw(p, fused=None), optfuse.fuse)
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def recurrent():
    return torch.nn.LSTM(10, 5, 2)


def sequences():
    return torch.randn(4, 3, 10), torch.randn(4, 3, 5)


KINDS = {
    "convolutions": (conv_net, images),
    "transformer": (transformer, words),
    "recurrent": (recurrent, sequences),
}
adam = functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [adamw, sgd, adam], ids=["AdamW", "SGD", "Adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_models(kind, make, autocast, mode):
    build, inputs = KINDS[kind]
    if kind == "recurrent" or autocast:
        gpu.only_real()

    def script(wrap):
        model = build().to(NAME)
        optimizer = wrap(make(model.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = inputs()[0].to(NAME)
            with torch.autocast(NAME, torch.bfloat16, enabled=autocast):
                y = model(x)
                loss = (y[0] if isinstance(y, tuple) else y).float().square().mean()
            loss.backward()
            optimizer.step()
            yield "loss", loss
        yield from everything(model, optimizer)

    # cuDNN keeps a recurrent network's weights in one piece, so that they are shared.
    legal(script, mode, prove=kind != "recurrent")


@in_order("forward")
def test_a_scaled_loss(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**100, growth_interval=2)
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield "scale", scaler.get_scale()
        if i % 2:
            yield "weights", list(model.parameters())
    yield "state", optimizer.state_dict()["state"]


@in_order(*MODES)
def test_functional_calls_and_transforms(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    x = torch.ones(4, 6, device=NAME)

    def loss(weights):
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    for i in range(STEPS):
        train(model, optimizer, i)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        yield "gradients", torch.func.grad(loss)(weights)
        yield "loss", loss(dict(model.named_parameters()))


# The cost


@pytest.mark.parametrize("mode", MODES)
def test_a_small_model_is_updated_by_one_launch(mode):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    train(model, optimizer, 0)
    optfuse.flush(optimizer)

    def work():
        train(model, optimizer, 1)
        with torch.no_grad():
            loss_of(model, 2)

    names = gpu.kernels(work)
    assert names == ["of_cuda_adam_float32_3_small", "of_cuda_advance_steps"], names


# GPT-2's parameters, with a 64th of their elements, in the order of the model.
WIDTH = 768 // 8
LAYER_NORM = [WIDTH // 8] * 2
BLOCK = [
    *LAYER_NORM, WIDTH * 3 * WIDTH, 3 * WIDTH // 8, WIDTH * WIDTH, WIDTH // 8,
    *LAYER_NORM, WIDTH * 4 * WIDTH, 4 * WIDTH // 8, 4 * WIDTH * WIDTH, WIDTH // 8,
]  # fmt: skip
GPT2 = [50257 * WIDTH // 8, 1024 * WIDTH // 8, *12 * BLOCK, *LAYER_NORM]


#: Launches of updates by mode and MiB a bucket; step() has one table for up to 512 tensors.
UPDATES = [("backward", 4, 37), ("backward", 8, 37), ("backward", 16, 19), ("backward", 32, 10)]


@pytest.mark.parametrize(("mode", "bucket", "updates"), [*UPDATES, ("forward", 16, 1)])
def test_one_launch_counts_the_steps_of_gpt2(mode, bucket, updates):
    params = [torch.nn.Parameter(torch.ones(n, device=NAME)) for n in GPT2]
    optimizer = adamw(params, capturable=True)
    optfuse.fuse(optimizer, mode, bucket_bytes=(bucket << 20) // 64)

    def work():
        optimizer.zero_grad()
        torch.autograd.backward([p.neg() for p in params], [torch.ones_like(p) for p in params])
        optimizer.step()

    work()
    names = gpu.kernels(work)
    assert names[-1] == "of_cuda_advance_steps", names
    assert len(names) == updates + 1, names


@in_order("backward")
def test_counters_that_a_hook_reads_inside_backward(wrap):
    """As in stock they are those of the last step(); saving the optimizer has them counted."""
    model = net()
    optimizer = wrap(adamw(model.parameters()), bucket_bytes=1)
    first, last = [*model.parameters()][-1], next(model.parameters())
    seen = []
    train(model, optimizer, 0)
    last.register_hook(lambda _: seen.append(optimizer.state[first]["step"].clone()))
    for i in range(1, 4):
        train(model, optimizer, i)
        yield "in the hook", seen
        yield "after it", [optimizer.state[p]["step"].clone() for p in model.parameters()]


def test_a_counter_that_a_hook_takes_the_memory_from():
    """The end of the pass counts in memory that is nobody else's yet: else it would be a race."""
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), "backward", bucket_bytes=1)
    counter = optimizer.state[[*model.parameters()][-1]]
    train(model, optimizer, 0)

    def take(_):
        counter["step"].data = torch.ones((), device=NAME)

    next(model.parameters()).register_hook(take)
    train(model, optimizer, 1)
    assert counter["step"] == 1


def test_backward_mode_keeps_no_gradients():
    def in_use(wrap):
        torch.manual_seed(0)
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        gpu.synchronize()
        return gpu.bytes_in_use()

    stock = in_use(lambda optimizer: optimizer)
    ours = in_use(lambda optimizer: optfuse.fuse(optimizer, mode="backward"))
    gradients = 4 * sum(p.numel() for p in net("cpu").parameters())
    assert ours <= stock - gradients, f"{ours} bytes, stock {stock}, gradients {gradients}"


@pytest.mark.parametrize("make", [adamw, sgd], ids=["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masters_on_the_cpu_of_weights_on_a_gpu(dtype, make):
    """By hand: gradients go down and are widened, and a weight takes its new value when it is
    copied up, which launches that one's update."""

    def script(wrap):
        model = net().to(dtype)
        weights = list(model.parameters())
        masters = [nn.Parameter(w.detach().to("cpu", torch.float32, copy=True)) for w in weights]
        optimizer = wrap(make(masters))
        for i in range(STEPS):
            x = torch.full((5, 6), 0.1 * (i + 1), dtype=dtype, device=NAME)
            model(x).square().sum().backward()
            if i % 2:
                nn.utils.clip_grad_norm_(weights, 0.1)
            for m, w in zip(masters, weights, strict=True):
                m.grad = w.grad.to("cpu", torch.float32)
            optimizer.step()
            with torch.no_grad():
                for m, w in zip(masters, weights, strict=True):
                    w.copy_(m)
            model.zero_grad()
            yield "weights", weights
        yield "masters", masters
        yield "state", optimizer.state_dict()["state"]

    legal(script, "forward")
