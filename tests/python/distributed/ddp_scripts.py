# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train under DistributedDataParallel, in forward mode, in backward mode, and with
reductions that are awaited in the next forward pass: Forward(ddp=model)."""

import contextlib
import functools
import inspect
import itertools

import torch
import torch.distributed as dist
from common import adamw, assert_same, everything, refused, same, sgd, weights
from ddp_models import (
    BUCKETS,
    DELAY,
    SLOW,
    SMALL,
    VIEWS,
    Net,
    Network,
    fused,
    loss_of,
    over,
    start,
    train,
    training,
)
from ranks import LONG, STEPS, differs, scenario_of, script_of
from recorded_classes import Coupled, Elementwise, Lists, Looks, Norms
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)
script = functools.partial(script_of, SCENARIOS)


def known(cases):
    """Those whose options this release of PyTorch has."""
    has = inspect.signature(DDP.__init__).parameters
    return {name: {"options": o} for name, o in cases.items() if set(o) <= set(has)}


OPTIONS = known(
    {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "buckets": BUCKETS,
        "buckets views": VIEWS["views"]["options"],
        "no buffers": {"broadcast_buffers": False},
        "static": {"static_graph": True, **BUCKETS},
        "static views": {"static_graph": True, "gradient_as_bucket_view": True},
        "bucket list": {"bucket_cap_mb_list": [SMALL, 2 * SMALL]},
        "batched copy": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
        "forward sync": {"forward_sync_buffers": False},
        "init sync": {"init_sync": False},
    }
)


@script("forward", "backward", "awaited", **OPTIONS)
@script("awaited", **{f"{name} sgd": {**case, "make": sgd} for name, case in OPTIONS.items()})
def option(wrap, options, make=adamw):
    yield from training(*start(wrap, make=make, options=options))


AHEAD = Elementwise, Norms, Lists
RECORDED = {cls.__name__: {"cls": cls} for cls in (*AHEAD, Looks, Coupled)}


@script("forward", "backward", prove=False, recorded=True, **RECORDED)
def recorded(wrap, cls):
    """In backward mode step() runs ahead, over what the gradients will be when all are reduced."""
    wrapped, optimizer = start(wrap, make=cls)
    in_backward = wrap.fused and wrap.way == "backward"
    ahead = 0
    for i in range(LONG):
        optimizer.zero_grad()
        loss_of(wrapped, i).backward()
        if in_backward:
            ahead += optimizer._optfuse_link.updater.is_unconfirmed()
        optimizer.step()
    assert not (in_backward and cls in AHEAD) or ahead
    yield from everything(wrapped.module, optimizer)


@script("forward")
def fused_before_wrapping(wrap):
    model = Net()
    optimizer = wrap(sgd(model.parameters()))
    yield from training(DDP(model, **BUCKETS), optimizer)


UNUSED = {
    "find_unused": {},
    "find_unused views": {"gradient_as_bucket_view": True},
    "skip": {"skip_all_reduce_unused_params": True},
}


@script("forward", **known(UNUSED))
def unused(wrap, options):
    """Parameters that one rank, every rank, or none uses in an iteration."""
    same_on_all = "skip_all_reduce_unused_params" in options
    wrapped, optimizer = start(wrap, options={"find_unused_parameters": True, **BUCKETS, **options})
    for i in range(STEPS):
        spare = i % 3 == 0 or (i % 3 == 1 and dist.get_rank() == 0 and not same_on_all)
        yield "loss", train(wrapped, optimizer, i, spare=spare)
    yield from everything(wrapped.module, optimizer)


@script("forward", "backward", **VIEWS)
@script("awaited", **SLOW)
def no_sync(wrap, options, delay=0.0):
    """Three passes a step, of which the last one reduces."""
    wrapped, optimizer = start(wrap, options=options, delay=delay)
    if "static_graph" in options:
        train(wrapped, optimizer, 0)
    for i in range(STEPS // 3):
        optimizer.zero_grad()
        for part in range(3):
            with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(wrapped, 3 * i + part).backward()
        optimizer.step()
        if i % 4 == 0:
            yield "parameters", dict(wrapped.module.state_dict())
    yield from everything(wrapped.module, optimizer)


def fp16(_):
    return None, default_hooks.fp16_compress_hook


def allreduce(_):
    return None, default_hooks.allreduce_hook


def power_sgd(_):
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
    return state, powerSGD_hook


def local_sgd(_):
    world = dist.group.WORLD
    state = post_localSGD_hook.PostLocalSGDState(world, world, start_localSGD_iter=10)
    return state, post_localSGD_hook.post_localSGD_hook


def another_tensor(_):
    """Its result is not the bucket."""

    def hook(group, bucket):
        mean = bucket.buffer() / dist.get_world_size()
        future = dist.all_reduce(mean, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 1)

    return None, hook


HOOKS = {f.__name__: {"make": f} for f in (fp16, allreduce, local_sgd, another_tensor)}


@script("forward", "backward", "awaited", **HOOKS)
@script("forward", "backward", power_sgd={"make": power_sgd})
def hook(wrap, make):
    model = Net()
    torch.manual_seed(1)
    # PowerSGD starts reductions when others are done, in any order if there are several.
    options = {} if make is power_sgd else BUCKETS
    wrapped, optimizer = start(wrap, model, options=options, hook=make(model))
    yield from training(wrapped, optimizer, LONG if make is local_sgd else STEPS)


def without_buffers():
    """join() can't keep buffers of ranks that have ended."""
    model = Net()
    model.norm = nn.Identity()
    return model


@script("forward", **{"": {"divide": (True, False)}})
@script("backward", "awaited")
def join(wrap, divide=(True, True)):
    """Ranks with fewer batches than others."""
    wrapped, optimizer = start(wrap, without_buffers())
    for initially in divide:
        with wrapped.join(divide_by_initial_world_size=initially):
            for i in range(5 + 3 * dist.get_rank()):
                train(wrapped, optimizer, i)
        yield "parameters", dict(wrapped.module.state_dict())
    yield "state", optimizer.state_dict()


@scenario("backward", "awaited")
def a_join_that_divides_by_what_only_ddp_knows(way):
    wrapped = DDP(without_buffers())
    mode = optfuse.Forward if way == "awaited" else optfuse.Backward
    optimizer = optfuse.fuse(adamw(wrapped.parameters()), mode(ddp=wrapped))
    before = weights(wrapped)
    way_out = "without ddp=" if way == "awaited" else 'mode="forward"'
    with wrapped.join(divide_by_initial_world_size=False):
        refused(
            lambda: train(wrapped, optimizer, 0),
            "divide_by_initial_world_size=False",
            way_out=way_out,
        )
    assert_same("weights after the refusal", weights(wrapped), before)


@script("forward")
def delayed_all_reduce(wrap):
    """DDP starts this reduction and does not wait for it; gloo's barrier does."""
    model = Net()
    delayed = [("hidden.weight", model.hidden.weight), ("hidden.bias", model.hidden.bias)]
    wrapped, optimizer = start(
        wrap,
        model,
        options={
            "delay_all_reduce_named_params": delayed,
            "param_to_hook_all_reduce": model.conv.weight,
        },
    )
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped, i)
        loss.backward()
        dist.barrier()
        optimizer.step()
        yield "loss", loss
    yield from everything(model, optimizer)


@script("forward", "backward", **VIEWS)
@script("awaited", **SLOW)
def several_optimizers(wrap, options, delay=0.0):
    """Two of one model, one of them stock's; parameters that DDP ignores; frozen ones."""
    model = Net()
    model.alone = nn.Parameter(torch.ones(3))
    model.conv.bias.requires_grad_(False)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["alone"])
    wrapped = DDP(model, **options)
    network = (Network(delay), over) if delay else None
    optimizers = [
        fused(wrap, wrapped, adamw([*model.head.parameters(), model.alone]), network),
        fused(wrap, wrapped, sgd([*model.hidden.parameters(), model.conv.weight]), network),
        torch.optim.SGD([*model.spare.parameters(), *model.norm.parameters()], lr=1e-2),
    ]
    for i in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(wrapped, i) + (model.alone * (dist.get_rank() + i)).sum()
        loss.backward()
        if i % 3 == 0 and wrap.way == "awaited":
            yield "gradients", [p.grad for p in model.parameters() if p.requires_grad]
        for optimizer in optimizers:
            optimizer.step()
        yield "loss", loss
    yield "parameters", dict(model.state_dict())
    yield "states", [optimizer.state_dict() for optimizer in optimizers]


@script("backward", "awaited")
def a_hook_that_is_registered_after_fuse(wrap):
    """PyTorch refuses it, and training goes on without."""
    wrapped, optimizer = start(wrap)
    if wrap.fused:
        try:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        except RuntimeError as error:
            assert "only be called once" in str(error), error
        else:
            raise AssertionError("a second hook was taken")
    yield from training(wrapped, optimizer)


@script("backward", counted={"counted": True}, marked={"counted": False})
def accumulation_without_no_sync(wrap, counted):
    """Every pass reduces, and the last one of each step updates."""
    wrapped = DDP(Net(), **BUCKETS)
    options = {"accumulate": 2} if counted else {}
    optimizer = fused(wrap, wrapped, adamw(wrapped.parameters()), **options)
    for i in range(STEPS // 2):
        optimizer.zero_grad()
        with contextlib.nullcontext() if counted else optfuse.accumulate(optimizer):
            loss_of(wrapped, 2 * i).backward()
        yield "gradients", [p.grad for p in wrapped.parameters()]
        loss_of(wrapped, 2 * i + 1).backward()
        optimizer.step()
    yield from everything(wrapped.module, optimizer)


@script("backward")
@script("awaited", slow={"delay": DELAY})
def unfused_again(wrap, delay=0.0):
    """DDP's communication hook stays, and does what DDP does without one."""
    wrapped, optimizer = start(wrap, delay=delay)
    for i in range(LONG):
        if i == 5 and wrap.fused:
            optfuse.unfuse(optimizer)
        if i == 10:
            fused(wrap, wrapped, optimizer)
        yield "loss", train(wrapped, optimizer, i)
    yield from everything(wrapped.module, optimizer)


def wrapped_anew(wrap, options, unfused, zeroed):
    """A model whose gradients updates have consumed gets another DDP and another optimizer."""
    wrapped, optimizer = start(wrap, options=options)
    for i in range(3):
        yield "loss", train(wrapped, optimizer, i)
    if wrap.fused and unfused:
        wrap.prove()
        wrap.optimizers.clear()
        optfuse.unfuse(optimizer)
        assert all(p.grad is None for p in wrapped.parameters())
    if zeroed:
        optimizer.zero_grad()
    wrapped = DDP(wrapped.module, **options)
    if not unfused:
        optimizer = adamw(wrapped.parameters())
    for i in range(3, 6):
        yield "loss", train(wrapped, optimizer, i)
    yield from everything(wrapped.module, optimizer)


for unfused in (True, False):
    script(
        "backward",
        prove=not unfused,
        **{
            " ".join([name, *["unfused"] * unfused, *["zeroed"] * zeroed]): {
                **case, "unfused": unfused, "zeroed": zeroed
            }
            for (name, case), zeroed in itertools.product(VIEWS.items(), (True, False))
        },
    )(wrapped_anew)  # fmt: skip


@script("forward", "backward", **VIEWS)
def zeroed_after_the_forward_pass(wrap, options):
    """DDP arranges its buckets anew in a forward pass that finds gradients there."""
    wrapped, optimizer = start(wrap, options=options)
    for i in range(STEPS):
        loss = loss_of(wrapped, i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield "loss", loss
    yield from everything(wrapped.module, optimizer)


@scenario("backward")
def memory_of_gradients(mode):
    """DDP's buckets hold them, and nothing does beside."""
    wrapped = DDP(Net(), **BUCKETS)
    optimizer = optfuse.fuse(adamw(wrapped.parameters()), optfuse.Backward(ddp=wrapped))
    for i in range(3):
        train(wrapped, optimizer, i)
        assert all(torch.ops.optfuse.are_consumed([p.grad for p in wrapped.parameters()]))
        assert optfuse.summary(optimizer).created == (i + 1) * len(list(wrapped.parameters()))


def swapped():
    """A communication hook that starts the reductions of two buckets in the order in which they
    came on one process, and in the other order on another."""
    held = []

    def begin(bucket, future):
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        work.get_future().then(lambda done: future.set_result(done.value()[0]))

    def hook(_, bucket):
        future = torch.futures.Future()
        if dist.get_rank() == 1 and bucket.index() == 0 and not bucket.is_last():
            held.append((bucket, future))
            return future
        begin(bucket, future)
        while held:
            begin(*held.pop())
        return future

    return None, hook


@scenario("backward")
def reductions_in_another_order_are_seen(mode):
    """The control of these tests: what is reduced with the wrong partner has other bits."""

    def script(wrap):
        wrap.way = mode
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        options = {"bucket_cap_mb": 60 / 2**20}
        wrapped, optimizer = start(
            wrap, model, sgd, options, hook=swapped() if wrap.fused else None
        )
        for i in range(3):
            generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
            wrapped(torch.randn(5, 4, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield "parameters", dict(model.state_dict())

    differs(lambda: same(script, mode))
