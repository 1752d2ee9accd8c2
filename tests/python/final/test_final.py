# SPDX-License-Identifier: BSD-3-Clause
"""Backward(final=True): a fused back pass, equal to the hooks that trainers write."""

import copy
import gc
import os
import warnings
import weakref

import pytest
import torch
from torch import nn
from trainers import Eager, first_difference

import optfuse

CLIP_VALUE = nn.utils.clip_grad_value_
FINAL = optfuse.Backward(final=True)


def net(seed=0, n=2):
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(n) for layer in (nn.Linear(8, 8), nn.Tanh())))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def backward(model, seed=1):
    x = torch.randn(4, 8, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    model(x.to(next(model.parameters()).device)).square().mean().backward()


@pytest.mark.parametrize("first", range(0, 400, 50))
@pytest.mark.filterwarnings("ignore")
def test_random_loops_of_trainers(first, monkeypatch):
    if first % 100:  # gradients that nobody computes
        monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")
    found = [words for seed in range(first, first + 50) if (words := first_difference(seed))]
    assert not found, "\n".join(found[:3])


def test_no_step_and_no_zero_grad_is_needed():
    model, other = net(), net()
    eager = Eager(adamw, other.parameters())
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    for turn in range(4):
        backward(model, turn)
        backward(other, turn)
        assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert opt.state_dict()["state"].keys() == eager.whole.state_dict()["state"].keys()


def test_hooks_of_step_run_once_a_pass():
    model, calls = net(), []
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("behind"))
    backward(model)
    assert calls == ["before", "behind"]
    opt.step()
    opt.zero_grad()
    assert calls == ["before", "behind"]
    opt.step()  # no pass was since
    assert calls == 2 * ["before", "behind"]


def test_a_scheduler_needs_no_step():
    model = net()
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            backward(model)
            scheduler.step()


def test_a_closure_is_all_that_step_runs():
    model, other = net(), net()
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    Eager(adamw, other.parameters())

    def closure():
        backward(model)
        return 7.0

    assert opt.step(closure) == 7.0
    backward(other)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "clip",
    [
        lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
        lambda ps: nn.utils.clip_grad.clip_grad_norm_(ps, 1.0),
        lambda ps: nn.utils.clip_grad_value_(ps, 1.0),
        lambda ps: CLIP_VALUE(ps, 1.0),
        lambda ps: optfuse.clip_grad_norm_(ps, 1.0),
    ],
)
def test_clipping_all_is_refused(clip):
    model = net()
    optfuse.fuse(adamw(model.parameters()), FINAL)
    backward(model)
    with pytest.raises(optfuse.Error, match="nothing to clip.*parameter 0 of group 0"):
        clip(list(model.parameters()))
    others = net(1)
    backward(others)
    clip(list(others.parameters()))
    with pytest.raises(optfuse.Error, match="nothing to clip"):
        clip([*model.parameters(), *others.parameters()])


def test_a_script_need_not_keep_the_optimizer():
    model = net()
    gone = weakref.ref(optfuse.fuse(adamw(model.parameters()), FINAL))
    gc.collect()
    backward(model)
    assert all(p.grad is None for p in model.parameters())
    assert gone() is not None
    del model
    gc.collect()
    assert gone() is None


class Hooked(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))


@pytest.mark.parametrize("mode", ["forward", "backward", FINAL])
def test_a_class_with_hooks_of_its_own_is_refused(mode):
    with pytest.raises(optfuse.Error, match="Hooked has a hook of its own"):
        optfuse.fuse(Hooked(net().parameters()), mode)


def test_a_scaled_loss_is_refused():
    model = net()
    optfuse.fuse(adamw(model.parameters()), FINAL)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(optfuse.Error, match="GradScaler"):
        scaler.scale(model(torch.ones(1, 8)).sum()).backward()


def test_a_pass_that_raises_keeps_the_updates_made():
    model, other = net(), net()
    optfuse.fuse(adamw(model.parameters()), FINAL)
    Eager(adamw, other.parameters())
    for each in (model, other):
        each[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(each)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert not torch.equal(model[2].weight, net()[2].weight)


class Coupled(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["n"] = self.param_groups[0].get("n", 0) + 1
        return super().step(closure)


def test_a_coupled_class_is_refused_in_its_first_pass():
    model = net()
    optfuse.fuse(Coupled(model.parameters(), lr=0.1), FINAL)
    with pytest.raises(optfuse.Error, match="Coupled.*the option 'n' of group 0"):
        backward(model)


class StateElsewhere(torch.optim.SGD):
    """As wrappers have it, which show the state of an optimizer inside."""

    @property
    def state(self):
        return self._inside

    @state.setter
    def state(self, state):
        self._inside = state


def test_a_class_whose_state_is_no_attribute_is_refused_by_name():
    model = net()
    optfuse.fuse(StateElsewhere(model.parameters(), lr=0.1, momentum=0.9), FINAL)
    with pytest.raises(optfuse.Error, match="StateElsewhere.*the attribute '_inside'"):
        backward(model)


@pytest.mark.parametrize("other", [{"side_stream": True}])
def test_what_does_not_go_together_is_refused(other):
    with pytest.raises(optfuse.Error, match="do not go together"):
        optfuse.Backward(final=True, **other)


def test_hooks_that_are_registered_later_come_before_the_update():
    model, seen = net(), []
    optfuse.fuse(adamw(model.parameters()), FINAL)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    before = copy.deepcopy(model.state_dict())
    backward(model)
    assert seen == [False] * 4
    assert not any(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_groups_that_are_added_and_parameters_that_are_replaced():
    model, other, late, its = net(), net(), net(1), net(1)
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    eager = Eager(adamw, other.parameters())
    backward(model)
    backward(other)
    opt.add_param_group({"params": late.parameters()})
    eager.whole.add_param_group({"params": its.parameters()})
    eager.attach()
    for a, b in ((model, late), (other, its)):
        backward(nn.Sequential(a, b))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(map(torch.equal, late.parameters(), its.parameters()))


def test_weight_gradients_in_another_order():
    model, other = net(n=3), net(n=3)
    optfuse.fuse(adamw(model.parameters()), FINAL)
    optfuse.reorder(model, schedule="last")
    Eager(adamw, other.parameters())
    for turn in range(3):
        backward(model, turn)
        backward(other, turn)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_it_says_what_it_gives_up():
    opt = optfuse.fuse(adamw(net().parameters()), FINAL)
    assert "counts from the next pass on" in optfuse.explain(opt)


def test_state_that_is_refused_is_refused_in_each_pass():
    model = net()
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    backward(model)
    opt.state[model[0].weight]["step"] = 1
    for _ in range(2):
        with pytest.raises(optfuse.Error, match="state..step.. of parameter 0"):
            backward(model)


def test_unfuse_and_copies():
    model = net()
    opt = optfuse.fuse(adamw(model.parameters()), FINAL)
    backward(model)
    twin_model, twin = copy.deepcopy((model, opt))
    backward(model, 2)
    backward(twin_model, 2)
    assert all(map(torch.equal, model.parameters(), twin_model.parameters()))
    assert optfuse.summary(twin).mode == "final"
    optfuse.unfuse(opt)
    backward(model)
    assert all(p.grad is not None for p in model.parameters())


def check_coupled():
    with pytest.raises(optfuse.Error, match="Coupled"):
        model = net()
        optfuse.fuse(Coupled(model.parameters(), lr=0.1), FINAL)
        backward(model)


def check_clip():
    with pytest.raises(optfuse.Error, match="nothing to clip"):
        model = net()
        optfuse.fuse(adamw(model.parameters()), FINAL)
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("guard", "check"), [("coupled", check_coupled), ("final_clip", check_clip)]
)
def test_a_guard_that_is_off_is_missed(guard, check, monkeypatch):
    if "guards" not in os.environ.get("OPTFUSE_LIBRARY", ""):
        pytest.skip("OPTFUSE_LIBRARY has no switchable guards; tests/run sets it")
    check()
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", guard)
    with pytest.raises(pytest.fail.Exception):
        check()
