# SPDX-License-Identifier: BSD-3-Clause
"""Classes whose step() is drawn from a seed have stock's bits when it is recorded."""

import random

import generated_classes
import pytest
import torch
from common import differing
from test_recorded import tensors_of

import optfuse

SHAPES = (3, 4), (5,), (2, 3, 5), (), (40,), (1,), (33, 2)


def train(seed, fused, steps=8, mode="forward"):
    draw = random.Random(seed + 7)
    cls = generated_classes.make(seed)
    torch.manual_seed(seed)
    dtype = draw.choice((torch.float32,) * 5 + (torch.float64, torch.bfloat16, torch.float16))
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 5))]
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05, "flag": False}]
    optimizer = cls(groups if len(params) > 1 else params)
    if fused:
        optfuse.fuse(optimizer, mode, recorded=True)
    with_closure = draw.random() < 0.3
    found = []
    for i in range(steps):
        torch.manual_seed(100 * seed + i)
        weights = [torch.randn_like(p) for p in params]

        def loss(weights=weights):
            for p in params:
                p.grad = None
            pairs = zip(params, weights, strict=True)
            value = sum((p * w).sum() + 0.5 * (p * p).sum() for p, w in pairs)
            value.backward()
            return value

        try:
            if with_closure:
                found += tensors_of(optimizer.step(loss))
            else:
                loss()
                found += tensors_of(optimizer.step())
        except optfuse.Error:
            raise
        except Exception as e:
            found.append(torch.tensor(len(str(e).split("\n")[0])))
            break
        found += [p.detach().clone() for p in params]
        optimizer.options["scale"] = 0.75 - 0.01 * i
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return found + list(tensors_of([list(optimizer.state.values()), cls.log, torch.randn(2)]))


@pytest.mark.parametrize("first", range(0, 240, 20))
def test_a_drawn_class_has_stocks_bits(first):
    for seed in range(first, first + 20):
        stock, ours = train(seed, False), train(seed, True)
        assert len(stock) == len(ours), seed
        for a, b in zip(ours, stock, strict=True):
            assert not differing(a, b).any(), f"{seed}:\n{generated_classes.source(seed)}"
