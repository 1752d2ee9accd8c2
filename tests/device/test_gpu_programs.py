# SPDX-License-Identifier: BSD-3-Clause
"""Elementwise operators of a recorded step() on a GPU run as programs (kernels/cuda/program.cu):
with the bits of PyTorch's operators, in as few launches as there are kinds of parameters."""

from pathlib import Path

import gpu
import pytest
import torch
from common import assert_same, python_ok
from gpu import NAME
from gpu_classes import CLASSES, DTYPES
from legal import legal, training
from recorded_classes import Base
from test_operators import CALLS, ELEMENTWISE, special
from torch import nn

import optfuse
from optfuse._fused.recorded import last_counts

HERE = Path(__file__).resolve().parent
MODES = ("forward", "backward")
SIZES = (1, 5, 16, 37, 1003, 9001)
LISTS = {
    "div number": lambda p, g: torch._foreach_div([p], 0.001)[0],
    "div numbers": lambda p, g: torch._foreach_div([p], [0.001])[0],
    "mul number": lambda p, g: torch._foreach_mul([p], 0.3)[0],
    "maximum": lambda p, g: torch._foreach_maximum([p], [g])[0],
    "minimum": lambda p, g: torch._foreach_minimum([p], [g])[0],
    "addcmul": lambda p, g: torch._foreach_addcmul([p], [g], [g], 1.0)[0],
    "pow": lambda p, g: torch._foreach_pow([p], 2)[0],
}
if gpu.IS_REAL:  # the roundings of others are not all played
    LISTS |= {name: lambda p, g, of=formula: of([p], [g])[0] for name, formula in CALLS}
FORMULAS = {**ELEMENTWISE, **{f"{name} of lists": of for name, of in LISTS.items()}}


class EachGroup(Base):
    """Each group's parameters become what the operator gives that the group names."""

    def one(self, p, group, state):
        p.copy_(FORMULAS[group["operator"]](p, p.grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_have_the_bits_of_pytorch(dtype):
    random = torch.Generator().manual_seed(1)
    by_operator, ran = set(), 0
    for name, formula in FORMULAS.items():
        params = [nn.Parameter(special(n, dtype, random).to(NAME)) for n in SIZES]
        optimizer = optfuse.fuse(EachGroup([{"params": params, "operator": name}]))
        for _ in range(3):  # the third runs programs
            for p in params:
                p.grad = special(p.numel(), dtype, random).to(NAME)
            try:
                wanted = [formula(p.detach(), p.grad) for p in params]
            except (RuntimeError, TypeError):
                assert gpu.IS_REAL, f"PyTorch has no {name} for this dtype"
                break
            optimizer.step()
            assert_same(name, [p.detach() for p in params], wanted)
        else:
            ran += 1
            if last_counts()["operators"]:
                by_operator.add(name)
    print(f"{dtype}: {ran - len(by_operator)} of {ran} by programs, by PyTorch: {by_operator}")
    assert gpu.IS_REAL or by_operator <= BY_OPERATOR, sorted(by_operator - BY_OPERATOR)
    assert ran - len(by_operator) > 40, "hardly an operator ran as a program"


# Numbers that are tensors on the GPU, and operators that no program has.
BY_OPERATOR = {"clamp tensors", "isnan", "lerp tensor", "sgn", "where first", "where second"}
BY_OPERATOR |= {"pow of lists"}


def fused(cls, n=4, steps=5, size=40, mode="forward"):
    params = [torch.ones(size + i, device=NAME, requires_grad=True) for i in range(n)]
    optimizer = optfuse.fuse(cls(params), mode)

    def step():
        if mode == "backward":
            optimizer.zero_grad()
            sum(p.sum() for p in params).backward()
        for p in params if mode == "forward" else ():
            p.grad = torch.ones_like(p)
        optimizer.step()

    for _ in range(steps - 1):
        step()
    return step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Elementwise", "Lists", "OldStyle"])
def test_parameters_that_are_alike_go_in_one_launch(name, mode):
    """Those of a for-loop, too: each has numbers of its own, and they are the same."""
    assert len(gpu.kernels(fused(CLASSES[name], mode=mode))) == 1


class TwoKinds(Base):
    def one(self, p, group, state):
        p.add_(p.grad, alpha=float(p.numel() % 2))


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_two_kinds_by_turns_go_in_two_launches(mode):
    assert len(gpu.kernels(fused(TwoKinds, n=8, mode=mode))) == 2


class OtherNumbers(Base):
    def one(self, p, group, state):
        p.add_(p.grad, alpha=float(p.numel()))


def test_other_numbers_are_another_launch():
    assert len(gpu.kernels(fused(OtherNumbers))) == 4


class Long(Base):
    """Half of what it does is one program, and the other half is the same one again."""

    def one(self, p, group, state):
        for _ in range(512):
            p.add_(p.grad, alpha=-0.001)


def test_a_program_that_needs_what_the_one_before_writes_is_another_launch(monkeypatch):
    assert len(gpu.kernels(fused(Long, n=1))) == 2
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "recorded_launch")
    # check_guard("recorded_launch", of lines that no schedule is known of
    assert len(gpu.kernels(fused(Long, n=1, size=41))) == 1


def test_lists_of_several_dtypes_are_pytorchs_own():
    """PyTorch takes them one by one there, and rounds so."""
    dtypes = torch.float32, torch.bfloat16
    params = [torch.ones(40, device=NAME, dtype=d, requires_grad=True) for d in dtypes]
    optimizer = optfuse.fuse(CLASSES["Lists"](params))
    for _ in range(5):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert last_counts()["programs"] == 0


class ManyTemporaries(Base):
    def one(self, p, group, state):
        kept = [p.grad * (0.1 + i) for i in range(17)]
        for x in kept:
            p.add_(x, alpha=-group["lr"])


@pytest.mark.parametrize("cls", [Long, ManyTemporaries])
def test_programs_that_are_too_large_are_several(cls):
    legal(training(cls), prove=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Elementwise", "Norms", "Capturable", "CapturableLists"])
def test_the_host_never_waits(name, mode):
    step = fused(CLASSES[name], mode=mode)  # operators have had their trials
    names = gpu.operators(step)
    assert names and "aten::_local_scalar_dense" not in names


def test_an_operator_with_other_bits_is_pytorchs_own():
    """On a GPU that rounds as the CPU does, where the kernels round as CUDA does."""
    script = f"""
import os, sys
sys.path[:0] = {[str(HERE), str(HERE.parent / "python"), str(HERE.parent / "python" / "recorded")]}
os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
import gpu
gpu.load()
import torch
from recorded_classes import Elementwise
import optfuse
from optfuse._fused.recorded import last_counts
params = [torch.linspace(0.1, 2, 300).to("fakecuda").requires_grad_() for _ in range(2)]
optimizers = optfuse.fuse(Elementwise(params[:1])), Elementwise(params[1:])
for i in range(5):
    for p, optimizer in zip(params, optimizers):
        p.grad = p.detach() * (1.5 + i)
        optimizer.step()
assert params[0].cpu().view(torch.int32).equal(params[1].cpu().view(torch.int32))
print("operators", last_counts()["operators"])
"""
    assert int(python_ok(script).split()[-1]) > 0
