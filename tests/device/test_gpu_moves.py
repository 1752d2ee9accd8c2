# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that come to a GPU, or there to another dtype or device, after fuse(). A
trial was passed for one dtype on one device; what has not been tried must not run."""

import copy

import pytest
import torch
from common import assert_same
from gpu import NAME
from optim_entries import ENTRIES
from torch import nn
from torch.optim import Adafactor, Adagrad, Muon, NAdam, RMSprop
from tried import KERNELS, MODES, OWN, isa

import optfuse
from optfuse._rules import RULES
from optfuse._trials import stock_trial

TRIED = [cls for cls in RULES if cls.__name__ in ENTRIES]


@pytest.fixture(autouse=True)
def smaller_trials(small_trials, monkeypatch):
    monkeypatch.setattr(stock_trial, "STEPS", 3)


def model_on(device, dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Linear(5, 4, bias=False, device="cpu").to(device, dtype)


def train(model, optimizer, n=1):
    for i in range(n):
        optimizer.zero_grad()
        torch.manual_seed(i)
        like = next(model.parameters())
        model(torch.randn(3, 5).to(like.device, like.dtype)).square().sum().backward()
        optimizer.step()


def moved(model, *to):
    """As Module.to() does it: the parameters stay the objects that they are. (To another
    kind of device the one that the CPU plays needs them to be swapped.)"""
    before = list(model.parameters())
    swap = to == (NAME,) or to == ("cpu",)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.to(*to)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("cls", TRIED, ids=lambda cls: cls.__name__)
def test_a_group_on_a_gpu_is_not_added_to_groups_on_the_cpu(cls):
    cpu, gpu = model_on("cpu"), model_on(NAME)
    optimizer = optfuse.fuse(cls(cpu.parameters()))
    with pytest.raises(optfuse.Error, match="to be tried on a GPU; .* fuse it again with all gr"):
        optimizer.add_param_group({"params": list(gpu.parameters())})
    assert len(optimizer.param_groups) == 1
    train(cpu, optimizer, 2)


MOVES = {
    "to a GPU": ("cpu", (NAME,), "is float32 on fakecuda:0, but was float32 on cpu when"),
    "to more bits": (NAME, (torch.float64,), "is float64 on .*:0, but was float32 on fakecuda:0"),
    "to fewer bits": (NAME, (torch.float16,), "is float16 on .*, but was float32 on fakecuda:0"),
    "to another": (NAME, (f"{NAME}:1",), "is float32 on fakecuda:1, but was float32 on fakecuda:0"),
    "to the CPU": (NAME, ("cpu",), "is float32 on cpu, but was float32 on fakecuda:0"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MOVES)
def test_a_model_that_was_moved_or_cast_is_refused(name, mode):
    start, to, words = MOVES[name]
    model = model_on(start)
    optimizer = optfuse.fuse(RMSprop(model.parameters()), mode=mode)
    moved(model, *to)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(optfuse.Error, match=f"parameter 0 .* {words}.* and fuse\\(\\) again"):
            train(model, optimizer)
    optimizer.zero_grad()
    assert_same("parameters", [p.detach() for p in model.parameters()], before)


# Adagrad makes its state at once, which is then of the old dtype.
@pytest.mark.parametrize("cls", [c for c in TRIED if c is not Adagrad], ids=lambda c: c.__name__)
def test_fused_again_it_has_the_bits_of_the_class_there(cls):
    results = []
    for fuse in (optfuse.fuse, lambda optimizer: optimizer):
        model = model_on(NAME)
        optimizer = fuse(cls(model.parameters()))
        moved(model, torch.float64)
        if fuse is optfuse.fuse:
            with pytest.raises(optfuse.Error, match="is float64 on fakecuda:0, but was float32"):
                train(model, optimizer)
            optfuse.fuse(optfuse.unfuse(optimizer))
        train(model, optimizer, 5)
        results.append(list(model.parameters()))
    assert_same("parameters", *results)


def test_there_and_back_is_where_it_was():
    model = model_on(NAME)
    optimizer = optfuse.fuse(NAdam(model.parameters()))
    moved(model, torch.float64)
    moved(model, torch.float32)
    train(model, optimizer, 2)
    assert isa(optimizer) == KERNELS


def test_a_new_group_does_not_make_a_cast_one_known():
    model, other = model_on(NAME), model_on(NAME)
    optimizer = optfuse.fuse(NAdam(model.parameters()))
    moved(model, torch.float64)
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(optfuse.Error, match="is float64 on fakecuda:0, but was float32"):
        train(model, optimizer)


def test_what_is_put_into_a_group_by_hand_must_be_of_a_known_kind():
    model = model_on(NAME)
    optimizer = optfuse.fuse(NAdam(model.parameters()))
    optimizer.param_groups[0]["params"].append(like := next(model_on(NAME).parameters()))
    like.grad = torch.ones_like(like)
    optimizer.step()
    assert optimizer.state[like]["step"] == 1
    optimizer.param_groups[0]["params"].append(other := next(model_on(NAME).double().parameters()))
    other.grad = torch.ones_like(other)
    with pytest.raises(optfuse.Error, match="parameter 2 .* float64 .* not among its parameters"):
        optimizer.step()


def test_on_the_cpu_a_cast_model_trains_on():
    results = []
    for fuse in (optfuse.fuse, lambda optimizer: optimizer):
        model = model_on("cpu")
        optimizer = fuse(RMSprop(model.parameters()))
        model.double()
        train(model, optimizer, 3)
        results.append(list(model.parameters()))
    assert_same("parameters", *results)


@pytest.mark.parametrize("cls", [Adafactor, Muon])
@pytest.mark.parametrize("name", [name for name in MOVES if "bits" in name or name == "to a GPU"])
def test_what_has_no_kernels_trains_on(cls, name):
    start, to, _ = MOVES[name]
    results = []
    for fuse in (optfuse.fuse, lambda optimizer: optimizer):
        model = model_on(start)
        optimizer = fuse(cls(model.parameters()))
        moved(model, *to)
        train(model, optimizer, 4)
        results.append([*model.parameters(), dict(optimizer.state[model.weight])])
    assert_same("parameters and state", *results)


# Copies, which are tried as they are now


def test_a_copy_with_other_options_than_at_first_is_updated_in_the_same_way():
    model = model_on(NAME)
    optimizer = optfuse.fuse(RMSprop(model.parameters()))
    optimizer.param_groups[0].update(alpha=0.3)
    twin = copy.deepcopy(optimizer)
    assert isa(twin) == isa(optimizer) != OWN
    assert not optfuse.summary(twin).own_step_because


def test_a_copy_of_a_cast_model_is_of_the_kind_that_it_is_now():
    model = model_on(NAME)
    optimizer = optfuse.fuse(RMSprop(model.parameters()))
    moved(model, torch.float64)
    twin_of, twin = copy.deepcopy((model, optimizer))
    train(twin_of, twin, 2)
    tried = {kind[1] for kind in stock_trial.known}
    assert tried == {torch.float32, torch.float64} and isa(twin) == {"float64": "cuda"}
