# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: copies, checkpoints and averages of models and optimizers."""

import copy
import io
import pickle

import torch
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from programs.deed import ALONE, BOOL, DIFFERS, EQUAL, INDEX, LAUNCHES, deed
from programs.deeds.reading import saved
from programs.deeds.renewing import COPIES
from programs.optimizers import CLASSES, KINDS, has_no_attributes


@deed(weight=3, by_reference=BOOL)
def remember(world, by_reference):
    """A checkpoint in memory; by reference it goes on with the training."""
    models = [m.state_dict() for m in world.models]
    optimizers = [o.state_dict() for o in world.optimizers]
    kept = (models, optimizers)
    world.saved.append(kept if by_reference else copy.deepcopy(kept))


@deed(weight=3, index=INDEX)
def remember_by_saving(world, index):
    models = [m.state_dict() for m in world.models]
    world.saved.append(saved((models, [o.state_dict() for o in world.optimizers])))


@deed(weight=3, index=INDEX, what=("model", "optimizer", "both"))
def go_back(world, index, what):
    if not world.saved:
        return
    models, optimizers = world.saved[index % len(world.saved)]
    if what != "optimizer":
        for model, kept in zip(world.models, models, strict=True):
            model.load_state_dict(kept)
    if what != "model":
        for optimizer, kept in zip(world.optimizers, optimizers, strict=False):
            optimizer.load_state_dict(kept)


@deed(index=INDEX)
def look_at_a_checkpoint(world, index):
    if world.saved:
        world.see("checkpoint", list(world.saved[index % len(world.saved)]))


@deed(weight=1)
def forget_checkpoints(world):
    world.saved.clear()


@deed(kinds=has_no_attributes)
def go_on_with_deepcopies(world):
    models, optimizers, extra = copy.deepcopy((world.models, world.optimizers, world.extra))
    world.extra = extra
    # A copy of a fused optimizer is fused.
    world.replace(models, optimizers if world.fused else list(map(world.wrap, optimizers)))


@deed(forward=LAUNCHES)
def deepcopy_of_the_models(world):
    twins = copy.deepcopy(world.models)
    world.see("copies", [p.detach() for m in twins for p in m.parameters()])


@deed(how=("pickle", "torch.save"), kinds=has_no_attributes, every=CLASSES)
def resume_from_memory(world, how):
    """Model and optimizer in one file; what is loaded is a stock optimizer."""
    together = (world.models, world.optimizers, world.extra)
    if how == "pickle":
        together = pickle.loads(pickle.dumps(together))
    else:
        memory = io.BytesIO()
        torch.save(together, memory)
        memory.seek(0)
        together = torch.load(memory, weights_only=False)
    models, optimizers, world.extra = together
    world.replace(models, [world.wrap(optimizer) for optimizer in optimizers])


@deed(model=INDEX, foreach=BOOL)
def start_an_average(world, model, foreach):
    averaging = {"multi_avg_fn": get_ema_multi_avg_fn(0.7)} if foreach else {}
    n = model % len(world.models)
    world.averages.append((n, AveragedModel(world.models[n], **averaging)))


@deed(weight=4, index=INDEX)
def update_an_average(world, index):
    if world.averages:
        n, average = world.averages[index % len(world.averages)]
        average.update_parameters(world.models[n])
        world.see("average", [p.detach() for p in average.parameters()])


@deed(weight=1, foreach=BOOL)
def average_after_each_step(world, foreach):
    if not world.averages:
        start_an_average(world, 0, foreach)
    update_an_average(world, 0)


@deed(weight=1, forward=LAUNCHES)
def load_other_weights(world):
    model = world.model()
    model.load_state_dict({k: v * 0 + 0.1 for k, v in model.state_dict().items()})


@deed(weight=0, forward=LAUNCHES)
def load_the_weights_of_before(world):
    if world.turn:
        go_back(world, 0, "model")
    else:
        remember(world, by_reference=False)


@deed(weight=1, index=INDEX)
@torch.no_grad()
def take_an_average(world, index):
    if world.averages:
        n, average = world.averages[index % len(world.averages)]
        for p, q in zip(world.models[n].parameters(), average.module.parameters(), strict=True):
            p.copy_(q)


@deed(model=INDEX, forward=LAUNCHES)
@torch.no_grad()
def average_by_hand(world, model):
    for p in world.model(model).parameters():
        twin = p.detach().clone()
        p.lerp_(twin * 0.5, 0.25)


def train_apart(world, model, optimizer):
    """Trains a model and an optimizer that are not the world's own."""
    for i in range(2):
        optimizer.zero_grad()
        world.loss(0, 9 + i, model).backward()
        optimizer.step()
    world.see("apart", [p.detach() for p in model.parameters()])
    world.see("state apart", optimizer.state_dict())


@deed(weight=0, kinds=has_no_attributes, how=COPIES, every=CLASSES)
def train_beside_a_copy(world, how):
    world.optimizer().zero_grad()
    (model,), (optimizer,) = how((world.models, world.optimizers))
    world.see("class", type(optimizer).__name__)
    given = {"step", "step_parameter", "step_param", "supports_fused_back_pass"}
    world.see("attributes", sorted(k for k in set(vars(optimizer)) - given if k[0] != "_"))
    world.train()
    train_apart(world, model, optimizer)


@deed(
    ALONE,
    scheduled=(None, "before fuse()", "after"),
    forward=lambda kind, scheduled: DIFFERS if scheduled == "after" else EQUAL,
    backward=lambda kind, scheduled: DIFFERS if scheduled else EQUAL,
    proves=False,
)
def copy_that_has_all_attributes(world, scheduled):
    """Stock's has the step() that a scheduler has put on the original, and steps that one."""
    model = world.build()
    optimizer = KINDS["Elementwise"].make(model.parameters())
    schedulers = [ConstantLR(optimizer)] if scheduled == "before fuse()" else []
    world.wrap(optimizer)
    schedulers += [ConstantLR(optimizer)] if scheduled == "after" else []
    world.train()
    train_apart(world, *copy.deepcopy((model, optimizer)))


@deed(weight=0, kinds=has_no_attributes, back=BOOL, every=CLASSES)
def go_on_in_a_stock_optimizer(world, back):
    """The stock optimizer takes the state over, and hands it back."""
    model, kept = copy.deepcopy((world.model(), world.optimizer().state_dict()))
    world.models, own = [model], world.models
    optimizer = world.make(world.specs[0])
    world.models = own
    optimizer.load_state_dict(kept)
    train_apart(world, model, optimizer)
    if back:
        world.model().load_state_dict(model.state_dict())
        world.optimizer().load_state_dict(optimizer.state_dict())


@deed(weight=0)
def load_its_earlier_state(world):
    kept = copy.deepcopy(world.optimizer().state_dict())
    world.train()
    world.optimizer().load_state_dict(kept)
