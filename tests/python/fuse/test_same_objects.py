# SPDX-License-Identifier: BSD-3-Clause
"""Other objects in param_groups and state from one step to the next, equal to those
before or not: each step takes what is there."""

import pytest
import torch
from common import adamw, everything, net, same, train
from scripts import trained
from torch import nn

STEPS = 6


def entry_of_one(optimizer):
    return optimizer.state[optimizer.param_groups[0]["params"][1]]


def reversed_parameters(optimizer):
    optimizer.param_groups[0]["params"].reverse()


def parameters_in_a_tuple(optimizer):
    group = optimizer.param_groups[0]
    group["params"] = tuple(group["params"])


def another_list_with_the_same_parameters(optimizer):
    group = optimizer.param_groups[0]
    group["params"] = list(group["params"])


def a_parameter_in_the_next_group(optimizer):
    """The parameters of all groups, one after the other, stay the same."""
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def parameters_exchanged_between_groups(optimizer):
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def copies_of_all_entries(optimizer):
    for p, entry in list(optimizer.state.items()):
        optimizer.state[p] = {name: value.clone().mul_(2) for name, value in entry.items()}


def a_copy_of_one_tensor(optimizer):
    entry = entry_of_one(optimizer)
    entry["exp_avg"] = entry["exp_avg"].clone().mul_(2)


def a_copy_of_one_step(optimizer):
    entry = entry_of_one(optimizer)
    entry["step"] = entry["step"] + 3


def two_tensors_exchanged(optimizer):
    entry = entry_of_one(optimizer)
    first, second = entry["exp_avg"].square(), entry["exp_avg_sq"].sqrt()
    entry["exp_avg"], entry["exp_avg_sq"] = second, first


def entries_in_another_order(optimizer):
    for p, entry in reversed(list(optimizer.state.items())):
        del optimizer.state[p]
        optimizer.state[p] = entry


def no_entry_of_the_last_parameter(optimizer):
    del optimizer.state[optimizer.param_groups[-1]["params"][-1]]


def another_rate(optimizer):
    optimizer.param_groups[1]["lr"] = 0.03


def an_equal_rate(optimizer):
    optimizer.param_groups[0]["lr"] = float(str(optimizer.param_groups[0]["lr"]))


def another_decay_of_both_groups(optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] *= 3


def other_moments_in_a_list_that_then_changes(optimizer):
    """The second time nothing is another object in the group itself."""
    group = optimizer.param_groups[0]
    if type(group["betas"]) is list:
        group["betas"][0] -= 0.2
    else:
        group["betas"] = [0.7, 0.98]


def a_rate_that_is_a_tensor_and_then_changes(optimizer):
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].mul_(2)
    else:
        group["lr"] = torch.tensor(0.02, dtype=torch.float64)


def options_in_another_order_and_one_more(optimizer):
    group = optimizer.param_groups[0]
    group["weight_decay"] = group.pop("weight_decay")
    group["of my own"] = "a note"


def a_group_that_is_another_dict(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.004}


def a_tensor_in_a_tuple_that_then_changes(optimizer):
    """Stock takes the numbers of its beta at each step."""
    group = optimizer.param_groups[0]
    if isinstance(group["betas"][0], torch.Tensor):
        group["betas"][0].sub_(0.1)
    else:
        group["betas"] = (torch.tensor(0.8, dtype=torch.float64), 0.999)


def groups_in_a_tuple(optimizer):
    optimizer.param_groups = tuple(optimizer.param_groups)


class Doubling(dict):
    """Gives twice the rate that is in it."""

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return 2 * value if key == "lr" else value


def a_group_of_a_class_with_values_of_its_own(optimizer):
    optimizer.param_groups[0] = Doubling(optimizer.param_groups[0])


CHANGES = (
    a_tensor_in_a_tuple_that_then_changes,
    groups_in_a_tuple,
    a_group_of_a_class_with_values_of_its_own,
    another_rate,
    an_equal_rate,
    another_decay_of_both_groups,
    other_moments_in_a_list_that_then_changes,
    a_rate_that_is_a_tensor_and_then_changes,
    options_in_another_order_and_one_more,
    a_group_that_is_another_dict,
    reversed_parameters,
    parameters_in_a_tuple,
    another_list_with_the_same_parameters,
    a_parameter_in_the_next_group,
    parameters_exchanged_between_groups,
    copies_of_all_entries,
    a_copy_of_one_tensor,
    a_copy_of_one_step,
    two_tensors_exchanged,
    entries_in_another_order,
    no_entry_of_the_last_parameter,
)


both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


@both_modes
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_objects_changed_between_steps(change, mode):
    def start(wrap):
        model = nn.Sequential(net(), nn.Linear(3, 3))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}]
        optimizer = wrap(adamw(groups))
        return model, optimizer

    def between(model, optimizer, i):
        optimizer.zero_grad()
        if i in (2, 4):
            change(optimizer)

    same(trained(start=start, between=between), mode)


@both_modes
def test_entries_in_the_same_order_under_other_keys(mode):
    def script(wrap):
        params = [nn.Parameter(torch.full((3,), float(i))) for i in range(4)]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            sum(i * p.square().sum() for i, p in enumerate(params)).backward()
            optimizer.step()
            wrap.pending()
            optimizer.zero_grad()
            if i in (2, 4):
                keys, entries = list(optimizer.state), list(optimizer.state.values())
                optimizer.state.clear()
                optimizer.state.update(zip(reversed(keys), entries, strict=True))
        yield "parameters", [p.detach() for p in params]

    same(script, mode)


@both_modes
def test_options_that_a_failed_step_has_told_are_told_again(mode):
    """The first group's rate is told, the second's refused; then both are as before."""

    def script(wrap):
        model = nn.Sequential(net(), nn.Linear(3, 3))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        optimizer = wrap(adamw(groups))
        for i in range(STEPS):
            train(model, optimizer, i)
            optimizer.zero_grad()
            if wrap.fused and i in (1, 3):
                rates = [group["lr"] for group in optimizer.param_groups]
                optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, None
                with pytest.raises((TypeError, RuntimeError)):
                    train(model, optimizer, i)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                for p in model.parameters():
                    p.grad = None
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
@pytest.mark.parametrize("what", ("rate", "group"))
def test_changes_inside_a_closure(what, mode):
    if mode == "backward" and what == "rate":
        pytest.skip("backward fusion refuses it: it has updated with the old one")

    def script(wrap):
        model, late = net(), nn.Linear(3, 3)
        optimizer = wrap(adamw(model.parameters()))

        def closure():
            optimizer.zero_grad()
            loss = late(model(torch.ones(2, 6))).square().mean()
            if what == "group" and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.2})
            loss.backward()
            if what == "rate":
                optimizer.param_groups[0]["lr"] *= 0.7
            return loss

        for _ in range(STEPS):
            yield "loss", optimizer.step(closure)
        yield from everything(nn.Sequential(model, late), optimizer)

    same(script, mode)
