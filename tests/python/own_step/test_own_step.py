# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels: the class's own step(), on one parameter when the
schedule says so, gives the bits of step() on all of them."""

import pytest
import torch
from common import net, same, train
from own_classes import Abstract, InDicts, NewTensors, Numbers, Stateless, Tensors
from own_scripts import MODES, matrices, momentum, training
from scripts import trained
from torch.optim import ASGD, Adafactor, Muon, NAdam, Rprop

import optfuse

VARIANTS = {
    "Adafactor": (Adafactor, net),
    "Adafactor, options": (
        lambda p: Adafactor(p, lr=0.3, weight_decay=0.1, maximize=True, eps=(1e-5, 1e-2)),
        net,
    ),
    "Adafactor, foreach": (lambda p: Adafactor(p, lr=0.3, foreach=True), net),
    "Adafactor, lr in a tensor": (lambda p: Adafactor(p, lr=torch.tensor(0.1)), net),
    "Muon": (Muon, matrices),
    "Muon, options": (lambda p: Muon(p, lr=0.1, nesterov=False, ns_steps=3), matrices),
    "tensors": (Tensors, net),
    "numbers": (Numbers, net),
    "new tensors": (NewTensors, net),
    "state in dicts": (InDicts, net),
    "no state": (Stateless, net),
    "an abstract base": (Abstract, net),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_are_those_of_the_class(name, mode):
    make, build = VARIANTS[name]
    at_once = name in ("numbers", "new tensors", "state in dicts")
    same(training(make, build), mode, prove=not at_once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Adafactor, momentum])
def test_bits_are_those_of_the_class_in_other_dtypes(make, dtype):
    def iteration(model, optimizer, i):
        for k, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * i + k)
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()

    same(trained(make, lambda: net().to(dtype), iteration=iteration, steps=20))


def summary_after(make, steps=5, build=net):
    torch.manual_seed(0)
    model = build()
    optimizer = optfuse.fuse(make(model.parameters()))
    for i in range(steps):
        train(model, optimizer, i)
    return optfuse.summary(optimizer)


def test_an_update_waits_for_its_first_use_if_its_state_is_in_tensors():
    """The first one makes the state, which nobody can know beforehand."""
    for make in (Tensors, Adafactor, Stateless):
        seen = summary_after(make)
        assert (seen.created, seen.at_once, seen.at_use, seen.pending) == (30, 6, 18, 6), make


def test_an_update_runs_inside_step_if_its_state_is_not():
    for make in (Numbers, NewTensors):
        seen = summary_after(make)
        assert (seen.created, seen.at_once, seen.pending) == (30, 30, 0), make
    assert "own step()" in str(seen)


@pytest.mark.parametrize("mode", MODES)
def test_classes_of_torch_without_kernels_need_no_registration(mode):
    for make in (NAdam, ASGD, Rprop):
        same(training(lambda p, make=make: make(p, foreach=False), steps=6), mode)
