# SPDX-License-Identifier: BSD-3-Clause
"""Deeds in a backward pass whose small gradients wait for each other: until their updates run,
everything is as before step() in stock. And gradients in memory that others know, which are left to
step()."""

import threading

import torch
from common import adamw, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from programs.deed import ALONE, BOOL, deed
from programs.deeds.failing import Fault, fail
from programs.models import rows


def zeroed(world):
    world.optimizer().zero_grad()


def zeroed_in_place(world):
    world.optimizer().zero_grad(set_to_none=False)


def taken_away(world):
    world.param(2).grad = None


def another(world):
    world.param(3).grad = torch.ones_like(world.param(3))


def doubled(world):
    world.param(2).grad.mul_(2)


def kept(world):
    world.held.append(("gradient", world.param(2).grad))


def clipped(world):
    nn.utils.clip_grad_norm_(world.params()[2:], 1e-3)


def weight_changed(world):
    world.param(2).data.mul_(0.5)


def state_dict(world):
    world.see("state", world.optimizer().state_dict())


def flushed(world):
    optfuse.flush()


def frozen(world):
    world.param(2).requires_grad_(False)


def looked_at(world):
    world.see("gradients", [p.grad for p in world.params()])
    world.see("weights", world.params())


MEANWHILE = (zeroed, zeroed_in_place, taken_away, another, doubled, kept, clipped, weight_changed,
             state_dict, flushed, frozen, looked_at)  # fmt: skip


@deed(ALONE, change=MEANWHILE, proves=False)
def hook_that_changes_what_waits(world, change):
    """The last layer's gradients have waited for a while when the first layer's is complete."""
    world.bucket_bytes = 0
    model, _ = world.own()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: change(world))
    for _ in range(4):
        model[2].weight.requires_grad_(True)
        world.train()
    world.look(gradients=False)


@deed(ALONE, by={"adamw": adamw, "sgd": sgd}, zero=BOOL, step=BOOL, product=True)
def what_a_failed_backward_has_left(world, by, zero, step):
    """Its gradients are there, and thrown away, added to or applied as in stock."""
    world.bucket_bytes = 0
    model, optimizer = world.own(make=by)
    for i in range(4):
        handle = model[2].register_full_backward_pre_hook(fail)
        try:
            world.loss(0, i + 10).backward()
        except Fault:
            world.see("gradients", [p.grad for p in model.parameters()])
        handle.remove()
        if step:
            optimizer.step()
        if zero or step:
            optimizer.zero_grad()
        world.loss(0, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    world.look(gradients=False)


HOOKED = ("before fuse", "after fuse", "both")


@deed(ALONE, when=HOOKED)
def hooks_of_others(world, when):
    """They fire, and see gradients; removed again they leave ours."""
    world.bucket_bytes = 0
    calls, handles = [], []
    model = world.build()

    def look(name):
        return lambda p: calls.append((name, p.grad.norm().item()))

    def note(name):
        return lambda grad: calls.append((name, "tensor"))

    def hook(when):
        for name, p in model.named_parameters():
            handles.append(p.register_post_accumulate_grad_hook(look((when, name))))
            handles.append(p.register_hook(note((when, name))))

    if when != "after fuse":
        hook("before")
    world.wrap(adamw(model.parameters()))
    if when != "before fuse":
        hook("after")
    for i in range(4):
        world.train()
        world.see("calls", sorted(map(str, calls)))
        for handle in handles if i == 2 else ():
            handle.remove()
    world.look(gradients=False)


@deed(ALONE)
def parameters_that_two_passes_share(world):
    """They are left to step()."""
    world.bucket_bytes = 0
    first, shared, last = model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = world.wrap(adamw(model.parameters()))
    for i in range(4):
        optimizer.zero_grad()
        x = checkpoint(lambda y: shared(y).tanh(), first(rows(i)).tanh(), use_reentrant=True)
        last(shared(x)).square().sum().backward()
        optimizer.step()
    world.see("weights", list(model.parameters()))


@deed(ALONE)
def two_threads_in_backward(world):
    """Each with parameters of its own, of one optimizer."""
    models = [world.build() for _ in range(2)]
    optimizer = world.wrap(adamw([p for model in models for p in model.parameters()]))
    for i in range(20):
        optimizer.zero_grad()
        losses = [model(rows(i + k)).square().mean() for k, model in enumerate(models)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
    world.see("weights", [p for model in models for p in model.parameters()])


# ---- gradients in memory that others know


def in_numpy(flat, begin, end, param):
    """The buffer is that of an array, and PyTorch's own reference to it is one."""
    return torch.from_numpy(flat.numpy()[begin:end]).view_as(param)


BUFFERS = {
    "views": lambda flat, begin, end, p: flat[begin:end].view_as(p),
    "detached": lambda flat, begin, end, p: flat[begin:end].view_as(p).detach(),
    "data": lambda flat, begin, end, p: flat.data[begin:end].view_as(p).data,
    "numpy": in_numpy,
}


@deed(
    ALONE,
    kind=BUFFERS,
    by={"adamw": adamw, "sgd": sgd},
    width=(6, 160),
    product=True,
    fault="buffer",
)
def buffer_of_gradients_that_is_scaled(world, kind, by, width):
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = world.wrap(by(model.parameters()))
    flat, end = torch.zeros(sum(p.numel() for p in model.parameters())), 0
    for p in model.parameters():
        begin, end = end, end + p.numel()
        p.grad = kind(flat, begin, end, p)
    for i in range(4):
        model(rows(i)).square().sum().backward()
        world.see("buffer", flat)
        flat.mul_(1e-3)
        optimizer.step()
        flat.zero_()
        world.see("weights", list(model.parameters()))


@deed(ALONE, by={"adamw": adamw, "sgd": sgd}, width=(6, 160), product=True)
def buffers_known_by_another_tensor(world, by, width):
    """One for each parameter."""
    model = nn.Linear(4, width)
    optimizer = world.wrap(by(model.parameters()))
    whole = [torch.zeros(p.numel()) for p in model.parameters()]
    for p, buffer in zip(model.parameters(), whole, strict=True):
        p.grad = buffer.detach().view(p.shape).detach()
    for i in range(4):
        model(rows(i)).square().sum().backward()
        torch._foreach_mul_(whole, 1e-3)
        optimizer.step()
        torch._foreach_zero_(whole)
        world.see("weights", list(model.parameters()))


class Weighted(torch.autograd.Function):
    """x * w; the gradient of w is a part of a buffer that is kept."""

    @staticmethod
    def forward(ctx, x, w, buffer):
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x * w

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        ctx.buffer[: x.numel()].copy_((slope * x).view(-1))
        return None, ctx.buffer[: x.numel()].view_as(x), None


@deed(ALONE, n=(30, 30_000))
def backward_that_keeps_the_memory_of_its_gradient(world, n):
    w = nn.Parameter(torch.ones(n))
    optimizer = world.wrap(adamw([w]))
    for i in range(4):
        optimizer.zero_grad()
        buffer = torch.empty(n + i)
        Weighted.apply(torch.full((n,), 0.5 + i), w, buffer).sum().backward()
        buffer.mul_(-1)
        optimizer.step()
        world.see("weight", w)


@deed(ALONE, n=(30, 30_000))
def gradients_that_are_parts_of_one(world, n):
    """Those of cat() are views of one gradient, of which a hook keeps another view."""
    params = [nn.Parameter(torch.full((n,), 1.0 + i)) for i in range(3)]
    optimizer = world.wrap(sgd(params))
    for i in range(4):
        optimizer.zero_grad()
        kept = []
        flat = torch.cat(params)
        flat.register_hook(lambda g, kept=kept: kept.append(g.view(3, -1)))
        (flat * (i + 1)).square().sum().backward()
        kept[0].mul_(0.25)
        optimizer.step()
        world.see("weights", params)
