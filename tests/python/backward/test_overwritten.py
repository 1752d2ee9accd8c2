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
from programs.deeds.overwriting import OVERWRITES, REPLACES
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

# Ways to write all of a gradient, and to replace it.
WAYS = {**OVERWRITES, **REPLACES}


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
                        WAYS[way](p)
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
