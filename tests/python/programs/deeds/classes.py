# SPDX-License-Identifier: BSD-3-Clause
"""Deeds by each class that has kernels, or operators in the order of its step()."""

import copy
import functools
import math

import numpy as np
import torch
from optim_entries import OURS
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import optfuse
from programs.deed import ALONE, BEFORE_FUSE, BOOL, EITHER, EQUAL, deed, raises
from programs.deeds.keeping import train_apart
from programs.deeds.reading import saved
from programs.models import numbers
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


# ---- Adafactor and Muon: PyTorch's operators in the order of the class's step()

OPERATORS = {
    "Adafactor": (
        {},
        {"lr": 1},
        {"lr": 0.3, "weight_decay": 0.1, "maximize": True, "eps": (1e-5, 1e-2)},
        {"beta2_decay": -0.3, "d": 2, "eps": [None, 0.5]},
        {"foreach": True},
        {"lr": torch.tensor(0.1)},
    ),
    "Muon": (
        {},
        {"lr": 0.1, "nesterov": False, "ns_steps": 3},
        {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3},
        {"adjust_lr_fn": "original", "momentum": 0.3, "ns_coefficients": (3, -4.5, 2.0)},
        {"lr": torch.tensor(0.1, dtype=torch.float64)},
    ),
}
OF_OPERATORS = {
    f"{name} {i}": functools.partial(getattr(torch.optim, name), **options)
    for name, every in OPERATORS.items()
    for i, options in enumerate(every)
}
MATRICES = ((1, 1), (20, 50), (50, 20), (257, 131), (1, 9))
SIZES = {"Adafactor": ((), (1,), (1000,), (40_003,), *MATRICES, (2, 3, 5, 7), (6, 1, 9))}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def train_by_operators(world, make, params, steps=6):
    """Gradients of many sizes; the versions of state are stock's as well."""
    optimizer = world.wrap(make(params))
    for i in range(steps):
        optimizer.zero_grad()
        world.backward(
            sum(
                (p * numbers(99 * i + k, *p.shape).mul(10.0 ** (i % 5 - 3)).to(p.dtype)).sum()
                for k, p in enumerate(params)
            )
        )
        optimizer.step()
        world.stepped(0)
    world.see("parameters", params)
    world.see("state", optimizer.state_dict())
    entries = [optimizer.state[p] for p in params]
    world.see("versions", [t._version for e in entries for t in e.values() if torch.is_tensor(t)])


@deed(ALONE, of=OF_OPERATORS, dtype=DTYPES, threads=(1, 2), proves=False)
def training_by_operators(world, of, dtype, threads):
    sizes = SIZES.get(of.func.__name__, MATRICES)
    torch.set_num_threads(threads)
    try:
        params = [nn.Parameter(numbers(k, *size).to(dtype)) for k, size in enumerate(sizes)]
        train_by_operators(world, of, params)
    finally:
        torch.set_num_threads(1)


@deed(ALONE, of=OF_OPERATORS, proves=False)
def strides_by_operators(world, of):
    wide, turned = numbers(1, 12, 40)[:, ::2], numbers(2, 9, 14).t()
    train_by_operators(world, of, [nn.Parameter(wide), nn.Parameter(turned)])


@deed(ALONE, proves=False)
def two_dtypes_in_a_group_of_operators(world):
    """The class takes the epsilon of the first one's dtype for all."""
    params = [nn.Parameter(torch.ones(3).to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    train_by_operators(world, torch.optim.Adafactor, params)


#: Options that no constructor takes, set later.
STRANGE = {
    "no such way to adjust": {"adjust_lr_fn": "other"},
    "a number as way to adjust": {"adjust_lr_fn": 1.0},
    "no momentum": {"momentum": 0},
    "a tensor as momentum": {"momentum": torch.tensor(0.5)},
    "endless rate": {"lr": math.inf},
    "no number": {"eps": (math.nan, 1e-3)},
    "NumPy's number": {"lr": np.float32(0.1)},
    "growing": {"beta2_decay": 0.3},
}


@deed(weight=0, kinds=("Adafactor", "Muon"), options=STRANGE, every=("Adafactor", "Muon"))
def options_that_no_constructor_takes(world, options):
    group = world.optimizer().param_groups[0]
    before = {key: group[key] for key in options if key in group}
    if isinstance(before.get("eps"), float):
        return  # those of Adafactor are two
    group.update((key, options[key]) for key in before)
    world.train()
    world.train()
    group.update(before)


EDITS = {
    "the order of the keys": lambda e: [e.update({k: e.pop(k)}) for k in ("row_var", "step")],
    "one key more": lambda e: e.update(note=torch.ones(3)),
    "a number more": lambda e: e.update(note=3),
    "a counter in float64": lambda e: e.update(step=e["step"].double()),
    "a counter before the first": lambda e: e.update(step=torch.tensor(-0.5)),
    "a view": lambda e: e.update(row_var=torch.ones(10, 2)[::2, :1]),
    "another one": lambda e: e.update(row_var=torch.ones(5, 1), col_var=torch.ones(1, 4)),
    "a scaled one": lambda e: e["row_var"].mul_(3.0),
}


@deed(weight=0, kinds=("Adafactor",), edit=EDITS, turns=1)
def edit_the_state_of_adafactor(world, edit):
    edit(world.optimizer().state[world.param(0)])


OF_OURS = {
    f"{name} {i}": functools.partial(getattr(optfuse.optim, name), **options)
    for name, entry in OURS.items()
    for i, options in enumerate((*entry.options, {"lr": torch.tensor(0.003)}))
}


@deed(
    ALONE,
    of=OF_OURS,
    clips=BOOL,
    product=True,
    backward=lambda kind, clips, **_: raises("clipping") if clips else EQUAL,
)
def passes_by_our_classes(world, of, clips):
    """Their gradients are clipped, or added up."""
    world.passes = 1 if clips else 3
    _, optimizer = world.own(make=of)
    for i in range(6):
        optimizer.zero_grad()
        for k in range(world.passes):
            world.backward(world.loss(0, 3 * i + k))
        if clips:
            world.see("norm", optfuse.clip_grad_norm_(world.params(), 0.1))
        world.step(0)
    world.look(gradients=False)
