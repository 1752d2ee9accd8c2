# SPDX-License-Identifier: BSD-3-Clause
"""Deeds around a step() that is recorded: who calls it, who wraps it, what it is given, and what it
does beside tensors."""

import contextlib
import copy
import ctypes
import functools
import io
import os
import pickle
import threading

import numpy as np
import torch
from recorded_classes import KINDS, Base
from torch import nn

import optfuse
from programs.deed import ALONE, BACKWARD, BOOL, DIFFERS, EITHER, STEP, deed
from programs.deeds.keeping import train_apart
from programs.models import numbers

SOME = ("Elementwise", "Looks", "Norms", "Coupled", "Lists")


def step_of(cls):
    """A deed that trains by this class."""

    def train(world):
        world.train()

    train.__name__ = f"train_by_{cls.__name__}"
    deed(make=cls, weight=0, turns=5, backward=EITHER)(train)
    return cls


@step_of
class ReadsByAddress(Base):
    """And writes."""

    def one(self, p, group, state):
        state["m"].add_(p.grad)
        first = ctypes.cast(state["m"].data_ptr(), ctypes.POINTER(ctypes.c_float))
        state["m"].mul_(0.5)
        first[0] += 1.0
        p.sub_(state["m"], alpha=group["lr"])
        self.seen.append(first[0])


@torch.compile(backend="eager")
def half(p, m, lr):
    m.mul_(0.5)
    return p - m * lr


@step_of
class CallsCompiledCode(Base):
    def one(self, p, group, state):
        state["m"].add_(p.grad)
        p.copy_(half(p, state["m"], group["lr"]))


def sum_in_a_child(*tensors):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(sum(t.sum() for t in tensors).item()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return float(pipe.read())


@step_of
class Forks(Base):
    """Both processes have its numbers."""

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        made = p * 2
        if self.n == 2 and p.dim() == 1:
            self.seen.append(sum_in_a_child(made, p))


class Raises(Base):
    def one(self, p, group, state):
        state["m"].add_(p.grad)
        p.sub_(state["m"], alpha=group["lr"])
        if self.n == 3 and p.dim() == 3:
            raise self.error("in the middle")


ERRORS = {error.__name__: error for error in (ValueError, KeyboardInterrupt, SystemExit)}


def of_an_interrupt(kind, error):
    """In backward() it ends what its hooks do in the middle."""
    return EITHER if error == "ValueError" else DIFFERS


@deed(ALONE, error=ERRORS, backward=of_an_interrupt, proves=False)
def exception_in_the_middle_of_step(world, error):
    """All that came before it has happened."""
    _, optimizer = world.own("shapes in float32", make=Raises)
    optimizer.error = error
    for i in range(6):
        try:
            world.train()
        except error:
            world.see("raised", i)
        world.look(gradients=False)
    world.see("later", torch.ones(3).mul_(2))


class ReadsAnArray(Base):
    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        self.seen.append(float(self.arrays[p].ravel()[0]))
        self.arrays[p] *= np.float32(0.5)


@deed(ALONE, backward=DIFFERS, proves=False)
def array_of_a_parameter_from_before_fuse(world):
    """Those that are named to fuse() are never absent."""
    params = list(world.build("shapes in float32").parameters())
    optimizer = ReadsAnArray(params)
    optimizer.arrays = {p: p.detach().numpy() for p in params}
    world.wrap(optimizer, fuse={"eager": params})
    for _ in range(4):
        world.train()
    world.see("seen", optimizer.seen)
    world.look(gradients=False)


class InvertsMatrices(Base):
    def one(self, p, group, state):
        grad = p.grad
        if p.dim() == 2 and torch.linalg.det(grad) != 3:
            grad = torch.linalg.inv(grad)
        p.sub_(grad)


@deed(ALONE, backward=EITHER, proves=False)
def operator_that_fails_by_numbers(world):
    """By the class's own error; what came before has happened."""
    params = [nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))]
    optimizer = world.wrap(InvertsMatrices(params))
    for i in range(4):
        params[0].grad, params[1].grad = torch.eye(3) * (i != 2), torch.ones(3)
        try:
            optimizer.step()
        except torch.linalg.LinAlgError:
            world.see("failed", i)
        world.see("weights", params)


# ---- who calls step()


@deed(STEP, weight=1)
def step_by_a_compiled_function(world):
    step = torch.compile(world.optimizer().step, backend="eager") if world.fused else None
    for i in range(len(world.optimizers)):
        step() if step and not i else world.optimizer(i).step()
        world.stepped(i)


@deed(STEP, weight=1, kinds=lambda kind: kind.has_closure)
def step_with_a_closure_that_is_none(world):
    for i in range(len(world.optimizers)):
        world.optimizer(i).step(None)
        world.stepped(i)


@deed(weight=1)
def step_of_an_instance_is_wrapped(world):
    optimizer, calls = world.optimizer(), []
    before = optimizer.step
    optimizer.step = lambda *args: (calls.append(1), before(*args))[1]
    world.train()
    world.see("calls", len(calls))
    optimizer.step = before


@deed(weight=0, kinds=SOME, backward=EITHER)
def step_of_an_instance_is_wrapped_before_fuse(world):
    optimizer = world.optimizer()
    if world.fused:
        optfuse.unfuse(optimizer)
    optimizer.zero_grad()
    if not world.turn:
        stock = optimizer.step
        optimizer.step = lambda: (stock(), stock())[1]
    if world.fused:
        world.wrap(optimizer)
    world.train()


class Plain(KINDS["Elementwise"]):
    pass


def halved(step):
    @functools.wraps(step)  # has the attributes of PyTorch's own wrapper, too
    def wrapper(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return step(self, closure)

    return wrapper


Plain([nn.Parameter(torch.ones(2))])  # PyTorch wraps step() when one is made


@step_of
class WrapsPyTorchsWrapper(Plain):
    step = halved(Plain.step)


@deed(weight=1, shapes=BOOL)
def iteration_under_a_profiler(world, shapes):
    with torch.profiler.profile(record_shapes=shapes):
        world.train()


@deed(weight=0, backward=EITHER, kinds=SOME)
def checkpoint_inside_of_a_hook(world):
    def save(optimizer, *_):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        world.see("saved", torch.load(file))

    handle = world.optimizer().register_step_post_hook(save)
    world.train()
    handle.remove()


@deed(ALONE, kind=SOME, backward=EITHER, proves=False)
def optimizers_that_step_in_threads_of_their_own(world, kind):
    params = list(world.build("shapes in float32").parameters())
    optimizers = [world.wrap(KINDS[kind]([p])) for p in params]
    for i, p in enumerate(params):
        p.grad = numbers(i, *p.shape)
    steps = [lambda o=o: [o.step() for _ in range(20)] for o in optimizers]
    threads = [threading.Thread(target=step) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.look()


TWO = [
    [{"kind": "Elementwise", "options": {}}, {"kind": other, "options": {}}]
    for other in ("AdamW", "Norms")
]


def iterations_of_two(world):
    """Both have all parameters."""
    world.train()


for i, two in enumerate(TWO):
    iterations_of_two.__name__ = f"iterations_of_two_of_which_{i + 1}_recorded"
    deed(weight=0, setup={"optimizers": two}, backward=EITHER, proves=False)(iterations_of_two)


@deed(ALONE, kind=SOME, by=("deepcopy", "pickle"), product=True, proves=False, backward=EITHER)
def copy_of_an_optimizer_with_all_it_has(world, kind, by):
    """A pickled one is stock's."""
    model, optimizer = world.own(make=KINDS[kind])
    for _ in range(2):
        world.train()
    optimizer.zero_grad()
    how = copy.deepcopy if by == "deepcopy" else lambda both: pickle.loads(pickle.dumps(both))
    train_apart(world, *how((model, optimizer)))
    world.train()


# ---- what it is given


@deed(STEP, weight=0, kinds=SOME)
def step_with_gradients_in_one_memory(world):
    """As DistributedDataParallel has them."""
    params = [p for p in world.params() if p.grad is not None]
    flat, at = numbers(world.i, sum(p.numel() for p in params)).to(params[0].dtype), 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    world.step(0)
    world.see("memory", flat)


@deed(STEP, weight=0, kinds=("AdamW", "Elementwise", "Looks", "AdaBelief"), backward=EITHER)
def step_with_expanded_gradients(world):
    for i, p in enumerate(world.params()):
        p.grad = torch.full((1,) * p.dim(), 2.0 + i + world.i).expand(p.shape)
    world.step(0)


@deed(BACKWARD, weight=1, models=("layers",), backward=EITHER)
def losses_of_parts(world, loss):
    """Every other pass has fewer parts."""
    for layer in world.modules()[: 3 - world.turn % 2]:
        world.backward(layer(torch.ones(2, 4)).square().mean())


@deed(BACKWARD, weight=0, models=("layers",), backward=EITHER)
def loss_of_some_layers(world, loss):
    x = torch.ones(3, 4)
    for i, layer in enumerate(world.modules()):
        if (world.turn + i) % (i + 1) == 0:
            x = layer(x)
    world.backward(x.square().mean())


@deed(weight=0, models=("layers",), backward=EITHER, turns=8)
def freeze_and_thaw_a_layer(world):
    world.modules()[1].requires_grad_(world.turn // 2 != 1)
    world.train()


@deed(STEP, weight=0, kinds=("AdamW", *SOME), backward=EITHER)
def step_with_gradients_of_frozen_ones(world):
    world.param().requires_grad_(False)
    for p in world.params():
        p.grad = torch.full_like(p, 0.5 + world.i)
    world.step(0)
    world.param().requires_grad_()


@deed(weight=0, kinds=("AdamW", *SOME, "AdaBelief"), backward=EITHER, forward=EITHER, stock=EITHER)
def state_of_another_precision_and_back(world):
    for entry, key in world.states():
        if entry[key].dim():
            entry[key] = entry[key].double() if not world.turn else entry[key].float().clone()
    world.train()


@deed(BACKWARD, weight=1)
def hook_that_sees_the_state_in_backward(world, loss):
    """Its numbers."""
    seen = []

    def hook(_):
        values = [x for entry in world.optimizer().state.values() for x in entry.values()]
        seen.append([x for x in values if isinstance(x, int | float)])

    handle = world.param().register_hook(hook)
    world.backward(loss)
    handle.remove()
    world.see("state", seen)


@deed(BACKWARD, weight=1, backward=EITHER, stock=EITHER)
def pass_that_a_hook_ends(world, loss):
    def end(_):
        raise SystemExit

    last = [p for p in world.params() if p.requires_grad and p.is_leaf][-1]
    handle = last.register_hook(end)
    with contextlib.suppress(SystemExit):
        world.backward(loss)
    world.in_backward = False
    handle.remove()


@deed(weight=1, kinds=("TrainsAndEvaluates, a style",))
def weights_to_evaluate_with(world):
    """Are others than those to train with, in some optimizers."""
    world.optimizer().eval()
    world.look(gradients=False)
    world.optimizer().train()


@deed(
    weight=0,
    models=("joins later", "branching"),
    kinds=("ByMany, a style",),
    every=True,
    turns=5,
    backward=EITHER,
)
def iteration_that_changes_what_has_no_gradient(world):
    world.train()
    world.look(gradients=False)
