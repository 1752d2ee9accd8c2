# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: other objects in param_groups and state, equal to those before or not: each step takes
what is there."""

import collections

import torch
from torch import nn

from programs.deed import ALONE, deed, raises


def entry_of_one(optimizer):
    return optimizer.state[optimizer.param_groups[0]["params"][1]]


def parameters_in_a_tuple(optimizer):
    group = optimizer.param_groups[0]
    group["params"] = tuple(group["params"])


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


def an_equal_rate(optimizer):
    optimizer.param_groups[0]["lr"] = float(str(optimizer.param_groups[0]["lr"]))


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


def state_of_other_addresses(optimizer):
    """A freed tensor's address comes back at once."""
    for entry in optimizer.state.values():
        for factor in (0.5, 3.0):
            entry["exp_avg"] = entry["exp_avg"] * factor
        entry["step"] = entry["step"].clone()


def lists_of_other_addresses(optimizer):
    for _ in range(3):
        for group in optimizer.param_groups:
            group["params"] = group["params"][::-1]
    optimizer.param_groups = list(optimizer.param_groups)


class Entries(collections.UserDict):
    """A state that is no dict; stock takes it."""

    def __missing__(self, param):
        return self.data.setdefault(param, {})


def state_that_is_no_dict_and_then_changes(optimizer):
    if type(optimizer.state) is Entries:
        entry = entry_of_one(optimizer)
        entry["exp_avg"] = entry["exp_avg"] * 3
    optimizer.state = Entries(optimizer.state)


CHANGES = (
    state_of_other_addresses,
    lists_of_other_addresses,
    state_that_is_no_dict_and_then_changes,
    a_tensor_in_a_tuple_that_then_changes,
    groups_in_a_tuple,
    a_group_of_a_class_with_values_of_its_own,
    an_equal_rate,
    other_moments_in_a_list_that_then_changes,
    a_rate_that_is_a_tensor_and_then_changes,
    options_in_another_order_and_one_more,
    a_group_that_is_another_dict,
    parameters_in_a_tuple,
    a_parameter_in_the_next_group,
    parameters_exchanged_between_groups,
    copies_of_all_entries,
    a_copy_of_one_step,
    two_tensors_exchanged,
    entries_in_another_order,
)


@deed(setup={"groups": 2}, kinds=("AdamW",), change=CHANGES)
def change_the_objects(world, change):
    change(world.optimizer())


@deed(weight=0, kinds=("AdamW",), models=("one storage",))
def entries_under_other_keys(world):
    """In the same order; the parameters have one shape."""
    state = world.optimizer().state
    keys, entries = list(state), list(state.values())
    state.clear()
    state.update(zip(reversed(keys), entries, strict=True))


@deed(ALONE)
def rate_that_is_changed_twice_between_two_looks(world):
    """A freed float's address comes back at once."""
    p = nn.Parameter(torch.ones(3))
    optimizer = world.wrap(torch.optim.AdamW([p], fused=True))
    for i in range(1000):
        for rate in (i + 1, i):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rate % 7)
        optimizer.zero_grad()
        (p * (i % 5 - 2)).sum().backward()
        optimizer.step()
    world.see("weights", p)


@deed(setup={"groups": 2}, kinds=("AdamW",))
def options_that_a_failed_step_has_told(world):
    """The first group's rate is told, the second's refused; then both are as before."""
    groups = world.optimizer().param_groups
    rates = [group["lr"] for group in groups]
    if world.fused:
        groups[0]["lr"], groups[1]["lr"] = 0.5, None
        seen = len(world.seen)
        try:
            world.train()
        except (TypeError, RuntimeError):
            del world.seen[seen:]
            world.unsettled.clear()
        else:
            raise AssertionError("no error was raised")
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for p in world.params():
        p.grad = None


def in_closure(world, change):
    optimizer = world.optimizer()

    def closure():
        optimizer.zero_grad()
        loss = world.loss(0, world.i)
        if change == "group" and not world.turn:
            world.extra.append(nn.Parameter(torch.ones(3, 3)))
            optimizer.add_param_group({"params": world.extra[-1:], "lr": 0.2})
        world.backward(loss)
        if change == "rate":
            optimizer.param_groups[0]["lr"] *= 0.7
        return loss

    world.see("loss", world.step(0, closure))


@deed(weight=0, kinds=("AdamW", "SGD"))
def group_that_a_closure_adds(world):
    in_closure(world, "group")


@deed(weight=0, kinds=("AdamW", "SGD"), backward=raises("'lr'"))
def rate_that_a_closure_changes(world):
    """Backward mode has updated with the old one."""
    in_closure(world, "rate")
