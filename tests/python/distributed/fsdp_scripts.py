# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train models sharded by FSDP2 (fully_shard), for common.same() on every rank."""

import functools
import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import adamw
from fsdp_models import (
    Net,
    everything,
    local,
    looking,
    loss_of,
    shard,
    start,
    train,
    trained,
    training,
)
from ranks import STEPS, scenario_of, script_of
from style_classes import AdaBelief, ByShape, Replaces, TensorCounter, TrustRatio, WritesGradient
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import optfuse

SCENARIOS = {}
script = functools.partial(script_of, SCENARIOS)

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


@script("forward", "backward", **OPTIONS)
def option(wrap, **options):
    return training(*start(wrap, **options))


CLASSES = (AdaBelief, TensorCounter, Replaces, ByShape, WritesGradient, TrustRatio)
CLASSES = {cls.__name__: {"cls": cls} for cls in CLASSES}


@script("forward", "backward", prove=False, recorded=True, **CLASSES)
def recorded(wrap, cls):
    """DTensor answers the operators, and they are on no line: all of it is stock's."""
    return training(*start(wrap, make=cls))


def rounded(params, gradients, wrap):
    optimizer = optfuse.optim.AdamW(
        params, lr=0.1, stochastic_rounding=True, stochastic_state=True, seed=5
    )
    optimizer = wrap(optimizer)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.to(param.dtype)
        optimizer.step()
    return params


@scenario_of(
    SCENARIOS,
    *("stock", "forward"),
    bfloat16={"dtype": torch.bfloat16},
    float16={"dtype": torch.float16},
)
def stochastic_rounding_of_shards_has_the_bits_of_the_whole(mode, dtype):
    """The integers are those of an element's place in the whole."""
    random = torch.Generator().manual_seed(1)
    drawn = [[torch.randn(s, generator=random) for s in ((9, 37), (5,), (1, 3))] for _ in range(4)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def parameters(place):
        return [nn.Parameter(place(tensor.to(dtype))) for tensor in drawn[0]]

    def wrap(optimizer):
        return optimizer if mode == "stock" else optfuse.fuse(optimizer, mode="forward")

    def sharded(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    def replicated(tensor):
        return distribute_tensor(tensor, mesh, [Replicate()])

    expected = rounded(parameters(torch.Tensor.clone), drawn[1:], wrap)
    for place in (sharded, replicated):
        gradients = [[place(tensor) for tensor in step] for step in drawn[1:]]
        found = rounded(parameters(place), gradients, wrap)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.full_tensor(), b)
    columns = nn.Parameter(distribute_tensor(drawn[0][0].to(dtype), mesh, [Shard(1)]))
    with pytest.raises(RuntimeError, match="sharded once, by their first dimension"):
        rounded([columns], [[torch.ones_like(columns)]], wrap)


@script("forward", "backward")
def resharded_to_fewer(wrap):
    """After the forward pass each two processes keep a whole parameter."""
    world = dist.get_world_size()
    return training(*start(wrap, reshard_after_forward=2 if world == 4 else world))


@script("forward", "backward")
def prefetched(wrap):
    model, optimizer = start(wrap)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])

    def iteration(model, optimizer, i):
        model.unshard(async_op=True)
        return train(model, optimizer, i)

    return trained(model, optimizer, iteration)


@script("forward", "backward", resharded={"kept": False}, kept={"kept": True})
def accumulated_before_reduction(wrap, kept):
    """Three passes a step, of which the last one reduces."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2 or not kept)
            loss_of(model, 3 * i + part).backward()
        optimizer.step()

    return trained(*start(wrap), iteration, STEPS // 3)


@script("forward", "backward")
def accumulated_after_reduction(wrap):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, 2 * i).backward()
        yield "gradients", local([p.grad for p in model.parameters()])
        loss_of(model, 2 * i + 1).backward()
        optimizer.step()

    model = shard(Net())
    options = {"accumulate": 2} if wrap.way == "backward" else {}
    return trained(model, wrap(adamw(model.parameters()), **options), iteration, STEPS // 2)


@script("forward", "backward")
def hybrid(wrap):
    """Sharded among the first and among the last half of the processes, and replicated."""
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        for part in range(2):
            model.set_requires_all_reduce(part == 1)
            loss_of(model, 2 * i + part).backward()
        optimizer.step()

    return trained(*start(wrap, mesh=mesh), iteration, STEPS // 2)


@script("forward", "backward")
def placed(wrap):
    """Some parameters are sharded by columns."""

    def place(param):
        even = param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0
        return Shard(1) if even else Shard(0)

    model, optimizer = start(wrap, Net(width=12), shard_placement_fn=place)
    assert any(p.placements == (Shard(1),) for p in model.parameters())
    return training(model, optimizer)


@script("forward", "backward")
def ignored_and_frozen(wrap):
    """Parameters that are not sharded, have no gradient, or belong to another optimizer."""
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
        for p in plain if wrap.way == "forward" else ():  # nobody else reduces these
            dist.all_reduce(p.grad)
        for optimizer in optimizers:
            optimizer.step()
    yield "parameters", local(dict(model.state_dict()))
    yield "states", local([optimizer.state_dict() for optimizer in optimizers])


@script("forward", "backward")
def unused(wrap):
    """In some iterations some parameters have no gradient, or a gradient of zeros."""

    def iteration(model, optimizer, i):
        if i == STEPS // 2 and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        return train(model, optimizer, i, skip=(1,) if i % 3 else ())

    return trained(*start(wrap), iteration)


class Late:
    """The event behind a gradient's copy to the CPU, which is NaN until somebody waits. Keeps no
    tensor, as an event does not."""

    def __init__(self, gradient):
        self.gradient, self.numbers = weakref.ref(gradient), gradient.tolist()
        gradient.fill_(math.nan)

    def synchronize(self):
        if (gradient := self.gradient()) is not None:
            gradient.copy_(torch.tensor(self.numbers).reshape(gradient.shape))


@script("forward", "backward")
def copied_late(wrap):
    """As torch 2.11 and 2.12 copy from a GPU into pinned memory."""
    reduce = _fsdp_param_group.foreach_reduce

    def reduce_and_copy(units, *others):
        done = reduce(units, *others)
        for unit in units:
            unit.grad_offload_event = Late(unit.sharded_param.grad._local_tensor)
        return done

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce_and_copy):
        model, optimizer = start(wrap, **OPTIONS["offloaded"])
        yield from training(model, optimizer)
        assert wrap.way == "forward" or not wrap.fused or optfuse.summary(optimizer).at_close


class Gather:
    """A collective of the user's own."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=async_op)


class Scatter(Gather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@script("forward", "backward")
def collectives_of_ones_own(wrap):
    model, optimizer = start(wrap)
    for module in (model, *model.blocks):
        module.set_custom_all_gather(Gather())
        module.set_custom_reduce_scatter(Scatter())
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(3.0)
    return training(model, optimizer)


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
OPTIMIZERS = {
    name: {"make": functools.partial(make, lr=1e-2, **options)}
    for name, (make, options) in OPTIMIZERS.items()
}


@script("forward", "backward", **OPTIMIZERS)
def optimizer(wrap, make):
    return training(*start(wrap, make=make))


def fused_on_locals(model, make):
    """PyTorch's fused=True, on plain parameters over the memory of the shards."""
    plain = {p: nn.Parameter(p.to_local().detach()) for p in model.parameters()}
    optimizer = make(plain.values(), fused=True)

    def step():
        for p, own in plain.items():
            own.grad = None if p.grad is None else p.grad.to_local()
        optimizer.step()

    return step


@script(
    "forward",
    "backward",
    SGD={"make": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1)},
    Adagrad={"make": functools.partial(torch.optim.Adagrad, lr=1e-2)},
)
def fused_where_stock_has_it_for_locals_only(wrap, make):
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


@script("forward", "backward")
def looked_at_between_steps(wrap):
    model, optimizer = start(wrap)
    return looking(wrap, model, optimizer, functools.partial(train, model, optimizer))


@script("forward", "backward")
def changed_between_steps(wrap):
    """Parameters and state that a script writes to, and an optimizer that is unfused."""
    model, optimizer = start(wrap)
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


@script("forward", torch={"ours": False}, ours={"ours": True}, step={"ours": None})
def clipped(wrap, ours):
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


@script("forward", "backward")
def compiled_blocks(wrap):
    """As many graphs and recompilations as in stock."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    optimizer = wrap(adamw(model.parameters()))
    yield from trained(model, optimizer, train, 12)
    assert counters["stats"]["unique_graphs"] > 0
    yield "graphs", dict(counters["stats"])
    yield "compilations", dict(counters["frames"])
