# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: a gradient that was applied and freed is not "no gradient".
Stock would apply it again, so step() refuses instead of leaving it out."""

import pytest
import torch
from common import adamw, assert_same, fused_backward, loss_of, refused, same, sgd, train, weights
from torch import nn

import optfuse

AGAIN = "zero_grad()"


def test_step_twice_after_one_backward_is_refused():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    before = weights(model)
    refused(optimizer.step, "already been applied", way_out=AGAIN)
    assert_same("weights after the refusal", weights(model), before)


def test_a_second_optimizer_in_forward_mode_finds_the_gradient_gone():
    p = nn.Parameter(torch.ones(3))
    first = optfuse.fuse(sgd([p]), mode="backward")
    second = optfuse.fuse(sgd([p]))
    p.sum().backward()
    first.step()
    refused(second.step, "already been applied", way_out=AGAIN)


def test_a_parameter_left_out_of_the_next_backward_without_zero_grad():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optfuse.fuse(sgd([a, b]), mode="backward")
    (a.sum() + b.sum()).backward()
    optimizer.step()
    a.grad = None
    a.sum().backward()
    refused(optimizer.step, "parameter 1 of group 0", way_out=AGAIN)


@pytest.mark.parametrize("set_to_none", (True, False))
def test_a_parameter_left_out_of_the_next_backward_after_zero_grad(set_to_none):
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([a, b]))
        for i in range(4):
            optimizer.zero_grad(set_to_none)
            (a.sum() * 2 + (b.sum() if i % 2 else 0)).backward()
            optimizer.step()
        yield "weights", [a.detach(), b.detach()]

    same(script, mode="backward")


MOVES = {
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("move", MOVES)
def test_moving_a_model_with_spent_gradients_names_the_way_out(move):
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    refused(lambda: MOVES[move](model), "moved", way_out=AGAIN)
    optimizer.zero_grad()
    MOVES[move](model)


def test_groups_taken_away_are_noticed_before_an_update():
    """The library would use another group's learning rate."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}]
    optimizer = optfuse.fuse(torch.optim.SGD(groups), mode="backward")
    (a.sum() + b.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer.param_groups[0]
    refused((a.sum() + b.sum()).backward, "param_groups", way_out=AGAIN)
    assert (a.tolist(), b.tolist()) == ([0, 0], [0.5, 0.5])


def test_groups_taken_away_before_zero_grad():
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}]))
        for i in range(5):
            if i == 2:
                del optimizer.param_groups[0]
            if i == 4:
                optimizer.param_groups[0]["params"].append(a)
            for p in (a, b):
                p.grad = None
            optimizer.zero_grad()
            (a.sum() + b.sum()).backward()
            optimizer.step()
            yield "weights", [a.detach(), b.detach()]

    same(script, mode="backward")


def test_a_group_added_between_backward_and_step():
    def script(wrap):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(adamw([a]))
        for i in range(4):
            optimizer.zero_grad()
            (a * b).sum().backward()
            if i == 1:
                optimizer.add_param_group({"params": [b], "lr": 0.5})
            optimizer.step()
            b.grad = None
            yield "weights", [a.detach(), b.detach()]

    same(script, mode="backward")


def test_groups_changed_inside_backward_are_refused():
    model, optimizer = fused_backward()
    extra = nn.Parameter(torch.ones(2))
    seen = []

    def change(_):
        add = {"params": [extra]}
        seen.append(refused(lambda: optimizer.add_param_group(add), way_out="before"))
        seen.append(refused(lambda: optfuse.unfuse(optimizer), way_out="before"))

    model[0].weight.register_hook(change)
    loss_of(model, 0).backward()
    optimizer.step()
    assert len(seen) == 2 and len(optimizer.param_groups) == 1


def test_an_interrupt_inside_backward_stays_an_interrupt():
    model, optimizer = fused_backward()
    before = weights(model)

    class Interrupting(dict):
        def __getitem__(self, key):
            raise KeyboardInterrupt("here")

    optimizer.param_groups[0] = Interrupting(optimizer.param_groups[0])
    with pytest.raises(KeyboardInterrupt, match="here"):
        loss_of(model, 0).backward()
    assert_same("weights after the interrupt", weights(model), before)


def test_a_scaled_loss_is_noticed_inside_reentrant_checkpointing():
    from torch.utils.checkpoint import checkpoint

    block = nn.Linear(2, 1, bias=False)
    before = weights(block)
    optimizer = optfuse.fuse(sgd(block.parameters()), mode="backward")
    x = torch.ones(1, 2, requires_grad=True)
    loss = torch.amp.GradScaler("cpu").scale(checkpoint(block, x, use_reentrant=True).sum())
    refused(loss.backward, "GradScaler")
    assert_same("weights after the refusal", weights(block), before)
    # What the failed backward left behind must not matter to the next one.
    optimizer.zero_grad()
    block(x).sum().backward()
    optimizer.step()
    assert optfuse.summary(optimizer).created == 1


def test_a_spent_gradient_that_someone_keeps_is_not_used_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    kept = []
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        assert all(p.grad is not grad for grad in kept)
        kept.append(p.grad)
        optimizer.zero_grad()


def test_a_spent_gradient_that_nobody_keeps_is_used_again():
    """Also where Python has looked at it, as zero_grad() does."""
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    seen = set()
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        seen.add(p.grad._cdata)
        optimizer.zero_grad()
    assert len(seen) == 1


def test_a_spent_gradient_that_was_told_to_require_one_is_not_used_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    p.sum().backward()
    optimizer.step()
    p.grad.requires_grad_()
    optimizer.zero_grad()
    p.sum().backward()
    assert not p.grad.requires_grad
