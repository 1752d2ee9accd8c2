# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic rounding: the integers, and the optimizers that round with them. Each one's step() is
the formula with optfuse.random_bits() put in; fused in both modes it has the bits of its step()."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from common import assert_same
from torch import nn

import optfuse
from optfuse._rounding import rounded
from optfuse.optim import ROUNDING, AdamW, Lion, RoundedLion

MODES = ("forward", "backward")
NARROW = (torch.bfloat16, torch.float16)
SIZES = ((3,), (7, 5), (65, 33), (), (129, 300))
ROUND = {"stochastic_rounding": True}
ALL = {**ROUND, "stochastic_state": True}
OPTIONS = (ROUND, {**ALL, "seed": 2**53 - 1}, {}, {**ROUND, "maximize": True, "weight_decay": 0.0})
CASES = list(itertools.product(ROUNDING, OPTIONS))
each_class = pytest.mark.parametrize("cls", ROUNDING, ids=lambda cls: cls.__name__)
each_narrow = pytest.mark.parametrize("dtype", NARROW)
both_modes = pytest.mark.parametrize("mode", MODES)
KEY = {"seed": 5, "step": 10, "parameter": 2, "stream": 0}


def bits(n, dtype=torch.bfloat16, **named):
    return optfuse.random_bits(**{**KEY, **named}, shape=(n,), dtype=dtype)


def made(cls, dtype=torch.bfloat16, sizes=SIZES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]
    return params, cls(params, **{"lr": 0.01, **options})


def set_gradient(param, i, step, special=False):
    generator = torch.Generator().manual_seed(1000 * step + i)
    param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    if special and param.numel() > 9:
        some = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-7, -1e-30, 3e4, 1.0])
        param.grad.view(-1)[:9] = some.to(param.dtype)


def train(optimizer, steps, begin=1, special=False, order=1, clip=False):
    """By gradients of step and parameter. order: in which they are complete, 1 or -1."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(begin, begin + steps):
        gradients = []
        for i, p in enumerate(params):
            set_gradient(p, i, step, special)
            gradients.append(p.grad)
        optimizer.zero_grad()
        for p, g in list(zip(params, gradients, strict=True))[::order]:
            p.backward(g) if p.dim() else (p * g).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()


def results(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p.detach().clone(), dict(optimizer.state[p])) for p in params]


# The integers


def test_integers_are_those_of_philox():
    """By integers of Python, from the layout in docs/numerics.md."""

    def philox(counter, key):
        for _ in range(10):
            a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            counter = (b >> 32 ^ counter[1] ^ key[0], b & M, a >> 32 ^ counter[3] ^ key[1], a & M)
            key = (key[0] + 0x9E3779B9 & M, key[1] + 0xBB67AE85 & M)
        return counter

    M = 2**32 - 1
    assert philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    seed, step, parameter, stream, first = 2**53 - 12345, 2**31 + 7, 12345, 3, 2**36 - 200
    found = {dtype: optfuse.random_bits(seed, step, parameter, stream, (20, 20), dtype, first=first)
             for dtype in NARROW}  # fmt: skip
    for r in range(400):
        for dtype, halves in zip(NARROW, (2, 1), strict=True):
            chunk, place = divmod(first + r, 64 * halves)
            block = chunk * 16 + place % 16
            counter = (block & M, block >> 32, step, parameter | stream << 24)
            word = philox(counter, (seed & M, seed >> 32))[place // 16 // halves]
            wanted = word if halves == 1 else word >> place // 16 % 2 * 16 & 0xFFFF
            assert found[dtype].view(-1)[r].item() & M == wanted


def test_rounding_has_no_bias():
    """The mean of (rounded - exact) / spacing within 3 sigma, of 2^24 numbers."""
    n = 1 << 24
    for fraction in (1, 1 << 8, 1 << 14, 1 << 15, 3 << 14, 65535):
        ups = (bits(n, seed=fraction) + fraction >> 16).double().mean().item()
        f = fraction / 65536
        assert abs(ups - f) < 3 * math.sqrt(f * (1 - f) / n), fraction
    wide = torch.randn(n, generator=torch.Generator().manual_seed(3))
    for dtype, lost in ((torch.bfloat16, 16), (torch.float16, 13)):
        if dtype is torch.float16:
            wide = torch.where(wide.abs() < 2**-14, torch.ones_like(wide), wide)
        low = wide.view(torch.int32) & -(1 << lost)
        high = (low + (1 << lost)).view(torch.float32).double()
        low = low.view(torch.float32).double()
        f = (wide.double() - low) / (high - low)
        error = rounded(wide, dtype, bits(n, dtype, seed=77)).double() - wide.double()
        z = (error / (high - low)).sum().item() / math.sqrt((f * (1 - f)).sum().item())
        assert abs(z) < 3, dtype


def test_small_float16_numbers_have_no_bias():
    n = 1 << 22
    for units in (0.25, 2.0**-6, 5.75, 1023.5):
        wide = torch.full((n,), -units * 2.0**-24)
        found = rounded(wide, torch.float16, bits(n, torch.float16)).double() / 2.0**-24
        f = units % 1
        sigma = math.sqrt(f * (1 - f) / n)
        assert abs(found.mean().item() + units) < 3 * sigma
        assert set(found.unique().tolist()) == {-math.floor(units) - 1.0, -math.floor(units) - 0.0}


def test_integers_are_independent():
    """Chi square of both bytes, correlations with neighbours and with integers of other keys, all
    within 4 sigma."""
    n = 1 << 22
    drawn, sigmas = bits(n), {}
    for name, byte in (("low", drawn & 255), ("high", drawn >> 8)):
        counts = torch.bincount(byte.long(), minlength=256).double()
        sigmas[name] = (((counts - n / 256) ** 2 / (n / 256)).sum().item() - 255) / math.sqrt(510)
    u = drawn.double() / 65536 - 0.5
    others = {f"{lag} on": u.roll(lag) for lag in (1, 16, 64, 128)}
    for key, value in KEY.items():
        others[key] = bits(n, **{key: value + 1}).double() / 65536 - 0.5
    for name, other in others.items():
        sigmas[name] = (u * other).sum().item() / (math.sqrt(n) / 12)
    assert max(map(abs, sigmas.values())) < 4, sigmas


# The optimizers, as they are


def adamw(p, m, v, g, t, lr, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.01):
    """In float32, by numbers that are rounded one by one."""
    f = torch.tensor
    m = m * f(beta1) + g * f(1 - beta1)
    v = v * f(beta2) + g * g * f(1 - beta2)
    root = v.double().sqrt().float() * f(1 / math.sqrt(1 - beta2**t)) + f(eps)
    return p * f(1 - lr * decay) + m / root * f(-lr / (1 - beta1**t)), m, v


def cut(wide, dtype, integers):
    """One number after the other, by fractions of Python."""
    spacing = {torch.bfloat16: (8, -133, 16), torch.float16: (11, -24, 32)}[dtype]
    digits, least, drawn = spacing
    for x, r in zip(wide.view(-1).tolist(), integers.view(-1).tolist(), strict=True):
        unit = 2.0 ** max(math.frexp(x)[1] - digits, least)
        below = math.floor(abs(x) / unit)
        lost = abs(x) / unit - below
        if dtype is torch.float16 and abs(x) >= 2**-14:
            r, drawn = (r & 0xFFFFFFFF) >> 19, 13
        up = lost * 2**drawn + (r & 0xFFFFFFFF) >= 2**drawn
        yield math.copysign((below + up) * unit, x)
        drawn = spacing[2]


@each_narrow
@pytest.mark.parametrize("options", (ROUND, ALL))
def test_a_step_is_the_formula_with_the_integers_put_in(options, dtype):
    (p,), optimizer = made(AdamW, dtype, sizes=((300,),), seed=9, **options)
    optimizer.param_groups[0]["params"].insert(0, nn.Parameter(torch.ones(1)))  # ours is number 1
    m, v = torch.zeros(300), torch.zeros(300)
    for t in range(1, 6):
        set_gradient(p, 0, t)
        wide = adamw(p.detach().float(), m, v, p.grad.float(), t, lr=0.01)
        optimizer.step()
        found = [p.detach(), *(optimizer.state[p][name] for name in AdamW.STATE)]
        for stream, (exact, now) in enumerate(zip(wide, found, strict=True)):
            if stream and options is ROUND:
                assert torch.equal(now, exact)
                continue
            integers = optfuse.random_bits(9, t, 1, stream, (300,), dtype)
            assert now.tolist() == list(cut(exact, dtype, integers))
        m, v = found[1].float(), found[2].float()


@each_class
def test_float32_and_float64_are_not_rounded(cls):
    for dtype in (torch.float32, torch.float64):
        (_, plain), (_, rounding) = made(cls, dtype), made(cls, dtype, **ALL)
        train(plain, 3)
        train(rounding, 3)
        assert_same("results", results(rounding), results(plain))
        assert results(plain)[1][1]["exp_avg"].dtype is dtype


@each_narrow
def test_nan_infinities_and_signs_of_zeros_stay(dtype):
    payloads = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF - 2**32], dtype=torch.int32)
    kept = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1.0, -0.5, 2**-14])
    for integer in (0, 1, 0xFFFF, -1 if dtype is torch.float16 else 0x8000):

        def with_it(x, integer=integer):
            return rounded(x, dtype, torch.full(x.shape, integer, dtype=torch.int32))

        assert with_it(payloads.view(torch.float32)).isnan().all()
        assert_same("numbers", with_it(kept), kept.to(dtype))


def test_a_weight_moves_where_rounding_to_nearest_leaves_it():
    """p = 1, rate 1e-4, 1,000 steps in one direction; the spacing below 1 is 2^-8."""
    means = {}
    for options in ({}, ROUND):
        p = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
        optimizer = optfuse.fuse(AdamW([p], lr=1e-4, weight_decay=0.0, **options))
        for _ in range(1000):
            p.grad = torch.ones_like(p)
            optimizer.step()
        means[bool(options)] = p.detach().float().mean().item()
    assert means[False] == 1.0
    assert means[True] == pytest.approx(0.9, abs=0.001)


def test_lion_rounds_where_it_is_told_to():
    (p, *_), optimizer = made(Lion, **ALL)
    assert type(optimizer) is RoundedLion and type(made(Lion)[1]) is Lion
    assert "seed" not in made(Lion)[1].defaults
    set_gradient(p, 0, 1)
    exact = p.detach().float() - 0.01 * p.grad.sign().float()
    optimizer.step()
    integers = optfuse.random_bits(0, 1, 0, 0, p.shape, p.dtype)
    assert p.tolist() == list(cut(exact, p.dtype, integers))


@each_class
def test_options_that_do_not_fit_are_refused(cls):
    for wrong in ({"stochastic_state": True}, {"seed": -1}, {"seed": 2**53}, {"seed": 0.5}):
        with pytest.raises(ValueError, match="Invalid"):
            made(cls, **wrong)


# Fused


@both_modes
@pytest.mark.parametrize("dtype", (*NARROW, torch.float32))
@pytest.mark.parametrize("cls, options", CASES)
def test_fused_has_the_bits_of_step(cls, options, dtype, mode):
    (_, stock), (_, ours) = made(cls, dtype, **options), made(cls, dtype, **options)
    fused = optfuse.fuse(ours, mode=mode)
    for special in (False, True):
        train(stock, 10, 1 + 10 * special, special)
        train(fused, 10, 1 + 10 * special, special)
    assert not optfuse.summary(fused).own_step_because
    assert_same("results", results(fused), results(stock))


@each_class
def test_mixed_dtypes_groups_and_clipping(cls):
    def several():
        narrow, _ = made(cls)
        half, _ = made(cls, torch.float16)
        wide, _ = made(cls, torch.float32)
        groups = [{"params": narrow}, {"params": half, **ALL}, {"params": wide}]
        return cls([*groups, {"params": made(cls)[0], "stochastic_rounding": False}], **ROUND)

    stock, fused = several(), optfuse.fuse(several())
    for optimizer in (stock, fused):
        train(optimizer, 6, clip=True)
        optimizer.param_groups[0].update(ALL, seed=8)  # the state stays float32
        train(optimizer, 6, 7)
    assert_same("results", results(fused), results(stock))


@both_modes
@pytest.mark.parametrize("threads", (1, 2, 3, 7))
def test_threads_and_the_order_of_gradients_change_no_bit(threads, mode):
    _, stock = made(AdamW, **ALL)
    train(stock, 5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for order in (1, -1):
            fused = optfuse.fuse(made(AdamW, **ALL)[1], mode=mode)
            train(fused, 5, order=order)
            assert_same("results", results(fused), results(stock))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ("c", "baseline", "avx2"))
def test_instruction_sets_change_no_bit(isa, monkeypatch):
    _, stock = made(AdamW, **ALL)
    train(stock, 3)
    monkeypatch.setenv("OPTFUSE_ISA", isa)
    fused = optfuse.fuse(made(AdamW, **ALL)[1])
    train(fused, 3)
    assert optfuse.summary(fused).isa["bfloat16"] == isa
    assert_same("results", results(fused), results(stock))


@both_modes
@pytest.mark.parametrize("options", (ROUND, ALL))
def test_a_resumed_run_goes_on_bit_by_bit(options, mode, tmp_path):
    _, whole = made(AdamW, **options)
    train(whole, 8)
    params, first = made(AdamW, **options)
    train(optfuse.fuse(first, mode=mode), 5)
    torch.save((params, first.state_dict()), tmp_path / "saved")
    params, saved = torch.load(tmp_path / "saved", weights_only=False)
    resumed = AdamW(params, **ROUND)  # its options come with the state
    if mode == "forward":
        resumed = optfuse.fuse(resumed, mode=mode)
    resumed.load_state_dict(saved)
    if mode == "backward":
        resumed = optfuse.fuse(resumed, mode=mode)
    train(resumed, 3, 6)
    assert_same("results", results(resumed), results(whole))


@each_class
def test_load_state_dict_takes_what_hooks_have_made_of_it(cls):
    (p, *_), optimizer = made(cls, **ROUND)
    train(optimizer, 2)
    saved = optimizer.state_dict()
    other = made(cls, **ROUND)[1]

    def doubled(_, given):
        given = copy.deepcopy(given)
        given["state"][1]["exp_avg"] *= 2
        return given

    other.register_load_state_dict_pre_hook(doubled)
    other.load_state_dict(saved)
    state = other.state[other.param_groups[0]["params"][1]]
    assert_same("state", state["exp_avg"], saved["state"][1]["exp_avg"] * 2)
    assert state["exp_avg"].dtype is torch.float32
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


@each_class
def test_copies_and_pickles_go_on_alike(cls):
    _, optimizer = made(cls, **ALL)
    train(optimizer, 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for other in (optimizer, *copies):
        train(optfuse.fuse(other), 2, 3)
        assert_same("results", results(other), results(optimizer))


@both_modes
def test_memory_decides_the_order_of_elements(mode):
    """A parameter in channels_last has the integers in that order, in step() and fused."""

    def conv():
        torch.manual_seed(0)
        weight = torch.randn(8, 6, 5, 5).bfloat16().contiguous(memory_format=torch.channels_last)
        return AdamW([nn.Parameter(weight)], lr=0.01, **ALL)

    stock, fused = conv(), optfuse.fuse(conv(), mode=mode)
    train(stock, 4)
    train(fused, 4)
    assert_same("results", results(fused), results(stock))
    assert not optfuse.summary(fused).own_step_because


def test_state_with_other_strides_is_refused():
    weight = nn.Parameter(torch.randn(8, 6, 5, 5).bfloat16())
    optimizer = AdamW([weight], **ROUND)
    set_gradient(weight, 0, 1)
    optimizer.step()
    state = optimizer.state[weight]
    state["exp_avg"] = state["exp_avg"].contiguous(memory_format=torch.channels_last)
    optfuse.fuse(optimizer)
    with pytest.raises(optfuse.Error, match="its state has holes or other strides"):
        optimizer.step()


@both_modes
def test_what_has_no_kernels_runs_its_own_lines(mode):
    """And draws there."""

    def several():
        narrow, wide = made(AdamW)[0], made(AdamW, torch.float64)[0]
        return AdamW([*narrow, *wide], lr=0.01, **ALL)

    stock, fused = several(), optfuse.fuse(several(), mode=mode)
    train(stock, 5)
    train(fused, 5)
    assert_same("results", results(fused), results(stock))
    assert "recorded" in str(optfuse.explain(fused))
