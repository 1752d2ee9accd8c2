# SPDX-License-Identifier: BSD-3-Clause
"""Rows of docs/hazards.md that neither another test nor a deed of the programs has; the page names
the tests of all rows."""

import copy
import ctypes

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
from scripts import trained

import optfuse

STEPS = 4


def write(model, _):
    model[0].weight.data = model[0].weight.data * 0.5
    with torch.no_grad():
        model[2].weight.copy_(torch.ones_like(model[2].weight))


def clear_averages(optimizer):
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()


def test_state_between_backward_and_step_is_the_new_one():
    """In backward mode, where a write to it raises; in forward mode it is stock's."""

    def change(_, optimizer, i):
        yield "state", optimizer.state_dict()
        clear_averages(optimizer)

    same(trained(before_step=change))
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    assert {entry["step"].item() for entry in optimizer.state.values()} == {2}
    clear_averages(optimizer)
    refused(optimizer.step, "the state of", "was written in place")
    optimizer.step()
    assert not any(entry["exp_avg"].any() for entry in optimizer.state.values())


def test_load_between_backward_and_step():
    """In backward mode it is refused (test_backward_refusals.py)."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        for i in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.load_state_dict(saved)
            optimizer.step()
        yield from everything(model, optimizer)

    same(script)


def test_weights_between_backward_and_step_are_the_new_ones():
    """In backward mode, where a write to them raises; in forward mode they are stock's."""

    def change(model, optimizer, i):
        yield "weights", weights(model)
        write(model, optimizer)

    same(trained(before_step=change))
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    old = weights(model)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    new = weights(model)
    optimizer.step()
    assert all(torch.equal(p, new[k]) for k, p in model.state_dict().items())
    assert not any(torch.equal(new[k], old[k]) for k in new)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    write(model, optimizer)
    refused(optimizer.step, "was written in place")
    optimizer.step()
    assert torch.equal(model[2].weight, torch.ones_like(model[2].weight))


def test_two_optimizers_share_a_parameter():
    def script(wrap):
        model = net()
        optimizers = [wrap(adamw(model.parameters())), wrap(sgd(model[0].parameters()))]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, i).backward()
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            yield from everything(model, optimizer)

    same(script, prove=False)


def test_a_flush_of_one_leaves_no_old_weights_of_the_other():
    def last(wrap, flush):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizers = [wrap(sgd([weight])), wrap(adamw([weight]))]
        weight.grad = torch.ones(4)
        for optimizer in optimizers:
            optimizer.step()
        flush(optimizers[0])
        return weight.detach() + 0

    assert last(optfuse.fuse, optfuse.flush).equal(
        last(lambda optimizer: optimizer, lambda _: None)
    )


def taken_over(taken):
    """Another optimizer takes over a state; both train in one backward pass."""

    def script(wrap):
        models = [net(), net()]
        optimizers = [wrap(sgd(model.parameters())) for model in models]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(loss_of(model, i + n) for n, model in enumerate(models)).backward()
            for optimizer in optimizers:
                optimizer.step()
            if i == 1:
                optimizers[1].load_state_dict(taken(optimizers[0].state_dict()))
        for model, optimizer in zip(models, optimizers, strict=True):
            yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_state_of_two_optimizers(mode):
    """load_state_dict() does not copy the tensors."""
    same(taken_over(lambda state: state), mode, prove=False)


@pytest.mark.parametrize("taken", [lambda state: state, copy.deepcopy])
def test_a_state_that_stock_uses_between_backward_and_step(taken):
    """The fused optimizer has used it in backward, before it could know."""

    def script(wrap):
        models = [net(), net()]
        optimizers = [wrap(sgd(models[0].parameters())), sgd(models[1].parameters())]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(loss_of(model, i + n) for n, model in enumerate(models)).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
            if i == 1:
                optimizers[1].load_state_dict(taken(optimizers[0].state_dict()))
        for model, optimizer in zip(models, optimizers, strict=True):
            yield from everything(model, optimizer)

    same(script, prove=False)
    if taken is copy.deepcopy:
        same(script, "backward", prove=False)
        return
    with pytest.raises(AssertionError, match="elements differ from stock"):
        same(script, "backward", prove=False)


def test_a_kept_address_shows_the_update_after_flush():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    optfuse.flush()
    address = model[0].weight.data_ptr()
    train(model, optimizer, 1)
    before = ctypes.string_at(address, 48)
    optfuse.flush()
    after = ctypes.string_at(address, 48)
    assert before != after == model[0].weight.detach().numpy().tobytes()[:48]
