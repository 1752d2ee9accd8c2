# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: a consumed gradient that is overwritten by hand holds what was written, and so do
its aliases; between backward() and step() that is refused."""

import pytest
import torch
from common import (
    adamw,
    everything,
    fused_backward,
    loss_of,
    net,
    refused,
    same,
    sgd,
    train,
    weights,
)
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)


def with_all(value):
    """`p.grad[...] = value`"""
    return lambda p: p.grad.__setitem__(..., value)


def replace_by_zeros(p):
    p.grad = torch.zeros_like(p.grad)


def draw(p):
    torch.manual_seed(3)
    p.grad.normal_()


OVERWRITES = {
    "zero_": lambda p: p.grad.zero_(),
    "zero_ of data": lambda p: p.grad.data.zero_(),
    "zero_ of detach()": lambda p: p.grad.detach().zero_(),
    "detach_, zero_": lambda p: p.grad.detach_().zero_(),
    "fill_": lambda p: p.grad.fill_(0.5),
    "fill_ with a tensor": lambda p: p.grad.data.fill_(torch.tensor(0.5)),
    "copy_": lambda p: p.grad.copy_(torch.linspace(0, 1, p.numel()).view_as(p)),
    "copy_ of a number": lambda p: p.grad.detach().copy_(torch.tensor(2.0)),
    "[...] = number": with_all(0.25),
    "[...] = tensor": with_all(torch.tensor(0.25)),
    "[:] =": lambda p: p.grad.data.__setitem__(slice(None), 0.0),
    "normal_": draw,
    "init.uniform_": lambda p: (torch.manual_seed(3), nn.init.uniform_(p.grad)),
    "_foreach_zero_": lambda p: torch._foreach_zero_([p.grad]),
    "_foreach_zero_ of aliases": lambda p: torch._foreach_zero_([p.grad.data, p.grad.detach()]),
    "_foreach_copy_": lambda p: torch._foreach_copy_([p.grad], [torch.ones_like(p)]),
    "zeros_like": replace_by_zeros,
    "data =": lambda p: setattr(p.grad, "data", torch.zeros_like(p)),
}


def test_gradients_zeroed_by_hand_are_updated_in_backward_all_the_same():
    model, optimizer = fused_backward()
    for i in range(4):
        before = weights(model)
        loss_of(model, i).backward()
        assert not any(torch.equal(p, before[name]) for name, p in model.state_dict().items())
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()


def replicate(_, module, mesh):
    """Without a message: gloo's thread has the parameters' memory for a while after one, on a busy
    machine during the first backward pass still, whose updates are then left to step()."""
    for name, p in list(module.named_parameters(recurse=False)):
        local = distribute_tensor(p.data, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(local))


def replicated():
    """Its parameters are DTensors."""
    mesh = init_device_mesh("cpu", (1,))
    return distribute_module(
        net(),
        mesh,
        replicate,
        input_fn=lambda _, inputs, mesh: DTensor.from_local(*inputs, mesh),
        output_fn=lambda _, output, mesh: output.to_local(),
    )


ON_ALIASES = (
    "zero_ of data",
    "zero_ of detach()",
    "fill_ with a tensor",
    "copy_ of a number",
    "[:] =",
    "_foreach_zero_ of aliases",
)


@pytest.mark.parametrize("way", ON_ALIASES)
@pytest.mark.parametrize("when", ("before step", "after step"))
def test_aliases_of_a_consumed_dtensor_can_not_be_overwritten(way, when, gloo):
    def script(wrap):
        model = replicated()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            if when == "after step":
                optimizer.step()
            if wrap.fused:
                for p in model.parameters():
                    with pytest.raises(RuntimeError):
                        OVERWRITES[way](p)
                    refused(p.grad.sum, "already applied")
            if when == "before step":
                optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_a_gradient_that_could_not_be_overwritten_is_still_consumed():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    grad = model[0].weight.grad
    with pytest.raises(RuntimeError, match="must match"):
        grad.copy_(torch.ones(5, 7))
    refused(grad.sum, "already applied")
    refused(lambda: grad.copy_(grad), "already applied")
    refused(lambda: torch._foreach_copy_([grad], [model[2].weight.grad]), "already applied")
    assert grad.zero_().count_nonzero() == 0


def test_gradients_without_storage_are_overwritten_in_one_list_with_consumed_ones():
    def script(wrap):
        model, sparse = net(), nn.Embedding(4, 3, sparse=True)
        optimizer = wrap(sgd(model.parameters()))
        for i in range(3):
            (loss_of(model, i) + sparse(torch.tensor([1, 2])).sum()).backward()
            optimizer.step()
            grads = [sparse.weight.grad, *(p.grad for p in model.parameters())]
            torch._foreach_zero_(grads)
            yield "gradients", [grad.to_dense() for grad in grads]
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_a_gradient_that_outlives_its_optimizer_may_be_overwritten():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    del optimizer
    assert model[0].weight.grad.fill_(2.0).mean() == 2
