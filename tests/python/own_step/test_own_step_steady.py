# SPDX-License-Identifier: BSD-3-Clause
"""Classes that step the parameters of a group together until it is set up: from there on backward
mode updates them one by one, and all other steps are the class's own."""

import copy

import pytest
import torch
from common import everything, loss_of, net, refused, same, snapshot
from own_classes import CountsSteps, KeysOfFirst, WarnsOnce
from own_scripts import MODES
from scripts import trained
from steady_classes import (
    COUPLED,
    LATE,
    STEADY,
    WAIT_FOR_FROZEN,
    DividesAll,
    Grouped,
    KeepsNorms,
    Leads,
    SkipsFirst,
    Sums,
    WarmsUp,
)

import optfuse
from optfuse._link import link_of

# They depend on each other in the first step, or on whether any has a gradient.
SET_UP = [KeysOfFirst, CountsSteps, WarnsOnce]
ALL = [*STEADY, *WAIT_FOR_FROZEN, *SET_UP, *COUPLED, *LATE, DividesAll, KeepsNorms, Leads]
FIRST = 2  # steps after which a group of these classes is steady


@pytest.fixture(autouse=True, scope="module")
def registered():
    for cls in ALL:
        optfuse.register(cls)
    yield
    for cls in ALL:
        optfuse.register(cls, per_parameter=False)


def same_steps(script, mode):
    """In forward mode all updates are the class's own, inside step()."""
    same(script, mode, prove=mode == "backward")


def of_class(cls):
    return pytest.mark.parametrize("make", [cls] if isinstance(cls, type) else cls)


def everywhere(test):
    return pytest.mark.parametrize("mode", MODES)(of_class(STEADY)(test))


def steps_by_itself(optimizer):
    """How many steps were those of the class."""
    return link_of(optimizer).ledger.updater.own_steps


def each_step(model, optimizer, i):
    yield from everything(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
@of_class([*STEADY, *SET_UP])
def test_steps_have_the_bits_of_the_class(make, mode):
    same_steps(trained(make, between=each_step, steps=12, pending=False), mode)


@pytest.mark.parametrize("make", STEADY)
def test_backward_updates_one_by_one_once_groups_are_set_up(make):
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode="backward")
    for i in range(6):
        optimizer.zero_grad()
        before, own = snapshot(list(model.parameters())), steps_by_itself(optimizer)
        loss_of(model, i).backward()
        changed = any(map(torch.Tensor.any, map(torch.ne, before, model.parameters())))
        optimizer.step()
        assert changed == (steps_by_itself(optimizer) == own), f"step {i}"
    assert 1 <= steps_by_itself(optimizer) <= 3


@pytest.mark.parametrize("mode", MODES)
@of_class([*STEADY, *SET_UP])
def test_gradients_may_be_missing_in_some_steps_and_the_first_parameter_may_have_none(make, mode):
    """The counter is then in another one's state."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        parameters = list(model.parameters())
        without = {2: [0], 5: [0, 1], 6: [3], 7: [0, 2]}.get(i % 9, [])
        for n in without:
            parameters[n].requires_grad_(False)
        loss_of(model, i).backward()
        for n in without:
            parameters[n].requires_grad_(True)
        optimizer.step()
        yield from everything(model, optimizer)

    same_steps(trained(make, iteration=iteration, steps=16), mode)


@everywhere
def test_a_parameter_may_get_its_first_gradient_late(make, mode):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        first = next(model.parameters()).requires_grad_(i > 3)
        loss_of(model, i).backward()
        optimizer.step()
        yield from everything(model, optimizer)
        yield "first", first

    # The counts that WarmsUp has then are those of no trial, so that all steps are its own.
    prove = mode == "backward" and make is not WarmsUp
    same(trained(make, iteration=iteration, steps=9), mode, prove=prove)


@pytest.mark.parametrize("first, end", [(0, 12), (0, 6), (1, 12), (6, 9)])
@pytest.mark.parametrize("make", WAIT_FOR_FROZEN)
def test_the_class_may_wait_for_frozen_parameters(make, first, end):
    """Their steps are then of all parameters, as the class takes them."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        model[0].bias.requires_grad_(not first <= i < end)
        loss_of(model, i).backward()
        model[0].bias.requires_grad_(True)
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(make, iteration=iteration, steps=12), "backward", prove=False)


@pytest.mark.parametrize("make", WAIT_FOR_FROZEN)
def test_parameters_without_state_leave_steps_to_the_class(make):
    def script(wrap):
        model = net()
        model[0].bias.requires_grad_(False)
        optimizer = wrap(make(model.parameters()))
        for i in range(8):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            yield "parameters", snapshot(list(model.parameters()))

    same(script, "backward", prove=False)


@everywhere
def test_groups_have_counters_of_their_own_and_may_have_no_gradient(make, mode):
    def start(wrap):
        model = net()
        a, *others = model.parameters()
        return model, wrap(make([{"params": [a]}, {"params": others, "lr": 3e-2}]))

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        first = next(model.parameters()).requires_grad_(i % 4 != 3)
        loss_of(model, i).backward()
        first.requires_grad_(True)
        optimizer.step()
        yield from everything(model, optimizer)

    same_steps(trained(start=start, iteration=iteration, steps=12), mode)


@everywhere
def test_a_group_may_be_added_late(make, mode):
    def start(wrap):
        model = net()
        some = list(model.parameters())
        return model, wrap(make(some[2:]))

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
        if i == 5:
            optimizer.add_param_group({"params": list(model.parameters())[:2], "lr": 2e-2})
        yield from everything(model, optimizer)

    same_steps(trained(start=start, iteration=iteration, steps=12), mode)


@pytest.mark.parametrize("counter", ["kept", "lost"])
@everywhere
def test_a_state_may_be_loaded(make, mode, counter):
    """Without the option that has the counter, the class looks for it in the state of each
    parameter."""

    def between(model, optimizer, i):
        if i == 6:
            saved = copy.deepcopy(optimizer.state_dict())
            for group in saved["param_groups"] if counter == "lost" else ():
                del group["count"], group["size"]
            optimizer.load_state_dict(saved)
        yield from everything(model, optimizer)

    same_steps(trained(make, between=between, steps=12, pending=False), mode)


@everywhere
def test_an_optimizer_may_be_fused_after_some_steps_and_unfused(make, mode):
    def script(wrap):
        model = net()
        optimizer = make(model.parameters())
        for i in range(12):
            if i == 4:
                optimizer = wrap(optimizer)
            if i == 9 and wrap.fused:
                optfuse.unfuse(optimizer)
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
            yield from everything(model, optimizer)

    same(script, mode, prove=False)


@everywhere
def test_rates_may_change_and_passes_may_add(make, mode):
    def script(wrap):
        model = net()
        optimizer = wrap(
            make(model.parameters()), **({"accumulate": 2} if mode == "backward" else {})
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for i in range(10):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, 2 * i + part).backward()
            optimizer.step()
            schedule.step()
            yield from everything(model, optimizer)

    same_steps(script, mode)


@pytest.mark.parametrize("make", [Grouped, Sums])
def test_gradients_are_left_after_step_as_the_class_leaves_them(make):
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode="backward")
    for i in range(5):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        assert all(p.grad is not None for p in model.parameters()), "there is one until step()"
        if i > FIRST:
            refused(lambda: next(model.parameters()).grad.norm(), "gradient")
        optimizer.step()
    left = [p.grad is not None for p in model.parameters()]
    assert all(left) if make is Sums else not any(left)


def test_its_maps_are_those_of_the_class():
    def script(wrap):
        model = net()
        optimizer = wrap(Grouped(model.parameters()))
        for i in range(5):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
        parameters = list(model.parameters())
        yield "parts", [optimizer.parts[p] for p in parameters]
        yield "owners", [optimizer.owners[optimizer.address(p)][1] for p in parameters]
        entry = optimizer.state[parameters[0]][0]
        yield "one object", entry["t"] is optimizer.param_groups[0]["count"]

    same(script, "backward")


def test_its_maps_have_the_items_of_the_class():
    def script(wrap):
        model = net()
        optimizer = wrap(KeepsNorms(model.parameters()))
        for i in range(6):
            optimizer.zero_grad()
            model[2].bias.requires_grad_(i != 4)
            loss_of(model, i).backward()
            optimizer.step()
            yield "norms", [optimizer.norms[p] for p in model.parameters()]

    same(script, "backward")


def test_maps_have_no_items_of_placeholders_where_a_group_has_no_gradient():
    def script(wrap):
        model = net()
        a, *others = model.parameters()
        optimizer = wrap(DividesAll([{"params": [a]}, {"params": others}]))
        for i in range(6):
            optimizer.zero_grad()
            a.requires_grad_(i < 4)
            loss_of(model, i).backward()
            optimizer.step()
            yield "parts", (len(optimizer.parts), len(optimizer.owners))

    same(script, "backward")


def test_groups_that_share_a_rate_are_refused():
    a, *others = net().parameters()
    groups = [{"params": [a]}, {"params": others}]
    refused(lambda: optfuse.fuse(Leads(groups)), "independently", way_out="as it is")


@of_class(COUPLED)
def test_coupling_that_lasts_is_refused(make):
    words = "independently"
    refused(lambda: optfuse.fuse(make(net().parameters())), words, way_out="as it is")


def steady(make):
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode="backward")
    for i in range(4):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    return model, optimizer


@of_class(LATE)
def test_what_no_trial_has_seen_ends_updates(make, monkeypatch):
    model, optimizer = steady(make)
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(make, "is_late", True)
    with pytest.raises(optfuse.Error, match="as it did not when"):
        loss_of(model, 5).backward()
        optimizer.step()


def test_state_in_a_dict_of_an_entry_may_not_change_between_backward_and_step():
    model, optimizer = steady(Grouped)
    first = next(model.parameters())
    with torch.no_grad():
        optimizer.state[first][0]["m"].mul_(2)
    refused(optimizer.step, "was written in place", way_out="after step()")
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 5).backward()
    kept = optimizer.state[first][0]
    kept["m"] = kept["m"].clone()
    refused(optimizer.step, "state[0]['m']", way_out="after step()")
    optimizer.step()


def test_groups_stay_as_they_are_between_backward_and_step():
    model, optimizer = steady(WarmsUp)
    optimizer.param_groups[0]["params"].reverse()
    refused(optimizer.step, "param_groups", way_out="after step()")
    optimizer.param_groups[0]["params"].reverse()
    optimizer.step()


def test_state_that_makes_a_group_unsteady_between_backward_and_step_is_refused():
    model, optimizer = steady(SkipsFirst)
    last = list(model.parameters())[-1]
    entry = optimizer.state[last].pop(0)
    refused(optimizer.step, "between backward() and step()", way_out="after step()")
    optimizer.state[last][0] = entry
    optimizer.step()


def test_a_class_that_is_not_registered_is_refused():
    class Unknown(Grouped):
        pass

    refused(lambda: optfuse.fuse(Unknown(net().parameters())), "traced", way_out="register")


def test_an_optimizer_dies_with_its_last_name():
    import gc
    import weakref

    _, optimizer = steady(Grouped)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
