# SPDX-License-Identifier: BSD-3-Clause
"""Equal means equal bits: bare tensors, recorded gradients, against fused=True.

Two optimizers, stock and ours, get the same gradients for 200 steps. Each
option of an optimizer is one parameter group, so that all run at once. In
forward mode the gradients are set by hand; in backward mode a real backward
delivers them.

Up to 2.13 stock's fused SGD never writes a whole vector of bfloat16 or float16 parameters
(pytorch issue 191763); its scalar code is the reference there. That is what it
uses for fewer elements than a vector has, so stock gets those in pieces.
"""

import functools
import itertools

import on_device
import pytest
import torch
from common import assert_same_tensor, python_ok

import optfuse
from optfuse._library import releases

SIZES = (1, 7, 8, 15, 16, 17, 31, 64, 1003)
SIZES += (8191, 8196) if on_device.DEVICE == "cuda" else ()  # chunks of a block
LARGE = 2_000_003 if on_device.DEVICE == "cuda" else 100_000  # there several chunks
STEPS = 200
LOOK_EVERY = 7  # in between, updates stay pending until the next step
PIECE = 15  # elements; less than any vector of 16-bit numbers that ATen uses
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BETA1 = (0.0, 0.3, 0.5, 0.9)
OFF_ON = (False, True)

SGD_OPTIONS = [
    {"momentum": m, "dampening": d, "nesterov": n, "maximize": x, "weight_decay": w, "lr": 0.03}
    for m, d, n in ((0, 0, False), (0.9, 0, False), (0.9, 0.3, False), (0.9, 0, True))
    for x, w in itertools.product(OFF_ON, (0, 0.1))
]
ADAM_OPTIONS = [
    {"betas": (b, 0.999), "amsgrad": a, "maximize": x, "weight_decay": w, "lr": 0.01}
    for b, a, x, w in itertools.product(BETA1, OFF_ON, OFF_ON, (0, 0.1))
]
OPTIONS = {
    "SGD": SGD_OPTIONS,
    "Adam": ADAM_OPTIONS,
    "AdamW": ADAM_OPTIONS,
    "Adam, decoupled": [{**o, "decoupled_weight_decay": True} for o in ADAM_OPTIONS[1::6]],
}


class Replay(torch.autograd.Function):
    """A forward whose backward hands out recorded gradients, times that of its result (a loss
    scale, or one)."""

    @staticmethod
    def forward(ctx, gradients, *parameters):
        ctx.gradients = gradients
        return torch.ones(())

    @staticmethod
    def backward(ctx, scale):
        return None, *(g * scale.to(g.dtype) for g in ctx.gradients)


def normal(sizes, dtype, seed, scale=1.0):
    """One tensor a size, over six decades, with exact zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(sizes), generator=generator, dtype=torch.float64, device="cpu")
    decades = torch.randint(-4, 2, flat.shape, generator=generator, device="cpu")
    flat *= scale * 10.0 ** decades.double()
    flat[::11] = 0.0
    flat[5::23] = -0.0
    return list(flat.to(torch.get_default_device(), dtype).split(sizes))


def on_a_gpu():
    return torch.get_default_device().type != "cpu"


@functools.cache
def broken(name, dtype):
    release = releases.release_of(torch.__version__)
    in_release = releases.holds("sgd", "bfloat16", release) and not on_a_gpu()
    return in_release and name == "SGD" and dtype in (torch.bfloat16, torch.float16)


def pieces_of(name, tensor):
    whole = tensor.numel() <= PIECE or not broken(name, tensor.dtype)
    return [tensor] if whole else tensor.split(PIECE)


def parameter(i, value):
    """A copy; every other one starts an element off the alignment."""
    room = torch.empty(value.numel() + i % 2, dtype=value.dtype)
    return torch.nn.Parameter(room[i % 2 :].copy_(value))


def optimizer_of(name, groups, options):
    groups = [
        {"params": [parameter(i, t) for i, t in enumerate(tensors)], **option}
        for tensors, option in zip(groups, options, strict=True)
    ]
    return getattr(torch.optim, name.split(",")[0])(groups, fused=True)


def unchanged(optimizer):
    return optimizer


def twins(name, sizes, dtype, options, mode, scale=1.0, change=unchanged):
    """The same parameters under a stock and under a fused optimizer. change: before it is fused."""
    starts = [normal(sizes, dtype, 1 + i, scale) for i in range(len(options))]
    pieces = [[piece for t in start for piece in pieces_of(name, t)] for start in starts]
    stock = change(optimizer_of(name, pieces, options))
    return stock, optfuse.fuse(change(optimizer_of(name, starts, options)), mode=mode)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def deliver(optimizer, gradients, mode):
    parameters = parameters_of(optimizer)
    if mode == "backward":
        optimizer.zero_grad()
        Replay.apply(gradients, *parameters).backward()
    else:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()


def joined(pieces):
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def assert_same_optimizers(what, name, ours, stock, options):
    theirs = iter(parameters_of(stock))
    for group, option in zip(ours.param_groups, options, strict=True):
        for p in group["params"]:
            pieces = [next(theirs) for _ in pieces_of(name, p)]
            place = f"{what}, {p.numel()} elements, {option}"
            assert_same_tensor(f"{place}, parameter", p, torch.nn.Parameter(joined(pieces)))
            states = [stock.state[piece] for piece in pieces]
            assert list(ours.state[p]) == list(states[0]), f"{place}: keys {list(ours.state[p])}"
            for key, value in states[0].items():
                if value is not None:
                    expected = joined([state[key] for state in states])
                    assert_same_tensor(f"{place}, {key}", ours.state[p][key], expected)


def replay(name, sizes, dtype, options, mode, gradients, steps=STEPS, scale=1.0, change=unchanged):
    """Trains both with gradients(step), and looks at all of both now and then. Returns ours."""
    stock, ours = twins(name, sizes, dtype, options, mode, scale, change)
    for step in range(steps):
        grads = gradients(step)
        deliver(ours, grads, mode)
        deliver(stock, [piece for g in grads for piece in pieces_of(name, g)], "forward")
        ours.step()
        stock.step()
        if step % LOOK_EVERY == 1 or step == steps - 1:
            what = f"{name} {dtype} {mode}, step {step + 1}"
            assert_same_optimizers(what, name, ours, stock, options)
    made = steps * len(parameters_of(ours))
    created = optfuse.summary(ours).created
    assert created == made, f"{created} updates were made, not {made}"
    return ours


def recorded(sizes, dtype, n_options, scale=1.0, spoil=None):
    """gradients(step), the same for every option, from a short recording."""
    tape = [normal(sizes, dtype, 1000 + i, scale) for i in range(16)]

    def gradients(step):
        grads = [g * (1 + step // 16) for g in tape[step % 16]]
        if spoil:
            spoil(step, grads)
        return grads * n_options

    return gradients


both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
all_optimizers = pytest.mark.parametrize("name", OPTIONS)


@all_optimizers
@all_dtypes
@both_modes
def test_every_option_gives_the_bits_of_fused(name, dtype, mode):
    options = OPTIONS[name]
    replay(name, SIZES, dtype, options, mode, recorded(SIZES, dtype, len(options)))


@pytest.mark.parametrize("name", ("SGD", "Adam", "AdamW"))
@all_dtypes
@both_modes
def test_many_elements_give_the_bits_of_fused(name, dtype, mode, several_threads):
    options = [OPTIONS[name][-1]]
    steps = 50 if broken(name, dtype) else STEPS  # stock gets thousands of pieces then
    replay(name, (LARGE,), dtype, options, mode, recorded((LARGE,), dtype, 1), steps)


def with_nan_and_inf(step, grads):
    """From step 3 on some elements of every tensor are not finite."""
    if step >= 3:
        for g in grads:
            for k, value in enumerate((float("nan"), float("inf"), float("-inf"))):
                g[(step + 5 * k) % 13 :: 13] = value if (step + k) % 4 == 0 else g[0].item()


@all_optimizers
@all_dtypes
@both_modes
def test_nan_and_infinite_gradients_give_the_bits_of_fused(name, dtype, mode):
    options = OPTIONS[name]
    spoiled = recorded(SIZES, dtype, len(options), spoil=with_nan_and_inf)
    replay(name, SIZES, dtype, options, mode, spoiled, steps=40)


@all_optimizers
@all_dtypes
@both_modes
def test_denormals_give_the_bits_of_fused(name, dtype, mode):
    scale = torch.finfo(dtype).tiny
    options = OPTIONS[name]
    tiny = recorded(SIZES, dtype, len(options), scale)
    first = torch.cat(tiny(0)).abs()
    assert ((first > 0) & (first < scale)).any(), "the gradients hold no denormal"
    replay(name, SIZES, dtype, options, mode, tiny, steps=40, scale=scale)


def selection():
    """A smaller selection, for another process with another CPU capability."""
    for name, dtype, mode in itertools.product(OPTIONS, DTYPES, ("forward", "backward")):
        options = OPTIONS[name][-3:]
        replay(name, SIZES, dtype, options, mode, recorded(SIZES, dtype, 3), steps=30)
    print(torch.backends.cpu.get_cpu_capability())


@pytest.mark.parametrize("capability", ("avx2", "default"))
def test_bits_follow_the_capability_that_aten_dispatches_to(capability):
    code = "import folders, test_bits; test_bits.selection()"
    out = python_ok(code, ATEN_CPU_CAPABILITY=capability)  # read at the first operator
    assert out.strip() == capability.upper(), f"the process ran with {out}"
