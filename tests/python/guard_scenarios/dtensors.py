# SPDX-License-Identifier: BSD-3-Clause
"""Guards of DTensor parameters."""

import torch
from common import adamw, assert_same, loss_of, net, one_process
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import optfuse
from guard_scenarios.registry import guards, must_raise


def held_weights(wrap, keep):
    """A hook keeps the gradient, which is changed between backward() and step()."""
    torch.manual_seed(0)
    model = fully_shard(net())
    held = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: held.append(keep(p.grad)))
    optimizer = wrap(adamw(model.parameters()))
    loss_of(model, 0).backward()
    for grad in held:
        grad.mul_(-1.0)
    optimizer.step()
    return [p.full_tensor() for p in model.parameters()]


def compare_held(keep):
    with one_process():
        stock = held_weights(lambda optimizer: optimizer, keep)
        ours = held_weights(lambda optimizer: optfuse.fuse(optimizer, mode="backward"), keep)
        assert_same("weights", ours, stock)


@guards("held", "discarded")
def a_gradient_that_a_hook_has_kept_is_left_to_step():
    compare_held(lambda grad: grad)


@guards("sibling", "discarded")
def a_gradient_whose_memory_a_hook_has_kept_is_left_to_step():
    compare_held(lambda grad: grad._local_tensor.view(-1))


def sharded(tensor, mesh):
    """distribute_tensor() sends a message; gloo's thread has the memory for a while after it, and
    what is not private does not wait."""
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)


@guards("wrapper_version")
def a_graph_that_is_kept_notices_the_update():
    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(sharded(torch.ones(4), mesh))
        optimizer = optfuse.fuse(adamw([param]))
        loss = (param * param).to_local().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        must_raise(loss.backward, "a second backward over weights that have changed")


@guards("wrapper", "seal")
def an_operator_on_a_dtensor_sees_the_update():
    with one_process():
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(sharded(torch.ones(4), mesh))
        optimizer = optfuse.fuse(adamw([param]))
        param.grad = torch.ones_like(param)
        optimizer.step()
        if optfuse.summary(optimizer).pending == 0:
            raise RuntimeError("no update is pending: the scenario would prove nothing")
        assert (param * 1).to_local().max() < 1, "a multiplication read the old weight"


class Buffers:
    """A reduction into memory that is used again and again."""

    def __init__(self):
        self.of = {}

    def allocate(self, size, *, dtype, device):
        return self.of.setdefault(len(self.of), torch.empty(*size, dtype=dtype, device=device))


def weights_after_a_buffer_is_used_again(wrap):
    torch.manual_seed(0)
    model = fully_shard(net())
    buffers = Buffers()
    model.set_custom_reduce_scatter(buffers)
    optimizer = wrap(adamw(model.parameters()))
    loss_of(model, 0).backward()
    optimizer.step()
    for buffer in buffers.of.values():
        buffer.fill_(7.0)
    return [p.full_tensor() for p in model.parameters()]


@guards("base")
def a_reduction_into_a_buffer_is_not_read_later():
    with one_process():
        stock = weights_after_a_buffer_is_used_again(lambda optimizer: optimizer)
        assert_same("weights", weights_after_a_buffer_is_used_again(optfuse.fuse), stock)
