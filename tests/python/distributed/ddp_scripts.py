# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train under DistributedDataParallel, for common.same() on every rank."""

import contextlib
import functools
import inspect
import itertools

import torch
import torch.distributed as dist
from common import adamw, assert_same, everything, refused, same, sgd, weights
from ranks import LONG, STEPS, scenario_of
from recorded_classes import Coupled, Elementwise, Lists, Looks, Norms
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SMALL = 0.0002  # MiB a bucket: several buckets for a model of some hundred parameters
SCENARIOS = {}


scenario = functools.partial(scenario_of, SCENARIOS)


class Net(nn.Module):
    """Weights in several layouts and dtypes of buckets, and buffers."""

    def __init__(self, unused=False):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 9, 16)
        self.spare = nn.Linear(16, 16)
        self.unused = unused
        self.head = nn.Linear(16, 3)

    def forward(self, x, spare=True):
        x = torch.tanh(self.norm(self.conv(x)))
        x = torch.tanh(self.hidden(x.flatten(1)))
        if spare:
            x = torch.tanh(self.spare(x))
        return self.head(x)


def loss_of(model, i, **options):
    """The loss of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * i + dist.get_rank())
    x = torch.randn(5, 2, 3, 3, generator=generator)
    y = torch.randn(5, 3, generator=generator)
    return nn.functional.mse_loss(model(x, **options), y)


def train(model, optimizer, i, **options):
    optimizer.zero_grad()
    loss = loss_of(model, i, **options)
    loss.backward()
    optimizer.step()
    return loss


def training(wrapped, optimizer, steps=STEPS):
    for i in range(steps):
        yield "loss", train(wrapped, optimizer, i)
    yield from everything(wrapped.module, optimizer)


def knows(option):
    return option in inspect.signature(DDP.__init__).parameters


def ddp_of(wrap, model, hook=None):
    """The model and its communication hook as options of backward mode."""
    is_backward = wrap.fused and wrap.options["mode"] == "backward"
    return {"ddp": optfuse.DDPModel(model, hook)} if is_backward else {}


OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": SMALL},
    "buckets views": {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
    "static": {"static_graph": True, "bucket_cap_mb": SMALL},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "bucket list": {"bucket_cap_mb_list": [SMALL, 2 * SMALL]},
    "batched copy": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "forward sync": {"forward_sync_buffers": False},
    "init sync": {"init_sync": False},
}
OPTIONS = {name: {"options": o} for name, o in OPTIONS.items() if all(map(knows, o))}


@scenario("forward", "backward", **OPTIONS)
def option(mode, options):
    def script(wrap):
        model = Net()
        wrapped = DDP(model, **options)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        yield from training(wrapped, optimizer)

    same(script, mode)


AHEAD = Elementwise, Norms, Lists
RECORDED = {cls.__name__: {"cls": cls} for cls in (*AHEAD, Looks, Coupled)}


@scenario("forward", "backward", **RECORDED)
def recorded(mode, cls):
    """In backward mode step() runs ahead, over what the gradients will be when all are reduced."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        optimizer = wrap(cls(model.parameters()), **ddp_of(wrap, wrapped))
        ahead = 0
        for i in range(LONG):
            optimizer.zero_grad()
            loss_of(wrapped, i).backward()
            if wrap.fused and mode == "backward":
                ahead += optimizer._optfuse_link.ledger.updater.is_unconfirmed()
            optimizer.step()
        assert not (wrap.fused and mode == "backward" and cls in AHEAD) or ahead
        yield from everything(model, optimizer)

    same(script, mode, prove=False, recorded=True)


@scenario("forward")
def fused_before_wrapping(mode):
    def script(wrap):
        model = Net()
        optimizer = wrap(sgd(model.parameters()))
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        yield from training(wrapped, optimizer)

    same(script, mode)


UNUSED = {
    "find_unused": {},
    "find_unused views": {"gradient_as_bucket_view": True},
    "skip": {"skip_all_reduce_unused_params": True},
}
UNUSED = {name: {"options": o} for name, o in UNUSED.items() if all(map(knows, o))}


@scenario("forward", **UNUSED)
def unused(mode, options):
    """Parameters that one rank, every rank, or none uses in an iteration."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, find_unused_parameters=True, bucket_cap_mb=SMALL, **options)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            spare = (i % 3 == 0) or (i % 3 == 1 and dist.get_rank() == 0)
            if "skip_all_reduce_unused_params" in options:
                spare = i % 3 == 0  # which then must be the same on all ranks
            yield "loss", train(wrapped, optimizer, i, spare=spare)
        yield from everything(model, optimizer)

    same(script, mode)


@scenario(
    "forward",
    "backward",
    copies={"views": False},
    views={"views": True},
)
def no_sync(mode, views):
    """Three passes a step, of which the last one reduces."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=SMALL)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        for i in range(STEPS // 3):
            optimizer.zero_grad()
            for part in range(3):
                with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                    loss_of(wrapped, 3 * i + part).backward()
            optimizer.step()
            if i % 4 == 0:
                yield "parameters", dict(model.state_dict())
        yield from everything(model, optimizer)

    same(script, mode)


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


HOOKS = {f.__name__: {"make": f} for f in (fp16, allreduce, power_sgd, local_sgd, another_tensor)}


@scenario("forward", "backward", **HOOKS)
def hook(mode, make):
    def script(wrap):
        model = Net()
        # PowerSGD starts reductions when others are done, in any order if there are several.
        wrapped = DDP(model, **({} if make is power_sgd else {"bucket_cap_mb": SMALL}))
        torch.manual_seed(1)
        state, hook = make(model)
        options = ddp_of(wrap, wrapped, (state, hook))
        if not options:
            wrapped.register_comm_hook(state, hook)
        optimizer = wrap(adamw(model.parameters()), **options)
        yield from training(wrapped, optimizer, LONG if make is local_sgd else STEPS)

    same(script, mode)


@scenario("forward", "backward")
def join(mode):
    """Ranks with fewer batches than others."""

    def script(wrap):
        model = Net()
        model.norm = nn.Identity()  # join() can't keep buffers of ranks that have ended
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        for divide in (True, False) if mode == "forward" else (True, True):
            with wrapped.join(divide_by_initial_world_size=divide):
                for i in range(5 + 3 * dist.get_rank()):
                    train(wrapped, optimizer, i)
            yield "parameters", dict(model.state_dict())
        yield "state", optimizer.state_dict()

    same(script, mode)


@scenario("backward")
def a_join_that_divides_by_what_only_ddp_knows(mode):
    model = Net()
    model.norm = nn.Identity()
    wrapped = DDP(model)
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Backward(ddp=wrapped))
    before = weights(model)
    with wrapped.join(divide_by_initial_world_size=False):
        refused(lambda: train(wrapped, optimizer, 0), "divide_by_initial_world_size=False")
    assert_same("weights after the refusal", weights(model), before)


@scenario("forward")
def delayed_all_reduce(mode):
    """DDP starts this reduction and does not wait for it; gloo's barrier does."""

    def script(wrap):
        model = Net()
        delayed = [("hidden.weight", model.hidden.weight), ("hidden.bias", model.hidden.bias)]
        wrapped = DDP(
            model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.conv.weight
        )
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(wrapped, i)
            loss.backward()
            dist.barrier()
            optimizer.step()
            yield "loss", loss
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward", copies={"views": False}, views={"views": True})
def several_optimizers(mode, views):
    """Two of one model, one of them stock's; parameters that DDP ignores; frozen ones."""

    def script(wrap):
        model = Net()
        model.alone = nn.Parameter(torch.ones(3))
        model.conv.bias.requires_grad_(False)
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["alone"])
        wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=SMALL)
        ddp = ddp_of(wrap, wrapped)
        optimizers = [
            wrap(adamw([*model.head.parameters(), model.alone]), **ddp),
            wrap(sgd([*model.hidden.parameters(), model.conv.weight]), **ddp),
            torch.optim.SGD([*model.spare.parameters(), *model.norm.parameters()], lr=1e-2),
        ]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(wrapped, i) + (model.alone * (dist.get_rank() + i)).sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield "loss", loss
        yield "parameters", dict(model.state_dict())
        yield "states", [optimizer.state_dict() for optimizer in optimizers]

    same(script, mode)


@scenario("backward")
def a_hook_that_is_registered_after_fuse(mode):
    """PyTorch refuses it, and training goes on without."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        if wrap.fused:
            try:
                wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
            except RuntimeError as error:
                assert "only be called once" in str(error), error
            else:
                raise AssertionError("a second hook was taken")
        yield from training(wrapped, optimizer)

    same(script, mode)


@scenario("backward", counted={"counted": True}, marked={"counted": False})
def accumulation_without_no_sync(mode, counted):
    """Every pass reduces, and the last one of each step updates."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        options = ddp_of(wrap, wrapped) | ({"accumulate": 2} if counted else {})
        optimizer = wrap(adamw(model.parameters()), **options)
        for i in range(STEPS // 2):
            optimizer.zero_grad()
            marks = contextlib.nullcontext() if counted else optfuse.accumulate(optimizer)
            with marks:
                loss_of(wrapped, 2 * i).backward()
            yield "gradients", [p.grad for p in model.parameters()]
            loss_of(wrapped, 2 * i + 1).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("backward")
def unfused_again(mode):
    """DDP's communication hook stays, and does what DDP does without one."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        for i in range(LONG):
            if i == 5 and wrap.fused:
                optfuse.unfuse(optimizer)
            if i == 10:
                wrap(optimizer, **ddp_of(wrap, wrapped))
            yield "loss", train(wrapped, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("backward", copies={"views": False}, views={"views": True})
def wrapped_anew(mode, views):
    """A model whose gradients updates have consumed gets another DDP and another optimizer."""

    def script(wrap, unfused, zeroed):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        for i in range(3):
            yield "loss", train(wrapped, optimizer, i)
        if wrap.fused and unfused:
            wrap.prove()
            wrap.optimizers.clear()
            optfuse.unfuse(optimizer)
            assert all(p.grad is None for p in model.parameters())
        if zeroed:
            optimizer.zero_grad()
        wrapped = DDP(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
        if not unfused:
            optimizer = adamw(model.parameters())
        for i in range(3, 6):
            yield "loss", train(wrapped, optimizer, i)
        yield from everything(model, optimizer)

    for unfused, zeroed in itertools.product((True, False), repeat=2):
        arguments = {"unfused": unfused, "zeroed": zeroed}
        same(functools.partial(script, **arguments), mode, prove=not unfused)


@scenario("forward", "backward", copies={"views": False}, views={"views": True})
def zeroed_after_the_forward_pass(mode, views):
    """DDP arranges its buckets anew in a forward pass that finds gradients there."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL, gradient_as_bucket_view=views)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        for i in range(STEPS):
            loss = loss_of(wrapped, i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield "loss", loss
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("backward")
def memory_of_gradients(mode):
    """DDP's buckets hold them, and nothing does beside."""
    model = Net()
    wrapped = DDP(model, bucket_cap_mb=SMALL)
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Backward(ddp=wrapped))
    for i in range(3):
        train(wrapped, optimizer, i)
        assert all(torch.ops.optfuse.are_consumed([p.grad for p in model.parameters()]))
        assert optfuse.summary(optimizer).created == (i + 1) * len(list(model.parameters()))


def swapped():
    """A communication hook that starts the reductions of two buckets in the order in which they
    came on one process, and in the other order on another."""
    held = []

    def start(bucket, future):
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        work.get_future().then(lambda done: future.set_result(done.value()[0]))

    def hook(_, bucket):
        future = torch.futures.Future()
        if dist.get_rank() == 1 and bucket.index() == 0 and not bucket.is_last():
            held.append((bucket, future))
            return future
        start(bucket, future)
        while held:
            start(*held.pop())
        return future

    return None, hook


@scenario("backward")
def reductions_in_another_order_are_seen(mode):
    """The control of these tests: what is reduced with the wrong partner has other bits."""

    def script(wrap):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        wrapped = DDP(model, bucket_cap_mb=60 / 2**20)
        options = ddp_of(wrap, wrapped, swapped())
        optimizer = wrap(sgd(model.parameters()), **options)
        for i in range(3):
            generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
            wrapped(torch.randn(5, 4, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield "parameters", dict(model.state_dict())

    try:
        same(script, mode)
    except AssertionError as error:
        assert "differ from stock" in str(error), error
    else:
        raise RuntimeError("training with mismatched reductions had stock's bits")
