# SPDX-License-Identifier: BSD-3-Clause
"""Actions between two calls of the training loop, on what step() will read: groups, state and
attributes of optimizers, and weights. Backward mode compares them at step()."""

import collections
import copy

import torch
from own_classes import Drops, Tensors
from torch import nn

import optfuse
from programs.deed import ALONE, BEFORE_STEP, DIFFERS, EITHER, EQUAL, INDEX, deed, raises
from programs.deeds.writing import WRITES
from programs.optimizers import RECORDED, has_closure

# Those that PyTorch's versions tell; the others are a row of docs/hazards.md.
SEEN = {
    name: way
    for name, way in WRITES.items()
    if name not in ("copy_ into data", "mul_ of data", "data =", "numpy", "storage")
}


def tensors_in(entry):
    return [key for key, value in entry.items() if torch.is_tensor(value)]


@deed("anywhere", weight=6, what=("weight", "state"), index=INDEX, way=SEEN, backward=EITHER)
@torch.no_grad()
def write_before_step(world, what, index, way):
    tensor = world.tensor(what, index)
    if tensor is not None:
        way(tensor)


UNSEEN = {name: way for name, way in WRITES.items() if name not in SEEN and name != "storage"}


@deed(
    BEFORE_STEP, weight=0, way=UNSEEN, backward=DIFFERS, kinds=("AdamW", "SGD", "RMSprop", "Lion")
)
@torch.no_grad()
def write_past_the_versions_before_step(world, way):
    """It stays."""
    way(world.param(2))


# ---- what backward mode says of it

KINDS = (
    *("AdamW", "SGD", "RMSprop", "Adafactor", "AdaBelief", "TensorCounter"),
    *("RegisteredTensors", "RegisteredNumbers", "RegisteredNewTensors"),
)


def refused(kind, words):
    """Counters of recorded classes advance together."""
    return raises("between backward() and step()", words if kind.way != RECORDED else "")


def of_groups(kind, change, **_):
    if change in ("replaced", "removed", "emptied", "moved"):
        return refused(kind, "parameter 0 of group 0")
    return EITHER if kind.way == RECORDED else EQUAL


LOST = ("cleared", "exchanged", "by_dict", "popped", "entry_cleared")
WRITTEN = ("values_of_zeros", "zeros_after_a_new_group", "zeros_before_a_new_group")


def of_state(kind, change, **_):
    if change in LOST or (change in WRITTEN and kind.way != RECORDED):
        return refused(kind, "of parameter 0 of group 0")
    if change in ("value_of_zeros", "tensor_written", "counter_written", "extra_key"):
        return EITHER  # there may be none, and a class may read the key
    if change in ("entry_cloned", "value_cloned", "own_tensors_loaded"):
        return EITHER  # other tensors, where there are some
    return EITHER if kind.way == RECORDED else EQUAL


# ---- groups


def replaced(world, optimizer, group, i):
    """As 3D Gaussian splatting densifies."""
    old = group["params"][i]
    new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
    new.grad = None
    for model in world.models:
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is old:
                    module._parameters[name] = new
    group["params"][i] = new
    optimizer.state.pop(old, None)


def removed(world, optimizer, group, i):
    group["params"].pop(i).requires_grad_(False)


def emptied(world, optimizer, group, i):
    for p in group["params"]:
        p.requires_grad_(False)
    group["params"] = []


def moved(world, optimizer, group, i):
    optimizer.param_groups.append({**group, "lr": 0.2, "params": [group["params"].pop(i)]})


def moved_with_its_options(world, optimizer, group, i):
    optimizer.param_groups.append({**group, "params": [group["params"].pop(i)]})


def lists_copied(world, optimizer, group, i):
    for one in optimizer.param_groups:
        one["params"] = list(one["params"])


def groups_copied(world, optimizer, group, i):
    optimizer.param_groups = [dict(one) for one in optimizer.param_groups]


def groups_by_dict(world, optimizer, group, i):
    optimizer.__dict__.update(param_groups=list(optimizer.param_groups))


def groups_reversed(world, optimizer, group, i):
    optimizer.param_groups.reverse()


def params_reversed(world, optimizer, group, i):
    group["params"].reverse()


def frozen(world, optimizer, group, i):
    group["params"][i].requires_grad_(False)


def defaults(world, optimizer, group, i):
    optimizer.defaults["lr"] = 7.0


GROUPS = {
    change.__name__: change
    for change in (
        replaced,
        removed,
        emptied,
        moved,
        moved_with_its_options,
        lists_copied,
        groups_copied,
        groups_by_dict,
        groups_reversed,
        params_reversed,
        frozen,
        defaults,
    )
}


@deed(
    "anywhere",
    weight=8,
    optimizer=INDEX,
    group=INDEX,
    index=INDEX,
    change=GROUPS,
    stock=EITHER,
    every=KINDS,
    goes_on=True,
    backward=EITHER,
    late=of_groups,
)
def change_groups(world, optimizer, group, index, change):
    chosen = world.optimizer(optimizer)
    one = chosen.param_groups[group % len(chosen.param_groups)]
    if one["params"]:
        change(world, chosen, one, index % len(one["params"]))


@deed("anywhere", weight=2, optimizer=INDEX, rows=(1, 3), backward=EITHER)
def add_a_group_before_step(world, optimizer, rows):
    p = nn.Parameter(torch.linspace(-1, 1, rows * 3).view(rows, 3))
    world.extra.append(p)
    world.optimizer(optimizer).add_param_group({"params": [p], "lr": 0.2})


# ---- state


def cleared(optimizer, p):
    optimizer.state.clear()


def exchanged(optimizer, p):
    optimizer.state = collections.defaultdict(dict)


def copied(optimizer, p):
    optimizer.state = collections.defaultdict(dict, optimizer.state)


def by_dict(optimizer, p):
    optimizer.__dict__.update(state=collections.defaultdict(dict))


def popped(optimizer, p):
    optimizer.state.pop(p, None)


def entry_cleared(optimizer, p):
    optimizer.state[p].clear()


def entry_copied(optimizer, p):
    if p in optimizer.state:
        optimizer.state[p] = dict(optimizer.state[p])


def entry_cloned(optimizer, p):
    if p in optimizer.state:
        optimizer.state[p] = copy.deepcopy(optimizer.state[p])


def value_of_zeros(optimizer, p):
    entry = optimizer.state.get(p, {})
    for key in tensors_in(entry)[-1:]:
        entry[key] = torch.zeros_like(entry[key])


def values_of_zeros(optimizer, p):
    for key, value in optimizer.state.get(p, {}).items():
        optimizer.state[p][key] = value * 0


def zeros_after_a_new_group(optimizer, p):
    """The library is told of all parameters anew."""
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    values_of_zeros(optimizer, p)


def zeros_before_a_new_group(optimizer, p):
    values_of_zeros(optimizer, p)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def tensor_written(optimizer, p):
    entry = optimizer.state.get(p, {})
    for key in tensors_in(entry)[-1:]:
        entry[key].zero_()


def counter_written(optimizer, p):
    entry = optimizer.state.get(p, {})
    for key in [key for key in tensors_in(entry) if not entry[key].dim()][:1]:
        entry[key].fill_(7)


def value_cloned(optimizer, p):
    entry = optimizer.state.get(p, {})
    for key in tensors_in(entry)[:1]:
        entry[key] = entry[key].clone()


def extra_key(optimizer, p):
    if p in optimizer.state:
        optimizer.state[p]["a note"] = 1


def own_tensors_loaded(optimizer, p):
    optimizer.load_state_dict(optimizer.state_dict())


STATES = {
    change.__name__: change
    for change in (
        cleared,
        exchanged,
        copied,
        by_dict,
        popped,
        entry_cleared,
        entry_copied,
        entry_cloned,
        value_of_zeros,
        values_of_zeros,
        zeros_after_a_new_group,
        zeros_before_a_new_group,
        tensor_written,
        counter_written,
        value_cloned,
        extra_key,
        own_tensors_loaded,
    )
}


@deed(
    "anywhere",
    weight=8,
    optimizer=INDEX,
    index=INDEX,
    change=STATES,
    every=KINDS,
    goes_on=True,
    backward=EITHER,
    late=of_state,
)
def change_state(world, optimizer, index, change):
    chosen = world.optimizer(optimizer)
    params = [p for group in chosen.param_groups for p in group["params"]]
    if params:
        change(chosen, params[index % len(params)])


@deed(
    ALONE,
    change={name: STATES[name] for name in (*LOST, *WRITTEN)},
    backward=raises("between backward() and step()", "of parameter 0 of group 0"),
)
def change_state_in_the_first_iteration(world, change):
    """It was made inside backward."""
    _, optimizer = world.own()
    world.backward(world.loss(0, 0))
    change(optimizer, world.param())
    world.step(0)
    world.look(gradients=False)


@deed(weight=1, models=("joins later",), every=(*KINDS, "Elementwise", "Lists"))
def look_at_the_order_of_state(world):
    """Also of a parameter whose first gradient comes later, and each key in its place."""
    optimizer, numbers = world.optimizer(), {p: n for n, p in enumerate(world.params())}
    world.see("order", [numbers[p] for p in optimizer.state])
    world.see("keys", [list(entry) for entry in optimizer.state.values()])
    world.see("saved", list(optimizer.state_dict()["state"]))


@deed(
    "before step",
    kinds=("RegisteredTensors",),
    weight=15,
    is_option=(False, True),
    every=True,
    backward=raises("between backward() and step()", "'last_loss'"),
    goes_on=True,
)
def notes_before_step(world, is_option):
    """Nobody looks whether the class's code reads them."""
    if is_option:
        world.optimizer().param_groups[0]["last_loss"] = 1.0
    else:
        world.optimizer().last_loss = 1.0


class Scaled(Tensors):
    """Reads an attribute."""

    scale = 1.0

    def update(self, group, p, state):
        p.add_(p.grad, alpha=-group["lr"] * self.scale)


class ByName(Tensors):
    """Reads an option and an attribute by names that are made at run time."""

    def update(self, group, p, state):
        rates = dict(group.items())
        p.add_(p.grad, alpha=-rates["l" + "r"] * getattr(self, "fact" + "or", 1.0))


class OfTorch(torch.optim.RMSprop):
    """Only torch's code reads its options."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


@deed(ALONE, proves=False)
def class_that_drops_gradients(world):
    optfuse.register(Drops)
    world.own(make=Drops)
    for _ in range(4):
        world.train()
    world.look()


OF_CLASSES = {
    "scale": (Scaled, lambda optimizer: setattr(optimizer, "scale", 100)),
    "factor": (ByName, lambda optimizer: setattr(optimizer, "factor", 2.0)),
    "factor ": (ByName, lambda optimizer: optimizer.param_groups[0].update(factor=2.0)),
    "alpha": (OfTorch, lambda optimizer: optimizer.param_groups[0].update(alpha=0.5)),
}


@deed(
    ALONE,
    of=OF_CLASSES,
    backward=lambda kind, of: raises("between backward() and step()", f"'{of.strip()}'"),
    goes_on=True,
    proves=False,
)
def what_a_registered_class_reads(world, of):
    cls, change = of
    optfuse.register(cls)
    _, optimizer = world.own(make=cls)
    world.train()
    world.train()
    optimizer.zero_grad()
    world.backward(world.loss(0, 2))
    change(optimizer)
    world.step(0)
    world.look(gradients=False)


# ---- hooks and closures that do so in step()


@deed(
    "anywhere",
    weight=3,
    optimizer=INDEX,
    index=INDEX,
    groups=GROUPS,
    state=STATES,
    backward=EITHER,
    stock=EITHER,
)
def step_with_a_hook_that_changes(world, optimizer, index, groups, state):
    def hook(chosen, args, kwargs):
        change_state(world, optimizer, index, state)
        change_groups(world, optimizer, index, index, groups)

    handle = world.optimizer(optimizer).register_step_pre_hook(hook)
    for reference in world.references:
        reference.last()
    try:
        world.step(optimizer)
    finally:
        handle.remove()


@deed(
    "anywhere",
    weight=3,
    optimizer=INDEX,
    model=INDEX,
    index=INDEX,
    change=STATES,
    backward=EITHER,
    kinds=has_closure,
)
def step_with_a_closure_that_changes(world, optimizer, model, index, change):
    def closure():
        for one in world.optimizers:
            one.zero_grad()
        loss = world.loss(model, index)
        world.backward(loss)
        change_state(world, optimizer, index, change)
        return loss

    world.see("loss", world.step(optimizer, closure))


def buffers_of(sgd):
    """Whether those that step() would update with momentum have a buffer: {True}, {False}, both."""
    groups = [group for group in sgd.param_groups if group["momentum"]]
    used = [p for group in groups for p in group["params"] if p.grad is not None]
    return {sgd.state.get(p, {}).get("momentum_buffer") is not None for p in used}


@deed(
    "anywhere", weight=4, optimizer=INDEX, scale=(None, 8.0), inf=(None, 0.0, 1.0), backward=EITHER
)
def step_with_scale(world, optimizer, scale, inf):
    """As GradScaler hands them over to stock's fused kernels."""
    chosen = world.optimizer(optimizer)
    if not chosen.param_groups[0].get("fused"):
        return  # others assert that there is none, or ignore it
    if isinstance(chosen, torch.optim.SGD) and len(buffers_of(chosen)) == 2:
        return  # stock raises a TypeError, see reference.py
    if isinstance(chosen, torch.optim.SGD) and inf and False in buffers_of(chosen):
        return  # stock makes buffers and writes nothing to them
    tensors = [*world.params(), *(p.grad for p in world.params() if p.grad is not None)]
    tensors += [entry[key] for entry, key in world.states()]
    if world.overlapping or not all(t.is_contiguous() for t in tensors):
        return  # stock's own step() runs, which goes through memory: see reference.py
    given = {"grad_scale": scale, "found_inf": inf}
    for name, value in given.items():
        if value is not None:
            setattr(chosen, name, torch.tensor(value))
    try:
        world.step(optimizer)
    finally:
        for name in given:
            chosen.__dict__.pop(name, None)
