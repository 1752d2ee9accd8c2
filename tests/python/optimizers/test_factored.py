# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and CAME of optfuse.optim: step() is the papers' formula, rounds once, and takes the
state of the classes that others train with. On the CPU one operator makes an update, with the bits
of the class's own lines; fused in each mode it has the bits of step()."""

import copy
import math
import pickle
import re

import pytest
import torch
from common import assert_same, python_ok
from torch import nn

import optfuse
from optfuse._rounding import factored, rounded
from optfuse.optim import CAME, Adafactor

NARROW = (torch.bfloat16, torch.float16)
SIZES = ((3,), (), (1, 1), (7, 5), (65, 33), (5, 3, 4, 6), (40, 300))
ROUND = {"stochastic_rounding": True}
FIXED = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
OPTIONS = {
    Adafactor: (
        {},
        {"warmup_init": True, "beta1": 0.9, "weight_decay": 0.1},
        {**FIXED, "weight_decay": 0.1, "clip_threshold": 0.5},
        {**FIXED, "scale_parameter": True, "eps": (1e-20, 10.0), "weight_decay": 0.1},
    ),
    CAME: ({"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "clip_threshold": 0.3}),
}
CASES = [(cls, options) for cls in OPTIONS for options in OPTIONS[cls]]
each_case = pytest.mark.parametrize("cls, options", CASES)
each_class = pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
each_narrow = pytest.mark.parametrize("dtype", NARROW)


def params_of(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def made(cls, dtype=torch.float32, sizes=SIZES, **options):
    params = params_of(dtype, sizes)
    return params, cls(params, **(options or OPTIONS[cls][0]))


def gradient(param, i, step):
    generator = torch.Generator().manual_seed(1000 * step + i)
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer, steps, begin=1):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(begin, begin + steps):
        for i, p in enumerate(params):
            p.grad = gradient(p, i, step)
        optimizer.step()


def results(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p.detach().clone(), dict(optimizer.state[p])) for p in params]


# The formulas, of float64


def rms(x):
    return x.square().mean().sqrt().item()


def averages(kept, x, beta):
    """x over the root of its averaged squares' rank 1 approximation."""
    squares = x.square() + 1e-30
    if x.dim() < 2:
        kept[0] = beta * kept[0] + (1 - beta) * squares
        return kept[0].rsqrt()
    for i, dim in enumerate((-1, -2)):
        kept[i] = beta * kept[i] + (1 - beta) * squares.mean(dim, keepdim=True)
    return (kept[0] * kept[1] / kept[0].mean(-2, keepdim=True)).rsqrt()


def adafactor(p, gradients, beta1=None, weight_decay=0.0, clip_threshold=1.0, eps=(0, 1e-3), **how):
    kept, m = [0.0, 0.0], torch.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        rate = how.get("lr") or min(1e-6 * t if how.get("warmup_init") else 1e-2, t**-0.5)
        if how.get("scale_parameter", True):
            rate *= max(eps[1], rms(p))
        u = g * averages(kept, g, 1 - t**-0.8)
        u = rate * u / max(1, rms(u) / clip_threshold)
        m = u if beta1 is None else beta1 * m + (1 - beta1) * u
        p = p * (1 - weight_decay * rate) - m
    return p


def came(p, gradients, lr, weight_decay=0.0, clip_threshold=1.0):
    kept, confidence, m = [0.0, 0.0], [0.0, 0.0], torch.zeros_like(p)
    for g in gradients:
        u = g * averages(kept, g, 0.999)
        u = u / max(1, rms(u) / clip_threshold)
        m = 0.9 * m + 0.1 * u
        trust = averages(confidence, u - m, 0.9999) if p.dim() > 1 else 1
        p = p * (1 - weight_decay * lr) - lr * m * trust
    return p


@each_case
def test_step_is_the_papers_formula(cls, options):
    params, optimizer = made(cls, torch.float64, **options)
    start = [p.detach().clone() for p in params]
    train(optimizer, 5)
    for i, (p, first) in enumerate(zip(params, start, strict=True)):
        gradients = [gradient(p, i, t) for t in range(1, 6)]
        exact = {Adafactor: adafactor, CAME: came}[cls](first, gradients, **options)
        torch.testing.assert_close(p.detach(), exact)


@each_narrow
@each_case
def test_a_step_in_16_bits_is_that_in_float32_rounded_once(cls, options, dtype):
    """With the integers put in, and their number that of state_dict()."""
    for how in ({}, {**ROUND, "seed": 9}):
        params, optimizer = made(cls, dtype, **{**options, **how})
        wide = cls(copies := [nn.Parameter(p.detach().float()) for p in params], **options)
        for t in range(1, 4):
            for i, (p, other) in enumerate(zip(params, copies, strict=True)):
                p.grad = gradient(p, i, t)
                other.data, other.grad = p.detach().float(), p.grad.float()
            optimizer.step()
            wide.step()
            for i, (p, other) in enumerate(zip(params, copies, strict=True)):
                exact = other.detach()
                if how:
                    integers = optfuse.random_bits(9, t, i, 0, p.shape, dtype)
                    exact = rounded(exact, dtype, integers)
                assert_same("parameter", p.detach(), exact.to(dtype))
                assert_same("state", dict(optimizer.state[p]), dict(wide.state[other]))


@each_class
def test_state_has_the_names_of_the_classes_that_others_train_with(cls):
    (vector, matrix), optimizer = made(cls, torch.bfloat16, ((3,), (7, 5)))
    train(optimizer, 2)
    whole, factored = optimizer.state[vector], optimizer.state[matrix]
    names = {
        Adafactor: ["step", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"],
        CAME: [
            *("step", "exp_avg", "exp_avg_sq_row", "exp_avg_sq_col"),
            *("exp_avg_res_row", "exp_avg_res_col"),
        ],
    }
    assert list(factored) == names[cls]
    assert whole["exp_avg_sq"].shape == (3,) and factored["exp_avg_sq_row"].shape == (7,)
    assert whole["step"] == 2 and type(whole["step"]) is int
    assert factored["exp_avg_sq_col"].dtype is torch.float32


@each_class
def test_a_checkpoint_of_theirs_goes_on(cls):
    """Its groups have none of our options, and its state is float32."""
    params, optimizer = made(cls, torch.bfloat16)
    train(optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["stochastic_rounding"], group["seed"]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = cls(twins, **OPTIONS[cls][0])
    resumed.load_state_dict(saved)
    for other in (optimizer, resumed, pickle.loads(pickle.dumps(resumed))):
        train(other, 2, 4)
        assert_same("results", results(other), results(optimizer))


WRONG = [
    *((cls, wrong) for cls in OPTIONS for wrong in ({"weight_decay": -1.0}, {"seed": -1})),
    *((Adafactor, wrong) for wrong in ({"lr": 0.1}, {"relative_step": False}, {"beta1": 1.0})),
    (Adafactor, {**FIXED, "warmup_init": True}),
    *((CAME, wrong) for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0, 0.9)}, {"betas": (0.9, 0.9)})),
]


@pytest.mark.parametrize("cls, wrong", WRONG)
def test_options_that_do_not_fit_are_refused(cls, wrong):
    with pytest.raises(ValueError, match="Invalid|relative_step"):
        made(cls, **{**OPTIONS[cls][0], **wrong})


@each_class
def test_sparse_gradients_are_refused(cls):
    (p,), optimizer = made(cls, sizes=((2, 2),))
    p.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse"):
        optimizer.step()


# The operator


def by_operator(monkeypatch, does):
    """Whether it makes the updates that it can make."""
    for cls in (Adafactor, CAME):
        monkeypatch.setitem(factored._agree, cls, does)


def watched(monkeypatch):
    """The operator's updates."""
    ran, run = [], factored.Factored._by_operator

    def noted(*update):
        ran.append(update)
        run(*update)

    monkeypatch.setattr(factored.Factored, "_by_operator", noted)
    return ran


def updated(cls, options, shape, dtype, special=False):
    (p,), optimizer = made(cls, dtype, (shape,), **options)
    for t in (1, 2, 3):
        p.grad = gradient(p, 0, t) * 10.0 ** (2 * t - 4)
        if special:
            some = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-7, -1e-30, 3e4])
            p.grad.view(-1)[3 * t : 3 * t + 8] = some.to(dtype)
        optimizer.step()
    return results(optimizer)


# Rows of less than a vector, of vectors and a rest, of several sums; columns likewise; many
# matrices; and more elements than one thread sums.
SHAPES = (
    *((1,), (7,), (16,), (1003,), (40000,), (1, 1), (1, 9), (9, 1, 1), (7, 1), (3, 2), (5, 4)),
    *((70, 7), (1100, 6), (9, 8), (33, 31), (31, 36), (64, 32), (65, 33), (68, 100), (130, 63)),
    *((257, 300), (1030, 40), (5000, 12), (40, 1029), (13, 4097), (9, 9000), (4, 33000)),
    *((70000, 5), (64, 32, 3, 3), (40, 9, 7, 5), (3, 70, 60), (300, 17, 9), (2, 4099, 35)),
    *((2, 20, 5, 7, 9), (16400, 2)),
)
# And those whose sums PyTorch's threads share, or that it adds in other ways.
OTHER_SHAPES = ((1, 40000), (40000, 1), (0, 3), (3, 0))


@pytest.mark.parametrize("threads", (1, 2, 3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_class
def test_the_operator_has_the_bits_of_the_classs_lines(cls, shape, threads, monkeypatch):
    options, before = OPTIONS[cls][1], torch.get_num_threads()
    ran = watched(monkeypatch)
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, *NARROW):
            found = []
            for does in (True, False):
                by_operator(monkeypatch, does)
                found.append(updated(cls, options, shape, dtype))
            assert_same(f"{dtype} results", *found)
        assert len(ran) == 9
    finally:
        torch.set_num_threads(before)


@each_narrow
@each_case
def test_options_rounding_and_special_numbers_change_nothing_of_that(
    cls, options, dtype, monkeypatch
):
    for how in ({}, {**ROUND, "seed": 2**53 - 1}):
        for shape in ((65, 33), (300,), (40, 300)):
            found = []
            for does in (True, False):
                by_operator(monkeypatch, does)
                found.append(updated(cls, {**options, **how}, shape, dtype, special=True))
            assert_same("results", *found)


@pytest.mark.parametrize("isa", ("c", "baseline", "avx2"))
@each_class
def test_instruction_sets_change_no_bit(cls, isa, monkeypatch):
    options = {**OPTIONS[cls][1], **ROUND}
    for shape in ((65, 33), (7, 1100), (9, 4, 3, 3), (613,)):
        for dtype in (torch.float32, *NARROW):
            monkeypatch.delenv("OPTFUSE_ISA", raising=False)
            best = updated(cls, options, shape, dtype)
            monkeypatch.setenv("OPTFUSE_ISA", isa)
            assert_same("results", updated(cls, options, shape, dtype), best)


ELSEWHERE = (((1, 40000), 2), ((40000, 1), 1), ((2**19 + 64, 32), 1), ((1000, 36), 8))


def test_what_is_added_in_another_order_is_left_to_the_classs_lines(monkeypatch):
    def fits(shape, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return factored._has_known_order(torch.Size(shape), math.prod(shape))

    assert all(fits(shape, threads) for shape in SHAPES for threads in (1, 2, 3))
    assert not any(fits(*way) for way in ELSEWHERE)
    assert fits((1000, 36), 7) and fits((900, 36), 8) and fits((1000, 40), 8)


@pytest.mark.parametrize("shape, threads", ELSEWHERE)
def test_there_the_operator_would_have_other_bits(shape, threads, monkeypatch):
    """The negative control: of some gradients, as it is one number in the first two."""
    monkeypatch.setattr(factored, "_has_known_order", lambda *_: True)

    def step(seed, does):
        by_operator(monkeypatch, does)
        (p,), optimizer = made(Adafactor, sizes=(shape,))
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        state = optimizer.state[p]
        return state["exp_avg_sq_row"], state["exp_avg_sq_col"]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = ((step(seed, True), step(seed, False)) for seed in range(20))
        assert any(not all(map(torch.equal, *pair)) for pair in both)
    finally:
        torch.set_num_threads(before)


@each_class
def test_what_the_operator_does_not_take_is_left_to_the_classs_lines(cls, monkeypatch):
    def fails(*_):
        raise AssertionError("the operator ran")

    monkeypatch.setattr(factored.Factored, "_by_operator", fails)
    by_operator(monkeypatch, True)
    for shape in OTHER_SHAPES:
        updated(cls, OPTIONS[cls][0], shape, torch.float32)
    turned = nn.Parameter(torch.ones(4, 6).t())
    optimizer = cls([turned, *params_of(torch.float64)], **OPTIONS[cls][0])
    train(optimizer, 2)
    (p,), optimizer = made(cls, sizes=((4, 6),))
    optimizer.state[p] = {}
    optimizer._make_state(optimizer.param_groups[0], p, optimizer.state[p])
    row = optimizer.state[p]["exp_avg_sq_row"]
    optimizer.state[p]["exp_avg_sq_row"] = row.bfloat16()
    train(optimizer, 1)


TRIAL = """
import torch
from optfuse._rounding import factored
from optfuse.optim import Adafactor
factored._try_operator(Adafactor)
assert factored._agree[Adafactor] is {agrees}
def weight():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(300, 301))
    optimizer = Adafactor([p], beta1=0.9)
    for _ in range(3):
        p.grad = torch.randn(300, 301)
        optimizer.step()
    return p.detach()
found = []
for does in {does}:
    factored._agree[Adafactor] = does
    found.append(weight())
assert torch.equal(*found) is {equal}
"""


@pytest.mark.parametrize("capability, holds", (("avx2", True), ("default", False)))
def test_a_trial_finds_out_whether_pytorch_adds_so_here(capability, holds):
    """PyTorch's code for any processor rounds in another way: it has no fused multiply-adds."""
    script = TRIAL.format(agrees=holds, does=(True, False), equal=holds)
    python_ok(script, ATEN_CPU_CAPABILITY=capability)  # read at the first operator


# Fused

MODES = {"forward": "forward", "backward": "backward", "final": optfuse.Backward(final=True)}
SAID = {
    "forward": r"8 operators ran as 0 programs and 8 operators",
    "backward": r"its step\(\) ran 6 times at the first gradient of backward",
    "final": r"its step\(\) ran on 64 gradients",
}
each_mode = pytest.mark.parametrize("mode", MODES)


def network(dtype):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(96, 40), nn.Tanh(), nn.Linear(40, 33)
    return nn.Sequential(*layers, nn.LayerNorm(33)).to(dtype)


def iterate(model, optimizer, first=0, steps=8, scheduler=None):
    generator = torch.Generator().manual_seed(first)
    for _ in range(steps):
        inputs = torch.randn(5, 2, 6, 6, generator=generator).to(model[0].weight.dtype)
        optimizer.zero_grad()
        model(inputs).float().square().mul(torch.arange(33)).mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def trained(cls, options, dtype, mode=None):
    model = network(dtype)
    optimizer = cls(model.parameters(), **options)
    if mode is not None:
        optimizer = optfuse.fuse(optimizer, MODES[mode])
    iterate(model, optimizer)
    return optimizer


@each_mode
@pytest.mark.parametrize("dtype", (torch.float32, *NARROW))
@each_case
def test_fused_has_the_bits_of_step(cls, options, dtype, mode, monkeypatch):
    for how in ({}, ROUND):
        its = {**options, **how}
        fused = trained(cls, its, dtype, mode)
        said = str(optfuse.explain(fused))
        assert re.search(SAID[mode], said), said
        assert_same("results", results(fused), results(trained(cls, its, dtype)))
        with monkeypatch.context() as patch:
            by_operator(patch, False)
            assert_same("results", results(fused), results(trained(cls, its, dtype)))


@each_mode
@pytest.mark.parametrize("threads", (2, 3))
def test_fused_has_the_bits_of_step_on_several_threads(threads, mode):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = [trained(Adafactor, ROUND, torch.bfloat16, how) for how in (mode, None)]
    finally:
        torch.set_num_threads(before)
    assert_same("results", *map(results, both))


@each_mode
@each_class
def test_a_resumed_run_goes_on_bit_by_bit(cls, mode, tmp_path):
    options = {**OPTIONS[cls][0], **ROUND}
    whole, model, twin = (network(torch.bfloat16) for _ in range(3))
    straight = cls(whole.parameters(), **options)
    iterate(whole, straight, 0)
    iterate(whole, straight, 1)
    first = optfuse.fuse(cls(model.parameters(), **options), MODES[mode])
    iterate(model, first, 0)
    torch.save((model.state_dict(), first.state_dict()), tmp_path / "saved")
    weights, state = torch.load(tmp_path / "saved")
    twin.load_state_dict(weights)
    resumed = cls(twin.parameters(), **OPTIONS[cls][0])  # how it rounds comes with the state
    resumed.load_state_dict(state)
    iterate(twin, optfuse.fuse(resumed, MODES[mode]), 1)
    assert_same("results", results(resumed), results(straight))


@pytest.mark.parametrize("mode", (None, *MODES))
@each_class
def test_a_trainers_hooks_may_step_each_parameter(cls, mode):
    """By step_parameter(), which every mode has; the number of a parameter names its integers."""
    options = {**OPTIONS[cls][0], **ROUND}
    model, twin = network(torch.bfloat16), network(torch.bfloat16)
    groups = [{"params": list(layer.parameters())} for layer in model if list(layer.parameters())]
    optimizer, stock = cls(groups, **options), cls(twin.parameters(), **options)
    if mode not in (None, "final"):
        optfuse.fuse(optimizer, MODES[mode])
    for group in optimizer.param_groups if mode != "final" else ():
        for i, p in enumerate(group["params"]):

            def hook(p, group=group, i=i):
                optimizer.step_parameter(p, group, i)
                p.grad = None

            p.register_post_accumulate_grad_hook(hook)
    if mode == "final":
        optfuse.fuse(optimizer, MODES[mode])
    iterate(model, optimizer)
    iterate(twin, stock)
    assert_same("results", results(optimizer), results(stock))


@each_class
def test_a_group_of_before_load_state_dict_is_refused(cls):
    params, optimizer = made(cls, **OPTIONS[cls][0])
    stale = optimizer.param_groups[0]
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="none of param_groups now"):
        optimizer.step_parameter(params[0], stale)
    before = optimizer.state[params[0]]["step"]
    optimizer.step_parameter(params[0], optimizer.param_groups[0])
    assert optimizer.state[params[0]]["step"] == before + 1


@each_class
def test_a_compiled_step_is_the_classs_own(cls):
    (p,), optimizer = made(cls, sizes=((40, 50),))
    (q,), plain = made(cls, sizes=((40, 50),))
    step = torch.compile(optimizer.step, backend="eager")
    for t in (1, 2):
        p.grad, q.grad = gradient(p, 0, t), gradient(q, 0, t)
        step()
        plain.step()
    assert_same("results", results(optimizer), results(plain))


def usual(cls, params):
    return cls(params, **(FIXED if cls is Adafactor else {"lr": 0.01}))


@pytest.mark.parametrize("cls", [Adafactor, CAME])
@pytest.mark.parametrize("larger", [(4, 4), (300, 300)])
def test_a_gradient_of_another_shape_raises_as_by_the_lines(cls, larger):
    param = nn.Parameter(torch.ones(3, 3))
    param.grad = torch.ones(3, 3)
    param.data = torch.ones(larger)
    with pytest.raises(RuntimeError, match="must match|not of its parameter's form"):
        usual(cls, [param]).step()


def test_the_operator_refuses_what_is_of_another_form():
    with pytest.raises(RuntimeError, match="not of its parameter's form"):
        torch.ops.optfuse.factored(torch.ones(9), torch.ones(4), [torch.ones(9)] * 2, [0.0] * 14)


@pytest.mark.parametrize("cls", [Adafactor, CAME])
def test_it_trains_in_inference_mode(cls):
    with torch.inference_mode():
        ours = torch.ones(4, 5)
        ours.grad = torch.full((4, 5), 0.5)
        optimizer = usual(cls, [ours])
        for _ in range(2):
            optimizer.step()
    stock = torch.ones(4, 5)
    stock.grad = torch.full((4, 5), 0.5)
    optimizer = usual(cls, [stock])
    for _ in range(2):
        optimizer.step()
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("cls", [Adafactor, CAME])
def test_a_subclass_is_not_tried_and_has_its_own_lines(cls):
    class Scaled(cls):
        def __init__(self, params):
            super().__init__(params, **(FIXED if cls is Adafactor else {"lr": 0.01}))
            self.scale = 0.5

        def _compute_factored(self, group, param, grad, state):
            super()._compute_factored(group, param, grad * self.scale, state)

    first, second = (nn.Parameter(torch.ones(4, 5)) for _ in range(2))
    first.grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    second.grad = first.grad * 0.5
    Scaled([first]).step()
    usual(cls, [second]).step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("cls", [Adafactor, CAME])
def test_it_is_made_under_fake_tensors(cls):
    with torch._subclasses.FakeTensorMode():
        usual(cls, [nn.Parameter(torch.ones(4, 5))])
