# SPDX-License-Identifier: BSD-3-Clause
"""ASGD on a GPU that the CPU plays. PyTorch keeps its step counter, eta and mu there;
the kernels read and renew them in place, and the host never waits for one.
(test_gpu_rules.py has what ASGD shares with the other rules.)"""

import copy
import functools

import gpu
import pytest
import torch
import tried
from common import Fused, Stock
from gpu import NAME
from legal import backward, in_order, legal, net, train
from torch.optim import ASGD
from tried import KERNELS, MODES, OWN, all_of, isa, steps, with_alpha

import optfuse
from optfuse._process import drain_all

NUMBERS = ("step", "eta", "mu")
QUICK = {"lambd": 3.0, "alpha": 0.3, "t0": 2.0}  # numbers that change from step to step
pytestmark = pytest.mark.usefixtures("small_trials")
parameters = functools.partial(tried.parameters, sizes=(7, 64))


@pytest.mark.usefixtures("rounds_as_cpu")
def test_the_host_never_waits():
    """Stock's does, for each parameter's mu."""

    def waits(wrap):
        params = parameters()
        optimizer = wrap(ASGD(params))
        steps(optimizer, params, 2)
        names = gpu.operators(lambda: steps(optimizer, params, 3))
        return names.count("aten::_local_scalar_dense")

    assert waits(Stock()) == 6
    assert waits(Fused("forward")) == 0


def test_counters_stay_the_tensors_that_they_were():
    """And count their changes, as with PyTorch's multi-tensor functions. (The fake device's
    don't.)"""
    params = parameters()
    optimizer = optfuse.fuse(ASGD(params, **QUICK))
    steps(optimizer, params, 1)
    before = [optimizer.state[p][name] for p in params for name in NUMBERS]
    steps(optimizer, params, 4)
    after = [optimizer.state[p][name] for p in params for name in NUMBERS]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert {t._version for t in (*after, *params)} == {5}
    assert {t.device.type for t in after} == {NAME} and after[0] == 5


@in_order("forward")
def test_parameters_at_different_steps_go_in_one_launch(wrap):
    params = parameters(sizes=(5, 9, 70))
    optimizer = wrap(ASGD(params, **QUICK))
    assert not wrap.fused or isa(optimizer) == KERNELS
    for n in (1, 2, 3):
        steps(optimizer, params[:n], 2, seed=n)
    if wrap.fused:
        optfuse.flush()
        before = optfuse.summary(optimizer).launches
    steps(optimizer, params, 1)
    if wrap.fused:
        optfuse.flush()
        assert optfuse.summary(optimizer).launches == before + 1
    yield from all_of(optimizer, params)


@in_order("forward")
def test_more_parameters_than_a_table_of_numbers_holds(wrap):
    """Empty ones too: their numbers change like all others."""
    params = parameters(sizes=(0, *range(1, 340), 0))
    optimizer = wrap(ASGD(params, **QUICK))
    steps(optimizer, params, 3)
    yield from all_of(optimizer, params)


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 0.75, 1, 2, 3, 3.5])
@in_order("forward")
def test_powers_are_those_of_the_operator(wrap, alpha):
    params = parameters(sizes=(3,))
    optimizer = wrap(ASGD(params, lr=0.3, lambd=0.7))
    assert not wrap.fused or isa(optimizer) == KERNELS
    steps(optimizer, params, 1)
    optimizer.param_groups[0]["alpha"] = alpha
    for i in range(100):
        steps(optimizer, params, 1, seed=i)
        yield "eta", optimizer.state[params[0]]["eta"]


@pytest.mark.parametrize("alpha", [-0.5, -1, -2, -0.75])
@in_order("forward", prove=False)
def test_negative_powers_are_left_to_the_operator(wrap, alpha):
    params = parameters(sizes=(3,))
    optimizer = wrap(with_alpha(ASGD(params, lr=0.3, lambd=0.7), alpha))
    for i in range(50):
        steps(optimizer, params, 1, seed=i)
        yield "eta", optimizer.state[params[0]]["eta"]


def test_a_power_that_becomes_negative_is_refused():
    params = parameters()
    optimizer = optfuse.fuse(ASGD(params))
    steps(optimizer, params, 1)
    optimizer.param_groups[0]["alpha"] = -1
    with pytest.raises(optfuse.Error, match="or its alpha negative: .* fuse it again"):
        steps(optimizer, params, 1)
    optimizer.param_groups[0]["alpha"] = 1
    steps(optimizer, params, 1)
    assert optimizer.state[params[0]]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_default_dtype_of_16_bits_is_refused(dtype, monkeypatch):
    """PyTorch's mu is rounded to it."""
    params = parameters()
    optimizer = optfuse.fuse(ASGD(params))
    steps(optimizer, params, 1)
    torch.set_default_dtype(dtype)
    try:
        with pytest.raises(optfuse.Error, match=r"default dtype, \w+: unfuse .* before step\(\)"):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


@in_order("forward")
def test_a_default_dtype_of_64_bits_makes_no_difference(wrap):
    params = parameters()
    optimizer = wrap(ASGD(params, **QUICK))
    steps(optimizer, params, 1)
    torch.set_default_dtype(torch.float64)
    try:
        for i in range(20):
            steps(optimizer, params, 1, seed=i)
    finally:
        torch.set_default_dtype(torch.float32)
    yield from all_of(optimizer, params)


@in_order("forward")
def test_what_a_script_does_to_the_numbers_counts(wrap):
    params = parameters()
    optimizer = wrap(ASGD(params, **QUICK))
    steps(optimizer, params, 2)
    yield "read while it is pending", optimizer.state[params[0]]["eta"]
    optimizer.state[params[0]]["eta"].fill_(0.5)
    optimizer.state[params[1]]["step"] += 100
    steps(optimizer, params, 2, seed=1)
    optimizer.state[params[1]]["mu"] = torch.full((), 0.25, device=NAME)
    steps(optimizer, params, 2, seed=2)
    yield from all_of(optimizer, params)


def read_on_another_stream(wrap):
    model = net()
    optimizer = wrap(ASGD(model.parameters(), **QUICK))
    for i in range(3):
        train(model, optimizer, i)
    a, b = gpu.stream(), gpu.stream()
    a.wait_stream(gpu.current())
    with a:
        train(model, optimizer, 3)
        event = a.record_event()
    b.wait_event(event)
    with b:
        for p in model.parameters():
            yield "numbers", [optimizer.state[p][name] for name in NUMBERS]
    gpu.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_another_stream_that_waited_sees_them(mode):
    legal(read_on_another_stream, mode)


def test_the_trial_sees_powers_that_differ_now_and_then(monkeypatch):
    power = torch.Tensor.__pow__

    def otherwise(base, exponent):
        result = power(base, exponent)
        return result if float(base) < 10 else result.nextafter(torch.zeros_like(result))

    monkeypatch.setattr(torch.Tensor, "__pow__", otherwise)
    optimizer = optfuse.fuse(ASGD(parameters(), lambd=9.0))
    assert isa(optimizer) == OWN
    assert "in a trial the kernels gave other bits" in str(optfuse.summary(optimizer))


# Optimizers that kernels do not take


def from_cpu(state):
    """As torch.load(..., map_location="cpu") has it; the step stays there."""
    for entry in state["state"].values():
        entry.update({key: value.cpu() for key, value in entry.items()})
    return state


CHECKPOINTS = {
    "from a CPU, whose powers are others": (torch.float32, from_cpu),
    "of 16 bits, which eta and mu get, too": (torch.bfloat16, lambda state: state),
    "of 64 bits": (torch.float64, lambda state: state),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_with_other_counters_sends_it_back_to_the_class(name, mode):
    dtype, edited = CHECKPOINTS[name]

    def script(wrap):
        params = parameters(dtype=dtype)
        optimizer = wrap(ASGD(params, **QUICK))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        steps(optimizer, params, 3)
        optimizer.load_state_dict(edited(copy.deepcopy(optimizer.state_dict())))
        for i in range(4):
            steps(optimizer, params, 1, seed=i)
            scheduler.step()
        if wrap.fused:
            found = optfuse.summary(optimizer)
            assert "recorded" in optfuse.explain(optimizer) and found.mode == mode
            assert "its step, eta, mu are not all float32 on the GPU" in str(found)
        yield from all_of(optimizer, params)

    legal(script, mode, prove=False)


def test_between_backward_and_step_such_a_checkpoint_is_refused():
    model = net()
    optimizer = optfuse.fuse(ASGD(model.parameters(), **QUICK), mode="backward")
    train(model, optimizer, 0)
    usual = copy.deepcopy(optimizer.state_dict())
    saved = from_cpu(copy.deepcopy(usual))
    backward(model, optimizer, 1)
    state, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(optfuse.Error, match="between backward\\(\\) and step.* Nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert optimizer.state is state and optimizer.param_groups is groups
    optimizer.step()
    assert isa(optimizer) == KERNELS
    optimizer.load_state_dict(saved)
    assert "recorded" in optfuse.explain(optimizer)
    train(model, optimizer, 2)


def test_a_counter_that_was_put_elsewhere_is_refused():
    params = parameters()
    optimizer = optfuse.fuse(ASGD(params))
    steps(optimizer, params, 2)
    optimizer.state[params[1]]["mu"] = torch.ones((), device="cpu")
    what = "state\\['mu'\\] of parameter 1 .* is not a 0-dim float32 tensor on its parameter's GPU"
    for _ in range(2):
        with pytest.raises(optfuse.Error, match=f"{what}.*unfuse the optimizer and fuse it again"):
            steps(optimizer, params, 1)
    assert isa(optfuse.fuse(optfuse.unfuse(optimizer))) == OWN


def test_numbers_that_are_not_float32_are_left_to_the_class(monkeypatch):
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    optimizer = optfuse.fuse(ASGD(parameters()))
    assert isa(optimizer) == OWN
    assert "not all float32" in str(optfuse.summary(optimizer))


def test_a_graph_cannot_capture_it():
    """Nor in stock, which says so in its own words."""
    params = parameters()
    optimizer = optfuse.fuse(ASGD(params))
    steps(optimizer, params, 2)
    drain_all()
    gpu.synchronize()
    refused = pytest.raises(optfuse.Error, match="can't be captured into a CUDA graph")
    with gpu.captured(gpu.stream()), refused:
        steps(optimizer, params, 1, seed=1)
    gpu.synchronize()
    assert optimizer.state[params[0]]["step"].item() == 2
