# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and CAME of optfuse.optim: step() is the papers' formula, rounds once, and takes the
state of the classes that others train with."""

import copy
import pickle

import pytest
import torch
from common import assert_same
from factored_cases import (
    FIXED,
    OPTIONS,
    ROUND,
    each_case,
    each_class,
    each_narrow,
    gradient,
    made,
    results,
    train,
)
from torch import nn

import optfuse
from optfuse._rounding import rounded
from optfuse.optim import CAME, Adafactor

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
