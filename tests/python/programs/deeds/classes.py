# SPDX-License-Identifier: BSD-3-Clause
"""Deeds by each class that has kernels, or operators in the order of its step()."""

import copy

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from programs.deed import ALONE, BEFORE_FUSE, EITHER, deed
from programs.deeds.keeping import train_apart
from programs.deeds.reading import saved
from programs.optimizers import CLASSES, has_no_attributes, made_by

BY_EACH = {"weight": 0, "kinds": CLASSES}


@deed(**BY_EACH, turns=1, models=("batch norm", "encoder"))
def train_for_long(world):
    """A bit that differs once changes each loss."""
    for _ in range(100):
        world.train()
    assert all(p.isfinite().all() for p in world.params()), "of numbers that are NaN"


# ---- options


@deed(setup={"groups": 2}, kinds=CLASSES)
def option_of_one_group(world):
    for group in world.optimizer().param_groups[1:]:
        if "weight_decay" in group:
            group["weight_decay"] = 0.3


#: They choose an implementation, or need other state from the start.
FIXED = ("params", "foreach", "fused", "capturable", "differentiable", "centered", "amsgrad",
         "momentum", "dampening", "nesterov")  # fmt: skip


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple) and all(isinstance(v, float) for v in value):
        return tuple(v * 0.9 for v in value)
    return (value * 0.5 or 0.1) if isinstance(value, float) else value


@deed(**BY_EACH, turns=1)
def change_every_option(world):
    """One after the other, while updates with the old value are pending."""
    group = world.optimizer().param_groups[0]
    for option in [key for key in group if key not in FIXED]:
        group[option] = changed(group[option])
        world.train()


IN_FLOAT32 = ("ASGD", "Adamax", "NAdam", "RAdam")


@deed(**BY_EACH)
def rate_that_is_a_tensor(world):
    """Where stock computes with it in float32, the reference is given the number."""
    group, rate = world.optimizer().param_groups[0], torch.tensor(0.02)
    as_number = not world.fused and world.specs[0]["kind"] in IN_FLOAT32
    for _ in range(3):
        group["lr"] = rate.item() if as_number else rate
        world.train()
        rate.mul_(0.7)
    group["lr"] = rate.item()


@deed(**BY_EACH)
def another_optimizer_of_its_class(world):
    """It steps, and refuses what the class refuses, in its words."""
    cls, twin = type(world.optimizer()), copy.deepcopy(world.model())
    try:
        cls(list(twin.parameters())[:1], lr=-1.0)
    except ValueError as error:
        world.see("words", str(error))
    options = {key: world.optimizer().defaults[key] for key in ("lr", "weight_decay", "fused")
               if key in world.optimizer().defaults}  # fmt: skip
    other = cls([p for p in twin.parameters() if p.dim() == 2], **options)
    world.see("class", type(other) is type(world.make(world.specs[0])))
    train_apart(world, twin, other)


# ---- state


@deed(ALONE, by=CLASSES)
def state_begins_with_the_first_gradient(world, by):
    """Or at once."""
    params = list(world.build().parameters())
    optimizer = world.wrap(made_by(by, params))
    for act in (lambda: None, optimizer.step, world.train, world.train):
        act()
        world.see("length", len(optimizer.state))
        world.see("state", [dict(optimizer.state.get(p, {})) for p in params])


@deed(ALONE, by=CLASSES)
def parameters_that_have_names(world, by):
    model = world.build()
    optimizer = world.wrap(made_by(by, model.named_parameters()))
    for _ in range(3):
        world.train()
    world.see("names", optimizer.param_groups[0]["param_names"])
    world.look(gradients=False)


NEWER = ("foreach", "fused", "maximize", "capturable", "differentiable")


def in_another_order(optimizer, kept):
    optimizer.param_groups[0]["params"].reverse()
    n = len(kept["param_groups"][0]["params"])
    kept["state"] = {n - 1 - i: state for i, state in kept["state"].items()}


def without_newer_options(optimizer, kept):
    for option in NEWER:
        kept["param_groups"][0].pop(option, None)


def with_steps_that_are_numbers(optimizer, kept):
    for state in kept["state"].values():
        if "step" in state:
            state["step"] = float(state["step"])


def by_torch_save(optimizer, kept):
    kept.update(saved(kept))


HOW = (in_another_order, without_newer_options, with_steps_that_are_numbers, by_torch_save)


@deed(weight=0, how=HOW, every=CLASSES, kinds=has_no_attributes)
def another_optimizer_loads_its_state(world, how):
    model, kept = copy.deepcopy((world.model(), world.optimizer().state_dict()))
    world.models, own = [model], world.models
    optimizer = world.make(world.specs[0])
    world.models = own
    how(optimizer, kept)
    optimizer = world.wrap(optimizer)
    optimizer.load_state_dict(kept)
    for group in optimizer.param_groups:  # stock's default may be another implementation
        group.update({key: optimizer.defaults[key] for key in NEWER if key in optimizer.defaults})
    train_apart(world, model, optimizer)


ENTRIES = {
    "a flag": ("ran", True),
    "a tensor": ("buffer", torch.ones(3)),
    "a list": ("history", [1, 2]),
    "nothing": (None, None),
    "a dict": (("a", 1), {"step": 5}),
}


@deed(weight=0, entry=ENTRIES, every=("AdamW", "Adafactor", "Elementwise"))
def state_of_what_is_no_parameter(world, entry):
    """As hooks leave some: neither their keys nor what they are concerns an update."""
    hook = world.optimizer().register_step_post_hook(lambda it, *_: it.state.update([entry]))
    world.train()
    world.see("entry", world.optimizer().state[entry[0]])
    world.train()
    hook.remove()


# ---- hooks

PLACES = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre",
          "load_state_dict_post")  # fmt: skip


@deed(**BY_EACH)
def hooks_of_every_kind(world):
    optimizer, seen = world.optimizer(), []

    def saw(what):
        return lambda it, *given: seen.append((what, it is optimizer, given[1:] == ({},)))

    handles = [getattr(optimizer, f"register_{what}_hook")(saw(what)) for what in PLACES]
    handles.append(register_optimizer_step_pre_hook(saw("pre, of all")))
    handles.append(register_optimizer_step_post_hook(saw("post, of all")))
    world.train()
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    world.train()
    world.see("calls", seen)


@deed(BEFORE_FUSE, weight=0)
def hooks_from_before_fuse(world):
    for what in PLACES[:2]:
        register = getattr(world.optimizer(), f"register_{what}_hook")
        register(lambda it, args, options, what=what: world.see(what, [len(args), options]))


def make_missing_state(optimizer, args, kwargs):
    for p in optimizer.param_groups[0]["params"]:
        if not optimizer.state[p]:
            averages = {k: torch.full_like(p, 0.25) for k in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(2.0), **averages}


@deed(BEFORE_FUSE, weight=0, kinds=("AdamW",))
def hook_that_makes_the_state(world):
    """It is called before stock makes any."""
    world.optimizer().register_step_pre_hook(make_missing_state)


@deed(weight=0, kinds=("AdamW",), models=("joins later",))
def hook_that_makes_state_when_others_have_some(world):
    world.add_step_hook(0, make_missing_state)


# ---- parameters


def without_a_gradient(world):
    """A loss of all parameters but every third; others in each iteration."""
    return sum((p * world.loss(0, 1).detach()).square().sum()
               for k, p in enumerate(world.params()) if (k + world.i) % 3)  # fmt: skip


@deed(**BY_EACH)
def iterations_that_leave_parameters_out(world):
    """Their steps are not counted."""
    for _ in range(3):
        world.train(lambda: without_a_gradient(world))


@deed(ALONE, by=CLASSES)
def float64_as_the_default_dtype(world, by):
    torch.set_default_dtype(torch.float64)
    try:
        model = world.build("two dtypes")
        world.wrap(made_by(by, model.parameters()))
        for _ in range(4):
            world.train()
        world.look(gradients=False)
    finally:
        torch.set_default_dtype(torch.float32)


SIXTEEN = tuple(name for name in CLASSES if name not in ("SGD", "Adafactor"))
EMPTY = tuple(name for name in CLASSES if name not in ("Adafactor", "Muon"))


@deed(weight=0, kinds=EMPTY, models=("odd sizes",))
def iteration_of_odd_sizes(world):
    world.train()


@deed(weight=0, kinds=("Adafactor", "Muon"), models=("odd sizes",), stock=EITHER, backward=EITHER)
def iteration_of_sizes_that_it_fails_at(world):
    """As stock."""
    world.train()


@deed(weight=0, kinds=("SGD", "Adafactor"), models=("two dtypes",))
def iteration_in_two_dtypes(world):
    world.train()


@deed(weight=0, kinds=SIXTEEN, models=("four dtypes",))
def iteration_in_four_dtypes(world):
    """In 16 bits stock's SGD is broken."""
    world.train()


# ---- numbers that are no floats: PyTorch's for-loop computes with them in Python

IN_DOUBLE = ("AdamW", "SGD", "Adagrad", "Lion", "Adan")
LOOPS = ("RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD")
OF_ANY = {"weight": 0, "models": ("mlp", "mlp in float64"), "every": True}


def convert(world, to, only=None):
    for group in world.optimizer().param_groups:
        for key in (only,) if only else [key for key in group if key != "params"]:
            if type(group[key]) is float:
                group[key] = to(group[key])
            elif type(group[key]) is tuple:
                group[key] = tuple(map(to, group[key]))


@deed(BEFORE_FUSE, **OF_ANY, kinds=IN_DOUBLE, to=(np.float32, np.float64))
def numbers_of_numpy(world, to):
    """These classes compute in double."""
    convert(world, to)


@deed(BEFORE_FUSE, **OF_ANY, kinds=LOOPS)
def numbers_of_numpy_in_float64(world):
    convert(world, np.float64)


@deed(BEFORE_FUSE, **OF_ANY, kinds=("RMSprop", "Adadelta"))
def rate_that_is_only_negated(world):
    """It may be of any precision."""
    convert(world, np.float32, "lr")


@deed(weight=0, kinds=("NAdam", "RAdam", "Adamax", "ASGD"))
def rate_that_a_scheduler_makes_float32(world):
    """It is refused at the next step, and nothing is updated."""
    group = world.optimizer().param_groups[0]
    rate, kept = group["lr"], list(world.seen)
    if world.fused:
        group["lr"] = np.float32(0.9) * np.float32(rate)
    world.refused(world.train, "option 'lr'", way_out="float(")
    world.seen[:] = kept
    world.unsettled.clear()
    world.see("weights", [p.detach() for p in world.params()])
    group["lr"] = rate
    world.optimizer().zero_grad()
