# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train with Forward(ddp=model), over a network that is slower than backward(). What
other ways do with DistributedDataParallel, too, is in ddp_scripts.py."""

import contextlib
import functools
import weakref

import torch
import torch.distributed as dist
from await_looks import AFTER, LEAVE_NOTHING, LOOKS
from common import adamw, assert_same, everything, sgd
from ddp_models import (
    DELAY,
    SLOW,
    Net,
    Network,
    assert_busy,
    fused,
    loss_of,
    over,
    start,
    train,
)
from ranks import STEPS, scenario_of, script_of
from scripts import trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS, "awaited")
script = functools.partial(script_of, SCENARIOS, "awaited")
COPIES = SLOW["copies"]["options"]


def awaited(wrap, iteration=train, steps=STEPS, options=COPIES, delay=DELAY, **how):
    """Iterations over a slow network."""
    begin = functools.partial(start, options=options, delay=delay, **how)
    return trained(start=begin, iteration=iteration, steps=steps)(wrap)


@script(**SLOW)
def backward_and_step_do_not_wait(wrap, **slow):
    def iteration(wrapped, optimizer, i):
        loss = train(wrapped, optimizer, i)
        assert_busy(wrapped, i)
        return loss

    return awaited(wrap, iteration, **slow)


@script(**SLOW)
def accumulation_without_no_sync(wrap, **slow):
    """Every pass reduces, and adds to gradients that are on their way."""

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad(i % 2 == 0)
        loss_of(wrapped, 2 * i).backward()
        loss_of(wrapped, 2 * i + 1).backward()
        optimizer.step()

    return awaited(wrap, iteration, STEPS // 2, **slow)


@script()
def gradients_that_no_optimizer_of_ours_has_are_there_after_backward(wrap):
    """Nobody else would wait for them: their memory is read past every operator."""
    model = Net()
    wrapped = DDP(model, **COPIES)
    own = [p for name, p in model.named_parameters() if "head" in name]
    optimizer = fused(wrap, wrapped, adamw(own), (Network(), over))
    for i in range(5):
        optimizer.zero_grad()
        model.zero_grad()
        others = [p for p in model.parameters() if all(p is not q for q in own)]
        loss_of(wrapped, i).backward()
        keys = [torch._C._dispatch_keys(p.grad).raw_repr() for p in others]
        assert len(set(keys)) == 1, "the gradient of another one is marked"
        yield "others", [p.grad for p in others]
        optimizer.step()
    yield "parameters", dict(model.state_dict())


def looking(looks):
    """A case for each, in both layouts of buckets."""
    return {
        f"{name} {way}": {"look": look, **SLOW[way]}
        for name, look in looks.items()
        for way in ("copies", "views")
    }


@script(**looking(LOOKS))
@script(prove=False, **looking(LEAVE_NOTHING))
def look_before_step(wrap, look, **slow):
    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad()
        loss_of(wrapped, i).backward()
        assert_busy(wrapped, i)
        yield "seen", look(wrapped.module, optimizer)
        if i != 5:  # a step that is skipped
            optimizer.step()

    return awaited(wrap, iteration, 8, **slow)


@script(**looking(AFTER))
def look_after_step(wrap, look, **slow):
    def iteration(wrapped, optimizer, i):
        train(wrapped, optimizer, i)
        assert_busy(wrapped, i)
        yield "seen", look(wrapped.module, optimizer)

    return awaited(wrap, iteration, 8, **slow)


@script()
def a_gradient_that_is_kept(wrap):
    """Beyond zero_grad(), and read when its bucket has been used again."""

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad()
        loss_of(wrapped, i).backward()
        kept = [p.grad for p in wrapped.parameters()]
        optimizer.zero_grad()
        loss_of(wrapped, i + 10).backward()
        optimizer.step()
        yield "kept", kept

    return awaited(wrap, iteration, 6)


@script()
def a_view_that_is_kept(wrap):
    """A view of a bucket, which is read past its marks."""
    views = []

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad(set_to_none=False)
        loss_of(wrapped, i).backward()
        yield "views", views
        views[:] = [p.grad[:1] for p in wrapped.parameters()]
        optimizer.step()

    return awaited(wrap, iteration, 8, **SLOW["views"])


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(self.a(x))


@script()
def weights_that_a_pass_does_not_use(wrap):
    """Their updates wait on, and the next pass must not write to their bucket meanwhile."""

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
        wrapped(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            wrapped.module.a(torch.ones(1, 6))

    return awaited(wrap, iteration, 6, {}, model=Halves(), make=sgd)


@script(clip={"clips": True}, eager={"clips": False})
def other_options(wrap, clips):
    """step() needs the gradients, all of them or one."""
    model = Net()
    wrapped = DDP(model, **COPIES)
    more = {"eager": [model.head.weight, model.conv.weight]}
    more = {"max_grad_norm": 0.1} if clips else more
    optimizer = fused(wrap, wrapped, adamw(model.parameters()), (Network(), over), **more)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, i).backward()
        if clips and not wrap.fused:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
    yield from everything(model, optimizer)


@script()
def loss_scaling(wrap):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad()
        scaler.scale(loss_of(wrapped, i) * (float("inf") if i == 7 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    return awaited(wrap, iteration)


@script(
    adafactor={"make": lambda p: torch.optim.Adafactor(p, lr=1e-2)},
    rmsprop={"make": lambda p: torch.optim.RMSprop(p, lr=1e-3)},
)
def other_optimizers(wrap, make):
    """Some of them have no kernels, and wait in step()."""
    return awaited(wrap, make=make)


@script()
def a_profiler_that_notes_shapes(wrap):
    def iteration(wrapped, optimizer, i):
        profiled = torch.profiler.profile(record_shapes=True)
        with profiled if i in (2, 4) else contextlib.nullcontext():
            train(wrapped, optimizer, i)

    return awaited(wrap, iteration, 6)


def on_its_way():
    """A fused optimizer whose gradients stay on their way for long."""
    network = Network(0.05)
    wrapped = DDP(Net(), broadcast_buffers=False)
    ddp = optfuse.DDPModel(wrapped, (network, over))
    return network, wrapped, optfuse.fuse(adamw(wrapped.parameters()), optfuse.Forward(ddp=ddp))


@scenario()
def optimizers_and_models_that_die(way):
    """With gradients on their way."""
    for _ in range(3):
        network, wrapped, optimizer = on_its_way()
        train(wrapped, optimizer, 0)
        assert network.is_busy()
        before = torch.stack([p.detach().sum() for p in wrapped.parameters()])
        del optimizer
        after = torch.stack([p.detach().sum() for p in wrapped.parameters()])
        assert_same("weights", after, before)
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-2), 1)


@scenario()
def memory_goes_with_zero_grad(way):
    """Reductions that are on their way do not keep a gradient alive."""
    network, wrapped, optimizer = on_its_way()
    for i in range(3):
        loss_of(wrapped, i).backward()
        assert network.is_busy()
        gone = [weakref.ref(p.grad) for p in wrapped.parameters()]
        optimizer.zero_grad()
        assert all(ref() is None for ref in gone)
