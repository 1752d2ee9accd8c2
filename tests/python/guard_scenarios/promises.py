# SPDX-License-Identifier: BSD-3-Clause
"""Guards of gradients that are promises."""

import copy
import os
import random

import torch
from common import adamw, assert_same
from torch import nn

import optfuse
from guard_scenarios.registry import guards


def promising(model):
    os.environ["OPTFUSE_PRODUCTS"] = "force"  # in the scenario's own process
    twin = copy.deepcopy(model)
    return twin, optfuse.fuse(adamw(twin.parameters()))


def assert_promised(optimizer):
    if not any(layer.promised for layer in optfuse.summary(optimizer).promised):
        raise RuntimeError("no gradient was a promise: the scenario would prove nothing")


@guards("factors_copied")
def an_input_is_written_after_backward():
    model = nn.Linear(40, 40)
    twin, optimizer = promising(model)
    stock = adamw(model.parameters())
    for it, of in ((model, stock), (twin, optimizer)):
        x = torch.ones(5, 40)
        it(x).square().mean().backward()
        x.zero_()
        of.step()
    assert_promised(optimizer)
    assert_same("weight", twin.weight, model.weight)


@guards("product_bits")
def panels_that_round_otherwise_are_not_used():
    """Some of these layers do, on every processor that was looked at."""
    numbers = random.Random(0)
    torch.set_num_threads(2)
    for _ in range(200):
        k, n, rows = (numbers.randint(*of) for of in ((1, 600), (1, 40), (1, 600)))
        model = nn.Linear(k, n)
        twin, _ = promising(model)
        x, y = torch.randn(rows, k), torch.randn(rows, n)
        for it in (model, twin):
            (it(x) * y).sum().backward()
        assert_same(f"{k} x {n}, {rows} rows", twin.weight.grad, model.weight.grad)
