# SPDX-License-Identifier: BSD-3-Clause
"""Products of small matrices that are alike run as one batched product, where a trial has shown the
same bits and a gain, and in an order in which none comes too early."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import optfuse
from optfuse._library.bindings import lib

STEPS = 6


def parameters(shapes, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def trained(make, shapes, fused, dtype=torch.float32, steps=STEPS):
    """The parameters, and how often the last step has called each operator."""
    params = parameters(shapes, dtype)
    optimizer = optfuse.fuse(make(params)) if fused else make(params)
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        for i, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=random).to(dtype)
            param.grad = None if step == 3 and i % 5 == 0 else gradient
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimizer.step()
    counts = {event.key: event.count for event in seen.key_averages()}
    return params, counts


def same(make, shapes, dtype=torch.float32):
    ours, counts = trained(make, shapes, True, dtype)
    stock, _ = trained(make, shapes, False, dtype)
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert torch.equal(a, b), f"parameter {i} of {len(ours)}"
    return counts


def muon(params):
    return torch.optim.Muon(params, lr=1e-2)


TALL_AND_WIDE = [(48, 16), (16, 48), (16, 16)] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shapes", [[(64, 64)] * 24, TALL_AND_WIDE, [(9, 31)] * 12], ids=["square", "mixed", "odd"]
)
def test_muon_has_the_bits_of_stock(shapes, dtype):
    same(muon, shapes, dtype)


def test_equal_matrices_are_multiplied_together():
    counts = same(muon, [(64, 64)] * 24)
    # 5 iterations of 3 products, of 20 lines a play at least; every one of them is recorded.
    assert 5 <= counts["aten::bmm"] <= 20 and 10 <= counts["aten::baddbmm"] <= 40


class Whitened(torch.optim.Optimizer):
    """Its products are of the gradients' own dtype."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_((p.grad @ p.grad.T) @ p.grad, alpha=self.param_groups[0]["lr"])


class Chained(Whitened):
    """The product of a parameter goes into that of the next one; what it was made of changes
    behind it, and is multiplied again."""

    @torch.no_grad()
    def step(self):
        before = None
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            gram = p.grad @ p.grad.T
            if before is not None:
                gram = gram @ before
            p.grad.mul_(0.5)
            p.add_(gram @ p.grad, alpha=-1e-4)
            p.add_(torch.addmm(p.grad, gram, p.grad, beta=0.3, alpha=1e-3), alpha=-1e-3)
            before = gram.mul(1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cls", [Whitened, Chained])
def test_products_run_behind_what_they_need(cls, dtype):
    same(cls, [(16, 40)] * 10 + [(16, 16)] * 6 if cls is Whitened else [(16, 40)] * 16, dtype)


def test_numbers_of_a_product_may_differ():
    class Scaled(Whitened):
        @torch.no_grad()
        def step(self):
            for i, p in enumerate(self.param_groups[0]["params"]):
                if p.grad is not None:
                    p.copy_(torch.addmm(p, p.grad, p.grad, beta=1.0 - i * 1e-3, alpha=-1e-3))

    same(Scaled, [(16, 16)] * 8)


def differs(m, k):
    """Whether batched products of float64 have other bits here, as MKL's may have."""
    random = torch.Generator().manual_seed(0)
    a = torch.randn(16, m, k, generator=random, dtype=torch.float64)
    alone = [x.clone() for x in a]  # each begins with a cache line
    return any(not torch.equal(x @ x.T, y) for x, y in zip(alone, torch.bmm(a, a.mT), strict=True))


def odd():
    found = next((s for s in ((33, 47), (17, 29), (37, 61), (5, 333)) if differs(*s)), None)
    if found is None:
        pytest.skip("batched products of these forms have the bits of single ones here")
    return found


def test_a_form_with_other_bits_runs_one_by_one():
    assert "aten::bmm" not in same(Whitened, [odd()] * 16, torch.float64)


def test_without_its_trial_it_has_other_bits(monkeypatch):
    if "guards" not in lib._name:
        pytest.skip("the library has no switches")
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "batched_bits")
    with pytest.raises(AssertionError, match="parameter"):
        same(Whitened, [odd()] * 17, torch.float64)  # a number that no trial has seen yet
