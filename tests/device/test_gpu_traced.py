# SPDX-License-Identifier: BSD-3-Clause
"""Classes without a rule on a GPU: their step() is traced, and kernels/cuda/program.cu runs the
programs. On the fake GPU PyTorch's operators on one tensor go through pointwise.cpp, those on
lists through foreach.cpp."""

import fakecuda
import pytest
import torch
from common import assert_same, everything
from fakecuda import NAME
from legal import legal, net, train
from test_gpu_moves import model_on, moved
from test_traced_operators import OPERATORS, POWERS, special
from torch import nn
from traced_classes import (
    TRACEABLE,
    AdaBelief,
    Base,
    ByViews,
    Centered,
    Doubles,
    EightStates,
    EveryFifth,
    Factored,
    Foreach,
    Masks,
    Sorts,
    TrustRatio,
)

import optfuse
from optfuse._link import link_of
from optfuse._own_step.small import LARGE
from optfuse._process import drain_all
from optfuse._traced import foreach

pytestmark = pytest.mark.usefixtures("rounds_as_cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (1, 5, 16, 37, 1003, 9001)
FORMULAS = {**OPERATORS, **POWERS}
LISTS = {
    "div number": lambda p, g: torch._foreach_div([p], 0.001)[0],
    "div numbers": lambda p, g: torch._foreach_div([p], [0.001])[0],
    "mul number": lambda p, g: torch._foreach_mul([p], 0.3)[0],
    "maximum": lambda p, g: torch._foreach_maximum([p], [g])[0],
    "minimum": lambda p, g: torch._foreach_minimum([p], [g])[0],
    "addcmul": lambda p, g: torch._foreach_addcmul([p], [g], [g], 1.0)[0],
}
FORMULAS |= {f"{name} of lists": formula for name, formula in LISTS.items()}


class EachGroup(Base):
    """Each group's parameters become what the operator gives that the group names."""

    def update(self, p, grad, state, group):
        p.copy_(FORMULAS[group["operator"]](p, grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_have_the_bits_of_pytorch(dtype):
    random = torch.Generator().manual_seed(1)
    groups = []
    for name in FORMULAS:
        tensors = [nn.Parameter(special(n, dtype, random).to(NAME)) for n in SIZES]
        for p in tensors:
            p.grad = special(p.numel(), dtype, random).to(NAME)
        groups.append({"params": tensors, "operator": name})
    optimizer = optfuse.fuse(EachGroup(groups))
    assert link_of(optimizer).traced is not None
    wanted = {
        g["operator"]: [FORMULAS[g["operator"]](p.detach(), p.grad) for p in g["params"]]
        for g in optimizer.param_groups
    }
    optimizer.step()
    for group in optimizer.param_groups:
        name = group["operator"]
        assert_same(name, [p.detach() for p in group["params"]], wanted[name])


def script_of(cls, steps=6):
    def script(wrap):
        model = net()
        optimizer = wrap(cls(model.parameters()))
        getattr(optimizer, "train", bool)()
        for i in range(steps):
            train(model, optimizer, i)
        if wrap.fused:
            link = link_of(optimizer)
            assert link.traced is not None and link.traced.untraced == 0
            assert optfuse.summary(optimizer).isa == {"float32": "cuda"}
        yield from everything(model, optimizer)

    return script


# The one with eight states has no room for its temporaries on a GPU.
@pytest.mark.parametrize(
    "cls", [cls for cls in TRACEABLE if cls is not EightStates], ids=lambda cls: cls.__name__
)
def test_order_and_bits_are_those_of_the_class(cls):
    legal(script_of(cls))


@pytest.mark.parametrize("cls", [AdaBelief, EveryFifth, Foreach])
def test_in_backward_too(cls):
    legal(script_of(cls), "backward")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_other_dtypes(dtype):
    def script(wrap):
        torch.manual_seed(0)
        params = [torch.randn(n).to(NAME, dtype).requires_grad_() for n in (3, 300, 9001)]
        optimizer = wrap(Masks(params))
        for step in range(5):
            for p in params:
                torch.manual_seed(step)
                p.grad = torch.randn(p.shape).to(NAME, dtype)
            optimizer.step()
        yield "parameters", params

    legal(script)


def test_parameters_that_are_alike_go_in_one_launch():
    params = [torch.ones(n, device=NAME, requires_grad=True) for n in (3, 40, 500, 64)]
    optimizer = optfuse.fuse(AdaBelief(params))
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    optfuse.flush(optimizer)
    assert optfuse.summary(optimizer).launches == 3


def test_clipping_that_is_left_to_the_update_is_in_it():
    def script(wrap):
        params = [torch.ones(n, device=NAME, requires_grad=True) for n in (7, 64, 1003)]
        optimizer = wrap(AdaBelief(params))
        clip = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
        for step in range(4):
            for p in params:
                torch.manual_seed(step)
                p.grad = torch.randn(p.shape).to(NAME)
            clip(params, 0.5)
            optimizer.step()
        yield "parameters", params

    legal(script)


def test_one_optimizer_on_the_cpu_and_two_gpus():
    def script(wrap):
        devices = ("cpu", f"{NAME}:0", f"{NAME}:1")
        params = [torch.ones(40, device=device, requires_grad=True) for device in devices]
        optimizer = wrap(AdaBelief(params))
        for step in range(4):
            for p in params:
                torch.manual_seed(step)
                p.grad = torch.randn(p.shape).to(p.device)
            optimizer.step()
        fakecuda.synchronize(0)
        fakecuda.synchronize(1)
        yield "parameters", [p.detach().cpu() for p in params]

    legal(script, prove=False)


# Refusals


def refused(make, why):
    optimizer = make([torch.ones(4, 10, device=NAME, requires_grad=True) for _ in range(2)])
    with pytest.raises(optfuse.Error, match=why):
        optfuse.fuse(optimizer)


@pytest.mark.parametrize("cls", [TrustRatio, Centered, Factored, ByViews, Sorts, Doubles])
def test_operators_that_no_kernel_runs(cls):
    refused(cls, "it calls operator aten.*, which no kernel runs; on a GPU programs have")


SEEN = set()  # elements of parameters


class Notes(AdaBelief):
    def update(self, p, grad, state, group):
        SEEN.add(p.numel())
        super().update(p, grad, state, group)


def test_a_trial_of_small_parameters_looks_at_many_elements():
    """Roundings that seldom differ are found before they do: an H200's did once in a thousand."""
    optfuse.fuse(Notes([torch.ones(40, device=NAME, requires_grad=True)]))
    assert max(SEEN) > LARGE
    SEEN.clear()
    optfuse.fuse(Notes([torch.ones(40, requires_grad=True)]), recorded=False)
    assert max(SEEN) == 40


class PowerOfLists(Base):
    def update(self, p, grad, state, group):
        p.add_(torch._foreach_pow([grad], 2)[0], alpha=-0.1)


def test_powers_of_lists_are_not_products():
    refused(PowerOfLists, "_foreach_pow.*which no kernel runs|pow\\(\\) on GPUs")


def test_other_roundings_are_seen_in_the_trial(monkeypatch):
    """A quotient is not a product with the reciprocal."""

    class Divides(Base):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                params = [p for p in group["params"] if p.grad is not None]
                grads = torch._foreach_div([p.grad for p in params], [0.3] * len(params))
                torch._foreach_add_(params, grads, alpha=-group["lr"])

    params = [torch.ones(40, device=NAME, requires_grad=True)]
    assert link_of(optfuse.fuse(Divides(params))).traced is not None
    monkeypatch.setattr(foreach, "_OF_LISTS", {})
    refused(Divides, "has other bits")


class ManyTemporaries(Base):
    n = 13

    def update(self, p, grad, state, group):
        kept = [grad * (0.1 + i) for i in range(self.n)]
        for x in kept:
            p.add_(x, alpha=-group["lr"])


class Long(Base):
    def update(self, p, grad, state, group):
        for _ in range(257):
            p.add_(grad, alpha=-group["lr"])


def test_programs_that_are_too_large():
    refused(ManyTemporaries, "more than 12 state tensors and temporaries at once on a GPU")
    refused(EightStates, "more than 12 state tensors and temporaries at once on a GPU")
    refused(Long, "has 257 instructions, and on a GPU at most 256")
    twelve = type("Twelve", (ManyTemporaries,), {"n": 12})
    optfuse.fuse(twelve([torch.ones(40, device=NAME, requires_grad=True)]))


def test_numbers_on_the_gpu():
    rate = torch.tensor(0.1, device=NAME)

    class Scales(Base):
        def update(self, p, grad, state, group):
            p.sub_(grad * rate)

    refused(Scales, "takes a number from fakecuda:0, where reading it waits for the device")


def test_a_model_that_moves_there_after_fuse():
    model = model_on("cpu")
    optimizer = optfuse.fuse(AdaBelief(model.parameters()), recorded=False)
    moved(model, NAME)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(optfuse.Error, match="float32 on fakecuda:0, but was float32 on cpu"):
        optimizer.step()


def test_captures_are_refused():
    params = [torch.ones(40, device=NAME, requires_grad=True)]
    optimizer = optfuse.fuse(AdaBelief(params))
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optfuse.flush(optimizer)
    fakecuda.synchronize()
    drain_all()
    stream = fakecuda.stream()
    stream.wait_stream(fakecuda.current())
    fakecuda.capture(stream, 7)
    with stream, pytest.raises(optfuse.Error, match="can't be captured into a CUDA graph"):
        optimizer.step()
    fakecuda.capture(stream, 0)
    fakecuda.current().wait_stream(stream)
