# SPDX-License-Identifier: BSD-3-Clause
"""Deeds that backward mode refuses, each with the guard that notices it: what needs a gradient that
backward() has used, and what step() was to obey."""

import copy

import torch
from common import adamw, sgd
from torch import nn

import optfuse
from programs.deed import (
    ALONE,
    BACKWARD,
    BEFORE_STEP,
    BOOL,
    DIFFERS,
    EITHER,
    EQUAL,
    IN_BACKWARD,
    LEFT,
    STEP,
    consumed,
    deed,
    raises,
)
from programs.models import rows

LATE = "between backward() and step()"
ONLY_ADAMW = {"kinds": ("AdamW",), "weight": 0}


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises("second gradient arrived"), fault="twice")
def second_backward_after_zeroing(world):
    world.model().zero_grad()
    world.backward(world.loss(0, 1))


@deed(backward=consumed("already been applied"), fault="consumed_twice", weight=0)
def step_again(world):
    world.step(0)


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises("was discarded, zeroed"), fault="discarded")
def zero_the_model_before_step(world):
    world.model().zero_grad()


OPTIONS = {
    "lr": lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
    "weight_decay": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "lr, by a hook": lambda optimizer: optimizer.register_step_pre_hook(
        lambda chosen, *_: chosen.param_groups[0].update(lr=0.5)
    ),
}


@deed(
    BEFORE_STEP,
    **ONLY_ADAMW,
    change=OPTIONS,
    backward=lambda kind, change: raises(f"'{change.split(',')[0]}'", LATE),
    goes_on=True,
    fault="late",
)
def another_option_before_step(world, change):
    change(world.optimizer())


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises(LATE, "parameter 0 of group 0"))
def other_gradients_before_step(world):
    for p in world.params():
        p.grad = torch.ones_like(p)


@deed(BEFORE_STEP, **ONLY_ADAMW, stock=EITHER, backward=raises(LATE), fault="late_groups")
def fewer_parameters_before_step(world):
    world.optimizer().param_groups[0]["params"].pop()


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises(LATE), goes_on=True, fault="late_state")
def no_state_before_step(world):
    world.optimizer().state.clear()


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises(LATE), goes_on=True, fault="written")
def state_written_before_step(world):
    world.optimizer().state[world.param()]["exp_avg"].zero_()


@deed(
    STEP,
    weight=0,
    name=("found_inf", "grad_scale"),
    kinds=("AdamW", "SGD", "Adam", "Adagrad"),
    backward=lambda kind, name: raises(LATE, name),
    fault="late_scale",
    every=True,
)
def step_with_a_late_scale(world, name):
    """As GradScaler hands it over."""
    optimizer = world.optimizer()
    setattr(optimizer, name, torch.tensor(1.0))
    try:
        world.step(0)
    finally:
        delattr(optimizer, name)


@deed(STEP, kinds=("RMSprop", "Rprop", "Adadelta"))
def step_with_a_scale_that_it_ignores(world):
    optimizer = world.optimizer()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    world.step(0)
    del optimizer.grad_scale, optimizer.found_inf


@deed(
    BEFORE_STEP,
    weight=0,
    backward=consumed("Nothing was loaded"),
    goes_on=True,
    fault="late_load",
    kinds=("AdamW", "SGD"),
)
def load_a_state_before_step(world):
    """Stock's step() would update it."""
    optimizer = world.optimizer()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises("call step() first"), fault="added_late")
def pass_that_adds_before_step(world):
    world.model().zero_grad()
    with optfuse.accumulate(world.optimizer()):
        world.backward(world.loss(0, 1))


@deed(
    BACKWARD, **ONLY_ADAMW, backward=raises("create_graph=True"), fault="create_graph", goes_on=True
)
def create_a_graph(world, loss):
    world.backward(loss, create_graph=True)
    for p in world.params():
        p.grad = p.grad.detach()


@deed(BACKWARD, **ONLY_ADAMW, backward=raises("GradScaler"), fault="scaler", goes_on=True)
def scale_a_loss(world, loss):
    world.backward(torch.amp.GradScaler("cpu").scale(loss))


@deed(BACKWARD, weight=0, kinds=("AdamW", "Adagrad"))
def scale_by_a_disabled_scaler(world, loss):
    world.backward(torch.amp.GradScaler("cpu", enabled=False).scale(loss))


@deed(weight=0, fault="recheck", kinds=("AdamW",), turns=1)
def evict_the_hooks_of_gradients(world):
    """Assigning this attribute drops every hook of the slot, ours included: step() notices."""
    for p in world.params():
        p._post_accumulate_grad_hooks = {}
    world.train()
    before = world.created()
    world.optimizer().zero_grad()
    world.backward(world.loss(0, 1))
    if world.mode == "backward":
        more = world.created() - before
        assert more == len(world.params()), f"{more} updates ran inside backward"
    world.step(0)


@deed(IN_BACKWARD, **ONLY_ADAMW)
def groups_changed_inside_backward(world):
    if world.mode == "backward":
        optimizer, extra = world.optimizer(), {"params": [nn.Parameter(torch.ones(2))]}
        world.refused(lambda: optimizer.add_param_group(extra), way_out="before")
        world.refused(lambda: optfuse.unfuse(optimizer), way_out="before")


@deed(STEP, **ONLY_ADAMW, proves=False, backward=raises("zero_grad()"))
def unfuse_before_step(world):
    """step() would count, and find nothing to do."""
    optimizer = world.optimizer()
    if world.fused:
        optfuse.unfuse(optimizer)
    optimizer.step()
    if world.fused:
        world.wrap(optimizer)


@deed(BEFORE_STEP, **ONLY_ADAMW, backward=raises(), stock=EITHER)
def share_the_memory_of_gradients(world):
    """Sharing the model's memory moves its gradients, too."""
    world.model().share_memory()


def skip(world):
    for i in range(len(world.optimizers)):
        world.stepped(i)


@deed(STEP, weight=0, turns=1, backward=DIFFERS, kinds=("AdamW", "SGD", "RMSprop", "Lion"))
def skip_the_last_step(world):
    """It is made already."""
    skip(world)


@deed(STEP, **ONLY_ADAMW, backward=raises("zero_grad() before step()"))
def skip_a_step(world):
    """The next backward() has nothing to do with its gradients."""
    skip(world)


# ---- groups that come and go


def two_groups(params):
    return adamw([{"params": [params[0]], "lr": 1.0}, {"params": [params[1]], "lr": 0.5}])


def ones():
    return [nn.Parameter(torch.ones(2)) for _ in range(2)]


@deed(ALONE, backward=raises("param_groups", "zero_grad()"), fault="groups")
def group_taken_away_before_backward(world):
    """The library would use another group's rate."""
    params = ones()
    optimizer = world.wrap(two_groups(params))
    del optimizer.param_groups[0]
    sum(params).sum().backward()
    optimizer.step()
    world.see("weights", params)


@deed(ALONE)
def group_taken_away_and_put_back(world):
    a, b = params = ones()
    optimizer = world.wrap(two_groups(params))
    for i in range(5):
        if i == 2:
            del optimizer.param_groups[0]
        if i == 4:
            optimizer.param_groups[0]["params"].append(a)
        a.grad = b.grad = None
        optimizer.zero_grad()
        (a.sum() + b.sum()).backward()
        optimizer.step()
        world.see("weights", params)


@deed(ALONE, set_to_none=(True, False))
def parameter_left_out_of_a_pass(world, set_to_none):
    a, b = params = ones()
    optimizer = world.wrap(adamw(params))
    for i in range(4):
        optimizer.zero_grad(set_to_none)
        (a.sum() * 2 + (b.sum() if i % 2 else 0)).backward()
        optimizer.step()
    world.see("weights", params)


@deed(ALONE)
def parameter_that_never_needed_a_gradient(world):
    """It has no record of autograd's, where the gradient hook would be kept."""
    model = world.build()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    world.wrap(adamw(model.parameters()))
    for i in range(4):
        if i == 2:
            model.frozen.requires_grad_()
        world.train(lambda i=i: world.loss(0, i) + (model.frozen * i).square().sum())
    world.look(gradients=False)


# ---- several passes, several optimizers


@deed(ALONE, backward=raises(), fault="nested")
def counted_pass_inside_of_another(world):
    model = world.build()
    if world.mode == "backward":
        world.passes = 2
    optimizer = world.wrap(adamw(model.parameters()))
    checked = torch.utils.checkpoint.checkpoint
    for i in range(2):
        checked(model, rows(i).requires_grad_(), use_reentrant=True).sum().backward()
    optimizer.step()
    world.see("weights", list(model.parameters()))


@deed(ALONE, backward=LEFT, fault=("shared_state", "early_state", "written"))
def state_of_another_optimizer(world):
    """It is used in the order of step()."""
    models = [world.build() for _ in range(2)]
    optimizers = [world.wrap(adamw(model.parameters())) for model in models]
    for i in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(rows(i + n)).square().mean() for n, model in enumerate(models)).backward()
        for optimizer in optimizers:
            optimizer.step()
        if i == 0:
            optimizers[1].load_state_dict(optimizers[0].state_dict())
    world.see("weights", [p for model in models for p in model.parameters()])


@deed(ALONE, copied=BOOL, backward=lambda kind, copied: EQUAL if copied else DIFFERS)
def state_that_stock_uses_before_step(world, copied):
    """The fused optimizer has used it in backward, before it could know."""
    models = [world.build() for _ in range(2)]
    one, other = world.wrap(sgd(models[0].parameters())), sgd(models[1].parameters())
    for i in range(3):
        one.zero_grad()
        other.zero_grad()
        sum(model(rows(i)).square().mean() for model in models).backward()
        other.step()
        one.step()
        if i == 0:
            state = one.state_dict()
            other.load_state_dict(copy.deepcopy(state) if copied else state)
    world.see("weights", [p for model in models for p in model.parameters()])


@deed(ALONE, backward=raises("already belongs to another optimizer"))
def flush_one_of_two_with_one_weight(world):
    p = nn.Parameter(torch.ones(4))
    one, other = world.wrap(sgd([p])), world.wrap(adamw([p]))
    p.grad = torch.ones(4)
    one.step()
    other.step()
    if world.fused:
        optfuse.flush(one)
    world.see("weight", p)


@deed(ALONE, backward=raises(), fault="early_state")
def state_that_backward_has_used_for_another(world):
    first, second = params = ones()
    one, other = (world.wrap(adamw([p])) for p in params)
    for p, optimizer in ((first, one), (second, other)):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other.state[second] = one.state[first]
    first.sum().backward()
    second.sum().backward()
    other.step()
    world.see("weight", second)


@deed(ALONE)
def backward_over_parts_of_one_graph(world):
    """Generator and discriminator: the first pass must not update what the second still needs."""
    model = world.build()
    parts = [list(layer.parameters()) for layer in (model[0], model[2])]
    optimizers = [world.wrap(adamw(part)) for part in parts]
    for i in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = model(rows(i))
        out.square().sum().backward(retain_graph=True, inputs=parts[1])
        out.sum().backward(inputs=parts[0])
        for optimizer in optimizers:
            optimizer.step()
    world.look(gradients=False)


@deed(ALONE)
def weight_read_behind_autograds_back(world):
    """x @ w.data: the graph holds the memory, and backward reads it."""
    w, other = params = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer = world.wrap(adamw(params))
    for i in range(4):
        optimizer.zero_grad()
        ((torch.tanh(rows(i) @ other) @ w.data) @ w).square().sum().backward()
        optimizer.step()
    world.see("weights", params)
    world.see("state", optimizer.state_dict())


LASTS = ("flush", "add a group", "step")


@deed(ALONE, last=LASTS, backward=raises(), setup={"wait_from": 0})
def clipped_gradient_that_another_optimizer_reads(world, last):
    """The end of the first one's clipping came before the second one's update once, which then
    clipped the gradient again."""
    p, q = params = [nn.Parameter(torch.randn(64)) for _ in range(2)]
    first = world.wrap(sgd(params, lr=0.1))
    second = world.wrap(sgd(params, lr=0.1, momentum=0))
    p.square().sum().backward()
    for optimizer, norm in ((first, 0.05), (second, 0.025)):
        optfuse.clip_grad_norm_(optimizer, norm)
        optimizer.step()
    p.grad = None
    if last == "step":
        q.square().sum().backward()
        first.step()  # makes state
    elif last == "flush":
        world.launch()
    else:
        first.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        first.zero_grad()
    world.see("weight", p)


# ---- what kernels refuse at step(), and nothing has changed


def with_sparse(params):
    params[1].grad = params[1].grad.to_sparse()


def with_another_dtype(params):
    params[1].grad_dtype = None  # lets a gradient of any dtype in
    params[1].grad = params[1].grad.double()


@deed(
    ALONE,
    by={"adamw": adamw, "sgd": sgd},
    change={"sparse": with_sparse, "another dtype": with_another_dtype},
    product=True,
)
def gradient_that_step_refuses(world, by, change):
    """Not even the parameters that come before are updated."""
    params = ones()
    optimizer = world.wrap(by([("first", params[0]), ("second", params[1])]))
    for p in params:
        p.grad = torch.ones(2)
    if world.fused:
        change(params)
        words = {with_sparse: "sparse", with_another_dtype: "another dtype"}[change]
        world.refused(optimizer.step, "'second'", words, way_out="")
        params[1].grad = torch.ones(2)
    world.see("weights", params)
    assert all(entry.get("step", 0) == 0 for entry in optimizer.state.values())
    optimizer.step()
    world.see("weights", params)
    world.see("state", optimizer.state_dict())


@deed(ALONE)
def bad_state_of_groups_that_look_alike(world):
    params = ones()
    optimizer = world.wrap(adamw([{"params": [p]} for p in params]))
    sum(params).sum().backward()
    optimizer.step()
    if world.fused:
        optimizer.state[params[1]]["step"] = 5
        world.refused(optimizer.step, way_out="parameter 0 of group 1")
    world.see("weights", params)


BAD_GROUPS = {
    "complex": lambda: {"params": [torch.zeros(3, dtype=torch.complex64, requires_grad=True)]},
    "oops": lambda: {"params": ones(), "lr": "oops"},
}


@deed(weight=0, kinds=("AdamW", "SGD"), words=tuple(BAD_GROUPS))
def group_that_can_not_be_added(world, words):
    """It leaves the others working."""
    optimizer = world.optimizer()
    try:
        if world.fused:
            optimizer.add_param_group({**BAD_GROUPS[words](), "fused": words == "oops"})
    except (RuntimeError, ValueError) as error:
        assert words in str(error)
    world.see("groups", len(optimizer.param_groups))
