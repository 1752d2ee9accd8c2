# SPDX-License-Identifier: BSD-3-Clause
"""Kernels that take the place of a class's own step() on a GPU, where a trial has
shown that they have its bits. On the fake GPU torch.optim's own steps go through
foreach.cpp and Python's formulas, the kernels through kernels/cuda/op_by_op.cu."""

import copy
import functools

import gpu
import optim_inputs
import pytest
import torch
from common import as_of_torch, assert_same
from gpu import NAME
from legal import in_order, legal, training
from optim_entries import ENTRIES
from torch.optim import ASGD, Adafactor, Adagrad, Adamax, Muon, NAdam, RAdam, RMSprop
from tried import (
    DTYPES,
    KERNELS,
    MODES,
    OWN,
    SIZES,
    Subclass,
    all_of,
    isa,
    parameters,
    steps,
    with_alpha,
)

import optfuse
from optfuse import optim
from optfuse._rules import RULES
from optfuse._trials import stock_trial
from optfuse.optim import Lion

OPTIONS = {cls: ENTRIES[cls.__name__].options for cls in RULES if cls.__name__ in ENTRIES}
#: Those of torch.optim.
STOCK = [cls for cls in OPTIONS if cls not in optim.CLASSES]
CASES = [(cls, options) for cls, some in OPTIONS.items() for options in some]
pytestmark = pytest.mark.usefixtures("nothing_known")


def of_a_subclass():
    return [Subclass(p.detach()) for p in parameters(sizes=(7, 64))]


def trained(make, dtype, mode, n, shapes=SIZES, strict=True):
    """The summary of ours after n steps, whose bits are those of the class's own."""
    ours, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
    fused, stock = optfuse.fuse(make(ours), mode, strict=strict), make(theirs)
    steps(fused, ours, n, backward=mode == "backward")
    steps(stock, theirs, n)
    assert_same("all", list(all_of(fused, ours)), list(all_of(stock, theirs)))
    return optfuse.summary(fused)


KINDS = [(dtype, "forward") for dtype in DTYPES]
KINDS += [(dtype, "backward") for dtype in (DTYPES if gpu.IS_REAL else DTYPES[:1])]


@pytest.mark.parametrize(
    ("dtype", "mode"), KINDS, ids=lambda kind: str(kind).removeprefix("torch.")
)
@pytest.mark.parametrize("cls, options", CASES, ids=str)
def test_kernels_pass_the_trial_and_have_the_bits_of_the_class(cls, options, dtype, mode):
    options = {"lr": 1e-2, **options}
    n = 100 if gpu.IS_REAL else 20
    strict = not gpu.IS_REAL
    found = trained(lambda params: cls(params, **options), dtype, mode, n, strict=strict)
    if gpu.IS_REAL and found.isa == OWN:
        pytest.skip(f"the class's own step() has been taken, with its bits: {found}")
    assert found.isa == {str(dtype)[6:]: "cuda"} and not found.own_step_because, str(found)
    assert found.reference == "torch's own step() on CUDA"


#: Shapes of classes without kernels, whose step() is recorded or runs as it is, and options.
MATRICES = ((1, 1), (20, 50), (50, 20), (131, 57))
WITHOUT_KERNELS = {
    Adafactor: (
        ((), (1,), (1003,), (2, 3, 5), *MATRICES),
        ({}, {"lr": 0.3, "weight_decay": 0.1, "maximize": True}, {"foreach": True}),
    ),
    Muon: (MATRICES, ({}, {"lr": 0.1, "nesterov": False, "ns_steps": 3})),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", WITHOUT_KERNELS, ids=lambda cls: cls.__name__)
def test_classes_without_kernels_have_their_own_bits(cls, dtype, mode):
    shapes, some = WITHOUT_KERNELS[cls]
    for options in some:
        trained(functools.partial(cls, **options), dtype, mode, 5, shapes, strict=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [*OPTIONS, Adafactor, Muon], ids=lambda cls: cls.__name__)
def test_every_input_of_pytorchs_tests_in_float32(cls, mode, small_trials):
    """With the flags that it has, whether kernels take it or the class steps."""
    shapes = MATRICES[:3] if cls is Muon else (7, (20, 50))
    for one in optim_inputs.inputs_for_gpus(cls.__name__):
        if not one.kwargs.get("differentiable"):  # which is not for updates in place
            make = functools.partial(optim_inputs.make, one)
            trained(make, torch.float32, mode, 6, shapes, strict=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_order_and_bits_are_those_of_the_class(cls, mode, small_trials):
    legal(training(lambda params: cls(params, lr=1e-2), steps=4), mode)


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_parameters_of_one_step_count_go_in_one_launch(cls, small_trials):
    params = parameters(sizes=(3, 40, 500, 64))
    optimizer = optfuse.fuse(cls(params, lr=1e-2))
    steps(optimizer, params, 3)
    optfuse.flush(optimizer)
    assert optfuse.summary(optimizer).launches == 3


#: Numbers of ASGD, which the GPU has, that change from step to step.
QUICK = {"lambd": 3.0, "alpha": 0.3, "t0": 2.0}
CHANGING = [(NAdam, {}), (RAdam, {}), (ASGD, QUICK)]
changing = pytest.mark.parametrize(
    ("cls", "options"), CHANGING, ids=lambda value: getattr(value, "__name__", "")
)


@changing
@in_order("forward")
def test_those_of_different_step_counts_have_scalars_of_their_own(wrap, cls, options, small_trials):
    params = parameters(sizes=(5, 9, 70))
    optimizer = wrap(cls(params, lr=1e-2, **options))
    assert not wrap.fused or isa(optimizer) == KERNELS
    for n in (1, 2, 3, 3):
        steps(optimizer, params[:n], 2, seed=n)
    yield from all_of(optimizer, params)


# The trial


def test_a_step_with_other_roundings_is_seen_and_taken(monkeypatch, small_trials):
    """As on a chip or a release where PyTorch's operators were contracted otherwise."""
    plain = torch._foreach_addcdiv_

    def otherwise(params, a, b, value=1.0):
        if not isinstance(value, list):
            return plain(params, a, b, value=value)
        for p, x, y, number in zip(params, a, b, value, strict=True):
            p.add_(x.mul(number).div(y))  # three roundings, where one is fused
        return None

    monkeypatch.setattr(torch, "_foreach_addcdiv_", otherwise)
    ours, theirs = parameters(), parameters()
    fused, stock = optfuse.fuse(Adamax(ours), strict=True), Adamax(theirs)
    steps(fused, ours, 5)
    steps(stock, theirs, 5)
    found = optfuse.summary(fused)
    assert found.isa == OWN
    assert "its own step() is recorded" in str(found) and "in a trial the kernels gave" in str(
        found
    )
    assert f"(float32 on {NAME}:0)" in str(found)
    assert_same("parameters", ours, theirs)


@pytest.mark.parametrize("cls", STOCK, ids=lambda cls: cls.__name__)
def test_one_bit_of_one_element_is_enough(cls, monkeypatch, small_trials):
    """A class whose step() is that of the kernels but for the last bit of a parameter.
    (Lion's own step() has to pass a trial of its own, which refuses that.)"""
    step = cls.step

    def with_another_bit(self, closure=None):
        step(self)
        first = self.param_groups[0]["params"][-1]
        if type(self) is cls and self.state[first]:
            with torch.no_grad():
                first.view(torch.int32)[3] ^= 1

    monkeypatch.setattr(cls, "step", as_of_torch(with_another_bit))
    assert isa(optfuse.fuse(cls(parameters(sizes=(9,)), lr=1e-2))) == OWN


def test_a_way_that_only_other_options_take_is_tried(monkeypatch, small_trials):
    """A script may set no_prox of a group at any step."""
    update = optim.Adan._update

    def with_another_bit(self, group, param, grad, state):
        update(self, group, param, grad, state)
        if group["no_prox"]:
            param.view(torch.int32)[0] ^= 1

    assert isa(optfuse.fuse(optim.Adan(parameters(sizes=(9,)), lr=1e-2))) == KERNELS
    stock_trial.known.clear()
    monkeypatch.setattr(optim.Adan, "_update", with_another_bit)
    assert isa(optfuse.fuse(optim.Adan(parameters(sizes=(9,)), lr=1e-2))) == OWN


def test_a_trial_that_fails_leaves_the_class_its_step(monkeypatch, small_trials):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(stock_trial, "_compare", fail)
    optimizer = optfuse.fuse(RMSprop(parameters()))
    assert isa(optimizer) == OWN
    assert "the trial of the kernels failed: RuntimeError: no such kernel" in str(
        optfuse.summary(optimizer)
    )


@pytest.mark.parametrize("make, why", [
    (lambda p: RMSprop(p, capturable=True), "capturable"),
    (lambda p: Adagrad(p, fused=True), "fused"),
    (lambda p: Adamax(p, lr=torch.tensor(0.1)), "a tensor as lr"),
    (lambda p: Lion([q.detach().bfloat16().requires_grad_() for q in p]), "bfloat16"),
    (lambda p: RMSprop(p, foreach=False), "other bits"),
    (lambda p: RMSprop([*p, *of_a_subclass()]), "some parameters are of a subclass"),
    (lambda p: ASGD([torch.ones((), device=NAME, requires_grad=True)]), "no dimensions"),
    (lambda p: ASGD(p, capturable=True), "capturable"),
    (lambda p: ASGD(p, foreach=False), "other bits"),
    (lambda p: with_alpha(ASGD(p), -1), "of a negative alpha"),
])  # fmt: skip
def test_what_takes_another_way_is_left_to_the_class(make, why, small_trials):
    gpu.only_played()
    gpu.round_as_cuda(False)  # so that operators on one tensor have other bits
    optimizer = optfuse.fuse(make(parameters()))
    found = optfuse.summary(optimizer)
    assert found.isa == OWN
    assert why in str(found)


@pytest.mark.parametrize("cls", STOCK, ids=lambda cls: cls.__name__)
@in_order("forward", prove=False)
def test_bits_of_a_subclass_are_those_of_the_for_loop(wrap, cls, small_trials):
    params = of_a_subclass()
    optimizer = wrap(cls(params, lr=1e-2))
    steps(optimizer, params, 8)
    yield "parameters", [p.detach() for p in params]


def test_a_group_of_a_subclass_is_not_added(small_trials):
    optimizer = optfuse.fuse(RMSprop(parameters(sizes=(7,))))
    with pytest.raises(optfuse.Error, match="are of a subclass; unfuse the optimizer, and fuse"):
        optimizer.add_param_group({"params": of_a_subclass()})


def test_foreach_that_was_asked_for_is_for_subclasses_too(small_trials):
    assert isa(optfuse.fuse(RMSprop(of_a_subclass(), foreach=True))) == KERNELS
    assert isa(optfuse.fuse(Lion(of_a_subclass()))) == KERNELS


def test_a_trial_that_ends_in_nothing_but_nan_proves_nothing(monkeypatch, small_trials):
    monkeypatch.setattr(stock_trial, "SPECIAL", ())
    monkeypatch.setattr(stock_trial, "_numbers", lambda like, *_: torch.full_like(like, torch.nan))
    optimizer = optfuse.fuse(RMSprop(parameters(sizes=(7,))))
    assert isa(optimizer) == OWN
    assert "could not be compared with it: all numbers" in str(optfuse.summary(optimizer))


def test_each_kind_is_tried_once(monkeypatch, small_trials):
    optfuse.fuse(RMSprop(parameters(), lr=1.0))
    monkeypatch.setattr(stock_trial, "_compare", lambda *_: pytest.fail("tried again"))
    assert isa(optfuse.fuse(RMSprop(parameters(), lr=2.0))) == KERNELS
    assert isa(copy.deepcopy(optfuse.fuse(RMSprop(parameters())))) == KERNELS


def check_guard(name, monkeypatch):
    """Without it kernels run whose bits are not those of the class."""
    gpu.only_played()
    gpu.round_as_cuda(False)

    def final():
        params = [p.detach().bfloat16().requires_grad_() for p in parameters()]
        optimizer = optfuse.fuse(Lion(params, lr=1e-2))
        steps(optimizer, params, 5)
        return params

    own = final()
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", name)
    stock_trial.known.clear()
    kernels = final()
    with pytest.raises(AssertionError):
        assert_same("parameters", kernels, own)


def test_without_the_trial_other_bits_are_trained_with(monkeypatch, small_trials):
    check_guard("tried", monkeypatch)


# Actions of a script on such an optimizer


@changing
@in_order("forward")
def test_learning_rates_are_those_of_the_scheduler(wrap, cls, options, small_trials):
    params = parameters(sizes=(7, 64))
    optimizer = wrap(cls(params, lr=1e-2, **options))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for i in range(8):
        steps(optimizer, params, 1, seed=i)
        scheduler.step()
    yield from all_of(optimizer, params)


@pytest.mark.parametrize("change", [
    {"lr": torch.tensor(1e-3, device=NAME)}, {"lr": torch.tensor(1e-3, device="cpu")},
    {"foreach": False}, {"capturable": True},
], ids=str)  # fmt: skip
def test_a_group_that_would_go_another_way_now_raises(change, small_trials):
    params = parameters(sizes=(7,))
    optimizer = optfuse.fuse(RAdam(params))
    steps(optimizer, params, 1)
    optimizer.param_groups[0].update(change)
    for _ in range(2):
        with pytest.raises(optfuse.Error, match="its step\\(\\) would now go another way"):
            steps(optimizer, params, 1)
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", STOCK, ids=lambda c: c.__name__)
@in_order("forward")
def test_clipping_that_is_left_to_the_update_is_in_it(wrap, cls, dtype, small_trials):
    params = parameters(dtype, sizes=(7, 64, 1003))
    optimizer = wrap(cls(params, lr=1e-2))
    clip = optfuse.clip_grad_norm_ if wrap.fused else torch.nn.utils.clip_grad_norm_
    for step in range(4):
        for p in params:
            torch.manual_seed(step)
            p.grad = torch.randn(p.shape).to(NAME, dtype)
        clip(params, 0.5)
        optimizer.step()
    yield "parameters", params


@changing
@in_order("forward")
def test_checkpoints_go_both_ways(wrap, cls, options, small_trials):
    """load_state_dict() moves NAdam's mu_product to the GPU."""
    params = parameters(sizes=(7, 64))
    first = wrap(cls(params, lr=1e-2, **options))
    steps(first, params, 3)
    saved = copy.deepcopy(first.state_dict())
    again = parameters(sizes=(7, 64))
    second = wrap(cls(again, lr=1e-2))
    second.load_state_dict(saved)
    steps(second, again, 3, seed=1)
    assert not wrap.fused or isa(second) == KERNELS
    yield from all_of(second, again)


def test_a_step_counter_on_the_device_is_refused(small_trials):
    params = parameters(sizes=(7,))
    optimizer = optfuse.fuse(RAdam(params))
    steps(optimizer, params, 1)
    optimizer.state[params[0]]["step"] = torch.tensor(1.0, device=NAME)
    with pytest.raises(optfuse.Error, match=r"step counter .* move state\['step'\] to the CPU"):
        steps(optimizer, params, 1)


@in_order("forward")
def test_a_group_that_kernels_can_take_is_added(wrap, small_trials):
    params = parameters(sizes=(7, 64))
    optimizer = wrap(RMSprop(params[:1], lr=1e-2))
    steps(optimizer, params[:1], 2)
    optimizer.add_param_group({"params": params[1:], "weight_decay": 0.3})
    steps(optimizer, params, 2, seed=1)
    yield "parameters", params


def test_a_group_that_they_cannot_take_is_refused(small_trials):
    optimizer = optfuse.fuse(RMSprop(parameters(sizes=(7,))))
    cpu = torch.nn.Parameter(torch.ones(3, device="cpu"))
    for group in ({"params": parameters(), "capturable": True}, {"params": [cpu]}):
        with pytest.raises(optfuse.Error, match="fuse it again with all groups"):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_with_parameters_on_both_the_class_steps(small_trials):
    cpu = torch.nn.Parameter(torch.ones(3, device="cpu"))
    optimizer = optfuse.fuse(RMSprop([*parameters(sizes=(7,)), cpu]))
    assert isa(optimizer) == OWN
    assert "some parameters are on the CPU" in str(optfuse.summary(optimizer))


def test_the_trial_leaves_nothing_behind(small_trials):
    """Neither memory in use nor work that nothing puts in order."""
    optimizer = RMSprop(parameters(sizes=(7,)))
    before = gpu.bytes_in_use()
    optfuse.fuse(optimizer)
    gpu.synchronize()
    assert gpu.bytes_in_use() == before
