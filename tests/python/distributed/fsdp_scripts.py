# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train models sharded by FSDP2 (fully_shard), for common.same() on every rank."""

import copy
import functools
import io
import itertools

import torch
import torch.distributed as dist
from common import Fused, Stock, adamw, assert_same, refused, run, sgd
from ranks import STEPS
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import optfuse
from optfuse import _fsdp

SCENARIOS = {}


def scenario_of(scenarios, *modes, **cases):
    """Adds the function to a module's scenarios, once for each mode and case; called as
    function(mode, **case)."""

    def add(function):
        for mode in modes:
            for case, options in (cases or {"": {}}).items():
                name = " ".join(filter(None, (function.__name__, case, mode)))
                scenarios[name] = functools.partial(function, mode, **options)
        return function

    return add


scenario = functools.partial(scenario_of, SCENARIOS)


def local(value):
    """The same with plain tensors: of a DTensor its layout, and what this rank has of it."""
    if isinstance(value, DTensor):
        return [str(value.placements), tuple(value.shape), value.to_local()]
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [local(item) for item in value]
    return value


def everything(model, optimizer):
    yield "parameters", local(dict(model.state_dict()))
    yield "optimizer state", local(optimizer.state_dict())


def same(script, mode, **options):
    """As common.same(), of scripts that look at locals."""
    stock = run(script, Stock())
    wrap = Fused(mode, **options)
    ours = run(script, wrap)
    assert stock, "the script yielded nothing"
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a, b)
    wrap.prove()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """width: 7 gives shards of unequal sizes, and the head empty ones on some ranks."""

    def __init__(self, width=7, blocks=3, outputs=1):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, outputs)

    def forward(self, x, skip=()):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x)
        return self.head(x)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model, i, **options):
    """Of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * i + dist.get_rank())
    x = torch.randn(6, 5, generator=generator)
    y = torch.randn(6, 1, generator=generator)
    return nn.functional.mse_loss(model(x, **options).float(), y)


def train(model, optimizer, i, set_to_none=True, **options):
    optimizer.zero_grad(set_to_none)
    loss = loss_of(model, i, **options)
    loss.backward()
    optimizer.step()
    return loss


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
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("forward", "backward")
def resharded_to_fewer(mode):
    """After the forward pass each two processes keep a whole parameter."""

    def script(wrap):
        world = dist.get_world_size()
        model = shard(Net(), reshard_after_forward=2 if world == 4 else world)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)

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
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)
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
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)

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
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)

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


def looks_between_steps(model, optimizer, gradients):
    """Each way to see a sharded parameter or its state."""
    parameters = list(model.parameters())
    yield "values", [p.full_tensor() for p in parameters]
    yield "locals", [p.to_local() for p in parameters]
    yield "raw", [p._local_tensor for p in parameters]
    yield "an operator", local([p + 1 for p in parameters])
    yield "state", local([optimizer.state[p] for p in parameters])
    yield "state by operators", [optimizer.state[p]["exp_avg"].full_tensor() for p in parameters]
    yield "norm", sum(p.norm().full_tensor() for p in parameters)
    yield "data", [p.data.to_local() for p in parameters]
    yield "detached", [p.detach().full_tensor() for p in parameters]
    yield "copied", [copy.deepcopy(p.detach()).to_local() for p in parameters]
    yield "listed", local(torch._foreach_mul([p.detach() for p in parameters], 2.0))
    yield "gradients", local([p.grad for p in parameters] if gradients else [])
    yield "raw gradients", [p.grad._local_tensor for p in parameters] if gradients else []
    yield "raw state", [optimizer.state[p]["exp_avg_sq"]._local_tensor for p in parameters]
    yield "bytes", [bytes_of(p) for p in parameters]


def bytes_of(param):
    """As a checkpoint has it."""
    file = io.BytesIO()
    torch.save(param._local_tensor.detach(), file)
    return file.getvalue()


@scenario("forward", "backward")
def looked_at_between_steps(mode):
    def script(wrap):
        model = shard(Net())
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2 * 15):
            train(model, optimizer, i)
            looks = looks_between_steps(model, optimizer, mode == "forward")
            wrap.pending()
            yield next(itertools.islice(looks, i % 15, None))
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


def is_consumed(grad):
    return grad._local_tensor.untyped_storage().nbytes() == 0


@scenario("backward")
def gradients_die_in_backward(mode):
    """Each group's, after its reduction; reading one raises on every rank."""
    model = shard(Net())
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    train(model, optimizer, 0)  # FSDP2 exchanges the local tensors in the first forward pass
    parameters = list(model.parameters())
    for i in range(1, 4):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        kept = [p.shape for p in parameters if p._local_tensor.numel() and not is_consumed(p.grad)]
        assert not kept, f"not updated in backward: {kept}"
        for read in (
            lambda: parameters[0].grad + 1,
            lambda: parameters[0].grad.full_tensor(),
            lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
            lambda: optfuse.clip_grad_norm_(parameters, 1.0),
            lambda: parameters[0].grad.to_local().sum(),
            lambda: parameters[0].grad._local_tensor.sum(),
        ):
            refused(read)
        assert parameters[0].grad.placements == parameters[0].placements
        optimizer.step()
    assert optfuse.summary(optimizer).created == 4 * len(parameters)
    refused(optimizer.step, "already been applied", way_out="zero_grad()")


@scenario("backward")
def gradients_that_others_have_are_left_to_step(mode):
    """A hook keeps one of them, and changes it between backward() and step()."""

    def script(wrap):
        model = shard(Net())
        held = []
        for p in (model.head.weight, model.blocks[1].up.weight):
            p.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
        alias = model.blocks[2].up.bias
        alias.register_post_accumulate_grad_hook(lambda p: held.append(p.grad._local_tensor[:1]))
        optimizer = wrap(adamw(model.parameters()))
        for i in range(6):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            for grad in held:
                grad.mul_(-3.0)
            held.clear()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario("backward")
def discarded_gradients_are_refused(mode):
    model = shard(Net())
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    refused(optimizer.zero_grad, "zero_grad() before step()")
    model.zero_grad()
    refused(optimizer.step, "discarded, zeroed or replaced")


@scenario("backward")
def a_second_backward_is_refused(mode):
    """On each rank, before it communicates any more."""
    model = shard(Net())
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    refused(lambda: loss_of(model, 2).backward())


def updates_before_the_reduction(optimizer):
    """A mutant: each group is told to be reduced before it is, with this rank's gradients."""
    group_class = optfuse._patches.find(_fsdp._GROUP)
    reduced = group_class.post_backward

    def mutant(group, *unused):
        for unit in group.fsdp_params:
            grad = getattr(unit, "_unsharded_param", unit.sharded_param).grad
            if grad is None:
                continue
            own = torch.chunk(grad, dist.get_world_size())[dist.get_rank()].clone()
            unit.sharded_param.grad = unit.to_sharded_dtensor(own)
            for hook in unit.sharded_param._post_accumulate_grad_hooks.values():
                hook(unit.sharded_param)
        _fsdp._tell(group)
        for unit in group.fsdp_params:
            unit.sharded_param.grad = None
        with optfuse.accumulate(optimizer):
            reduced.__wrapped__(group, *unused)

    return group_class, mutant


@scenario("backward")
def updates_before_the_reduction_are_seen(mode):
    """The control of these tests."""

    def script(wrap):
        model = fully_shard(nn.Linear(4, 4 * dist.get_world_size(), bias=False))
        optimizer = wrap(sgd(model.parameters(), momentum=0.0, fused=False))
        if wrap.fused:
            owner, mutant = updates_before_the_reduction(optimizer)
            stock, owner.post_backward = owner.post_backward, mutant
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
        if wrap.fused:
            owner.post_backward = stock
        yield "parameters", model.weight.full_tensor() if wrap.fused else stepped(model, optimizer)

    try:
        same(script, mode)
    except AssertionError as error:
        assert "differ from stock" in str(error), error
    else:
        raise RuntimeError("updates with gradients that are not reduced had stock's bits")


def stepped(model, optimizer):
    optimizer.step()
    return model.weight.full_tensor()


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
