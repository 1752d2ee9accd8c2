# SPDX-License-Identifier: BSD-3-Clause
"""The operator by which Adafactor and CAME of optfuse.optim update on the CPU has the bits of their
own lines, and what it does not take is left to those."""

import math

import pytest
import torch
from common import assert_same, python_ok
from factored_cases import (
    FIXED,
    NARROW,
    OPTIONS,
    ROUND,
    by_operator,
    each_case,
    each_class,
    each_narrow,
    gradient,
    made,
    params_of,
    results,
    train,
    usual,
    watched,
)
from torch import nn

from optfuse._rounding import factored
from optfuse.optim import CAME, Adafactor


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
