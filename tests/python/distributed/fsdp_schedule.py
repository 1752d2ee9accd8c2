# SPDX-License-Identifier: BSD-3-Clause
"""When the updates of sharded parameters run, and what becomes of their gradients: scripts for
common.same() on every rank."""

import functools

import torch
import torch.distributed as dist
from common import adamw, refused, same, sgd
from fsdp_models import Net, everything, local, loss_of, shard, start, train, trained
from ranks import differs, scenario_of, script_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import optfuse
from optfuse._dtensor import fsdp

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)
script = functools.partial(script_of, SCENARIOS)


def begun(mode):
    """FSDP2 exchanges the local tensors in the first forward pass."""
    model, optimizer = start(functools.partial(optfuse.fuse, mode=mode))
    train(model, optimizer, 0)
    return model, optimizer


def is_consumed(grad):
    return torch.ops.optfuse.are_consumed([grad._local_tensor])[0]


@scenario("backward")
def gradients_die_in_backward(mode):
    """Each group's, after its reduction; reading one raises on every rank."""
    model, optimizer = begun(mode)
    parameters = list(model.parameters())
    for i in range(1, 4):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        kept = [p.shape for p in parameters if p._local_tensor.numel() and not is_consumed(p.grad)]
        assert not kept, f"not updated in backward: {kept}"
        for read in (
            lambda: parameters[0].grad + 1,
            lambda: parameters[0].grad.full_tensor(),
            lambda: parameters[0].grad.double(),
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


def writing(held):
    """An iteration that writes to tensors between backward() and step(). held(): these."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        for tensor in held():
            tensor.mul_(-3.0)
        optimizer.step()

    return iteration


@script("backward")
def gradients_that_others_have_are_left_to_step(wrap):
    """A hook keeps one of them."""
    model, held = shard(Net()), {}
    for p in (model.head.weight, model.blocks[1].up.weight):
        p.register_post_accumulate_grad_hook(lambda p: held.update({p: p.grad}))
    alias = model.blocks[2].up.bias
    alias.register_post_accumulate_grad_hook(lambda p: held.update({p: p.grad._local_tensor[:1]}))
    written = writing(lambda: [held.popitem()[1] for _ in range(len(held))])
    return trained(model, wrap(adamw(model.parameters())), written, 6)


@scenario("backward", dropped={"set_to_none": True}, zeroed={"set_to_none": False})
def discarded_gradients_are_refused(mode, set_to_none):
    model, optimizer = begun(mode)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    refused(lambda: optimizer.zero_grad(set_to_none), "zero_grad() before step()")
    model.zero_grad(set_to_none)
    refused(optimizer.step, "discarded, zeroed or replaced")


@script("backward", model={"of_model": True}, optimizer={"of_model": False})
def gradients_that_are_zeroed_in_place(wrap, of_model):
    """After step(), by either zero_grad(); the next backward adds to these very tensors."""
    model = shard(Net())
    parameters = list(model.parameters())
    optimizer = wrap(adamw(parameters))
    for i in range(6):
        loss_of(model, i).backward()
        if wrap.fused and i > 0:
            assert all(is_consumed(p.grad) for p in parameters), "not updated in backward"
        optimizer.step()
        grads = [p.grad for p in parameters]
        (model if of_model else optimizer).zero_grad(set_to_none=False)
        yield "kept", [p.grad is grad for p, grad in zip(parameters, grads, strict=True)]
        del grads
        yield "gradients", local([p.grad for p in parameters])
        yield "raw gradients", [p.grad._local_tensor for p in parameters]
        yield "sum", sum(p.grad.sum().full_tensor() for p in parameters)
    optimizer.step()  # with gradients of zeros
    yield from everything(model, optimizer)


class Buffers:
    """A reduction into memory that is used again and again."""

    def __init__(self, part):
        self.part, self.of = part, {}

    def allocate(self, size, *, dtype, device):
        (n,) = size
        buffer = self.of.setdefault(n, torch.empty(n + self.part, dtype=dtype, device=device))
        return buffer[:n] if self.part else buffer

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def reduce_into(module, kind):
    """A holder of the tensors that the module's gradients are parts of."""
    if kind == "hook":
        held = {}
        module.set_all_reduce_hook(lambda output: held.update(output=output))
        return held
    buffers = Buffers(part=kind == "part")
    module.set_custom_reduce_scatter(buffers)
    return buffers.of


@script("backward", **{kind: {"kind": kind} for kind in ("whole", "part", "hook")})
def reductions_that_others_write_to_are_left_to_step(wrap, kind):
    """A custom reduction has a buffer of its own, or a hook keeps the output."""
    model = shard(Net())
    outputs = [reduce_into(module, kind) for module in (model, *model.blocks)]
    written = writing(lambda: [t for output in outputs for t in output.values()])
    return trained(model, wrap(adamw(model.parameters())), written, 6)


@scenario("backward")
def a_second_backward_is_refused(mode):
    """On each rank, before it communicates any more."""
    model, optimizer = begun(mode)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    refused(lambda: loss_of(model, 2).backward())


def updates_before_the_reduction(optimizer):
    """A mutant: each group is told to be reduced before it is, with this rank's gradients."""
    group_class = optfuse._patches.replacing.find(fsdp._GROUP)
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
        fsdp._tell(group)
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
        else:
            optimizer.step()
        yield "parameters", model.weight.full_tensor()

    differs(lambda: same(script, mode))


def launched_by_unsharding(module, optimizer):
    """How many updates an all-gather has launched, and in how many launches."""
    before = optfuse.summary(optimizer)
    module.unshard()
    after = optfuse.summary(optimizer)
    module.reshard()
    assert after.at_use - before.at_use == before.pending - after.pending
    return before.pending - after.pending, after.launches - before.launches


def launched_by_groups(threads, bucket=1.0):
    """By the all-gather of each block; how many updates a block has, and how many stay pending.
    bucket: in shares of what a block updates on this rank."""
    model = shard(Net(width=8))
    enough = sum(p.to_local().nbytes for p in model.blocks[0].parameters())
    optimizer = optfuse.fuse(adamw(model.parameters()), bucket_bytes=int(bucket * enough))
    for i in range(2):
        train(model, optimizer, i)
    torch.set_num_threads(threads)
    try:
        found = [launched_by_unsharding(block, optimizer) for block in model.blocks]
    finally:
        torch.set_num_threads(1)
    n = len(list(model.blocks[0].parameters()))
    return found, n, optfuse.summary(optimizer).pending


@scenario("forward")
def an_all_gather_launches_the_updates_of_its_group(mode):
    """All together, if a bucket holds as much."""
    for threads in (1, 2):
        found, n, pending = launched_by_groups(threads)
        assert found == [(n, 1)] * 3, (threads, found)
        assert pending == 4, pending  # those of the root


@scenario("forward")
def small_groups_share_the_launch_of_the_first(mode):
    """On several threads: those that come after it in the optimizer, up to a bucket's bytes."""
    found, n, pending = launched_by_groups(2, bucket=10)
    assert found == [(3 * n + 2, 1), (0, 0), (0, 0)], found
    assert pending == 2, pending  # those of the root that come before
