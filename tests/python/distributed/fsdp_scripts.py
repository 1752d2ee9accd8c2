# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train models sharded by FSDP2 (fully_shard), for common.same() on every rank."""

import functools
import math
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from common import adamw, same
from fsdp_models import (
    Net,
    everything,
    local,
    looks_between_steps,
    loss_of,
    shard,
    train,
    training,
)
from ranks import STEPS, scenario_of
from style_classes import (
    AdaBelief,
    ByShape,
    Replaces,
    TensorCounter,
    TrustRatio,
    WritesGradient,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import optfuse

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)

OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "resharded": {"reshard_after_forward": True},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "bf16 reduced in float": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "reduced in bf16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
OPTIONS = {name: {"options": o} for name, o in OPTIONS.items()}


@scenario("forward", "backward", **OPTIONS)
def option(mode, options):
    def script(wrap):
        model = shard(Net(), **options)
        optimizer = wrap(adamw(model.parameters()))
        yield from training(model, optimizer)

    same(script, mode)


CLASSES = (AdaBelief, TensorCounter, Replaces, ByShape, WritesGradient)


@scenario("forward", "backward", **{cls.__name__: {"cls": cls} for cls in (*CLASSES, TrustRatio)})
def recorded(mode, cls):
    """DTensor answers the operators, and they are on no line: all of it is stock's."""

    def script(wrap):
        model = shard(Net())
        optimizer = wrap(cls(model.parameters()))
        yield from training(model, optimizer)

    same(script, mode, prove=False, recorded=True)


@scenario("forward", "backward")
def resharded_to_fewer(mode):
    """After the forward pass each two processes keep a whole parameter."""

    def script(wrap):
        world = dist.get_world_size()
        model = shard(Net(), reshard_after_forward=2 if world == 4 else world)
        optimizer = wrap(adamw(model.parameters()))
        yield from training(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def prefetched(mode):
    def script(wrap):
        model = shard(Net())
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            model.unshard(async_op=True)
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward", resharded={"kept": False}, kept={"kept": True})
def accumulated_before_reduction(mode, kept):
    """Three passes a step, of which the last one reduces."""

    def script(wrap):
        model = shard(Net())
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS // 3):
            optimizer.zero_grad()
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                model.set_reshard_after_backward(part == 2 or not kept)
                loss_of(model, 3 * i + part).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def accumulated_after_reduction(mode):
    def script(wrap):
        model = shard(Net())
        optimizer = wrap(
            adamw(model.parameters()), **({"accumulate": 2} if mode == "backward" else {})
        )
        for i in range(STEPS // 2):
            optimizer.zero_grad()
            loss_of(model, 2 * i).backward()
            yield "gradients", local([p.grad for p in model.parameters()])
            loss_of(model, 2 * i + 1).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def hybrid(mode):
    """Sharded among the first and among the last half of the processes, and replicated."""

    def script(wrap):
        world = dist.get_world_size()
        shape = (2, world // 2) if world % 2 == 0 else (1, world)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = shard(Net(), mesh=mesh)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS // 2):
            optimizer.zero_grad()
            for part in range(2):
                model.set_requires_all_reduce(part == 1)
                loss_of(model, 2 * i + part).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def placed(mode):
    """Some parameters are sharded by columns."""

    def place(param):
        even = param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0
        return Shard(1) if even else Shard(0)

    def script(wrap):
        model = shard(Net(width=12), shard_placement_fn=place)
        optimizer = wrap(adamw(model.parameters()))
        yield from training(model, optimizer)
        assert any(p.placements == (Shard(1),) for p in model.parameters())

    same(script, mode)


@scenario("forward", "backward")
def ignored_and_frozen(mode):
    """Parameters that are not sharded, have no gradient, or belong to another optimizer."""

    def script(wrap):
        model = Net()
        model.blocks[1].up.requires_grad_(False)
        ignored = {model.head.bias, model.blocks[0].norm.weight}
        model = shard(model, ignored_params=ignored)
        plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        assert set(plain) == ignored
        optimizers = [
            wrap(adamw([{"params": plain}, {"params": sharded[::2], "lr": 1e-3}])),
            wrap(adamw(sharded[1::4])),
            adamw(sharded[3::4]),
        ]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, i).backward()
            for p in plain if mode == "forward" else ():  # nobody else reduces these
                dist.all_reduce(p.grad)
            for optimizer in optimizers:
                optimizer.step()
        yield "parameters", local(dict(model.state_dict()))
        yield "states", local([optimizer.state_dict() for optimizer in optimizers])

    same(script, mode)


@scenario("forward", "backward")
def unused(mode):
    """In some iterations some parameters have no gradient, or a gradient of zeros."""

    def script(wrap):
        model = shard(Net())
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            if i == STEPS // 2 and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                model.set_reduce_scatter_unused_params(True)
            yield "loss", train(model, optimizer, i, skip=(1,) if i % 3 else ())
        yield from everything(model, optimizer)

    same(script, mode)


class Late:
    """The event behind a gradient's copy to the CPU, which is NaN until somebody waits. Keeps no
    tensor, as an event does not."""

    def __init__(self, gradient):
        self.gradient, self.numbers = weakref.ref(gradient), gradient.tolist()
        gradient.fill_(math.nan)

    def synchronize(self):
        if (gradient := self.gradient()) is not None:
            gradient.copy_(torch.tensor(self.numbers).reshape(gradient.shape))


@scenario("forward", "backward")
def copied_late(mode):
    """As torch 2.11 and 2.12 copy from a GPU into pinned memory."""
    reduce = _fsdp_param_group.foreach_reduce

    def reduce_and_copy(units, *others):
        done = reduce(units, *others)
        for unit in units:
            unit.grad_offload_event = Late(unit.sharded_param.grad._local_tensor)
        return done

    def script(wrap):
        model = shard(Net(), **OPTIONS["offloaded"]["options"])
        optimizer = wrap(adamw(model.parameters()))
        yield from training(model, optimizer)
        assert mode == "forward" or not wrap.fused or optfuse.summary(optimizer).at_close

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce_and_copy):
        same(script, mode)


class Gather:
    """A collective of the user's own."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=async_op)


class Scatter(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@scenario("forward", "backward")
def collectives_of_ones_own(mode):
    def script(wrap):
        model = shard(Net())
        for module in (model, *model.blocks):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(3.0)
        optimizer = wrap(adamw(model.parameters()))
        yield from training(model, optimizer)

    same(script, mode)


OPTIMIZERS = {
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "Adam maximize": (torch.optim.Adam, {"maximize": True, "weight_decay": 0.1, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "foreach": False}),
    "Adadelta": (torch.optim.Adadelta, {"foreach": False}),
    "NAdam": (torch.optim.NAdam, {"foreach": False}),
    "RAdam": (torch.optim.RAdam, {"foreach": False}),
    "Adamax": (torch.optim.Adamax, {"foreach": False}),
    "ASGD": (torch.optim.ASGD, {"foreach": False}),
    "Lion": (optfuse.optim.Lion, {}),
}
OPTIMIZERS = {name: {"make": make, "options": o} for name, (make, o) in OPTIMIZERS.items()}


@scenario("forward", "backward", **OPTIMIZERS)
def optimizer(mode, make, options):
    def script(wrap):
        model = shard(Net())
        optimizer = wrap(make(model.parameters(), lr=1e-2, **options))
        yield from training(model, optimizer)

    same(script, mode)


def fused_on_locals(model, make):
    """PyTorch's fused=True, on plain parameters over the memory of the shards."""
    plain = {p: nn.Parameter(p.to_local().detach()) for p in model.parameters()}
    optimizer = make(plain.values(), fused=True)

    def step():
        for p, own in plain.items():
            own.grad = None if p.grad is None else p.grad.to_local()
        optimizer.step()

    return step


@scenario(
    "forward",
    "backward",
    SGD={"make": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1)},
    Adagrad={"make": functools.partial(torch.optim.Adagrad, lr=1e-2)},
)
def fused_where_stock_has_it_for_locals_only(mode, make):
    def script(wrap):
        model = shard(Net())
        if wrap.fused:
            optimizer = wrap(make(model.parameters()))
            assert optfuse.summary(optimizer).reference_differs == (0,)
        step = optimizer.step if wrap.fused else fused_on_locals(model, make)
        for i in range(STEPS):
            model.zero_grad()
            loss_of(model, i).backward()
            step()
        yield "parameters", local(dict(model.state_dict()))

    same(script, mode)


@scenario("forward", "backward")
def looked_at_between_steps(mode):
    def script(wrap):
        model = shard(Net())
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2 * 15):
            train(model, optimizer, i)
            name, look = looks_between_steps(model, optimizer, mode == "forward")[i % 15]
            wrap.pending()
            yield name, look()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def changed_between_steps(mode):
    """Parameters and state that a script writes to, and an optimizer that is unfused."""

    def script(wrap):
        model = shard(Net())
        optimizer = wrap(adamw(model.parameters()))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for i in range(20):
            train(model, optimizer, i, set_to_none=i % 2 == 0)
            schedule.step()
            with torch.no_grad():
                for p in model.parameters():
                    if i % 4 == 0:
                        p.mul_(0.99)
                    if i % 4 == 1:
                        p._local_tensor.add_(0.01)
                    if i % 4 == 2:
                        optimizer.state[p]["exp_avg"].mul_(0.5)
            if i == 12 and wrap.fused:
                wrap(optfuse.unfuse(optimizer))
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", torch={"ours": False}, ours={"ours": True}, step={"ours": None})
def clipped(mode, ours):
    def script(wrap):
        model = shard(Net())
        options = {"max_grad_norm": 0.1} if wrap.fused and ours is None else {}
        optimizer = wrap(adamw(model.parameters()), **options)
        for i in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            if not options:
                clip = optfuse.clip_grad_norm_ if wrap.fused and ours else nn.utils.clip_grad_norm_
                norm_type = 1.0 if ours is not None and i % 5 == 4 else 2.0
                clip(model.parameters(), 0.1, norm_type)
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def compiled_blocks(mode):
    """As many graphs and recompilations as in stock."""
    counters = torch._dynamo.utils.counters

    def script(wrap):
        torch._dynamo.reset()
        counters.clear()
        model = Net()
        for block in model.blocks:
            block.compile(backend="aot_eager")
            fully_shard(block)
        fully_shard(model)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(12):
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)
        assert counters["stats"]["unique_graphs"] > 0
        yield "graphs", dict(counters["stats"])
        yield "compilations", dict(counters["frames"])

    same(script, mode)
