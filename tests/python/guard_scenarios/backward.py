# SPDX-License-Identifier: BSD-3-Clause
"""Guards of backward fusion: what it can't answer raises, in time."""

import copy

import torch
from common import adamw, batch, loss_of, net
from torch import nn

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise


@guards("twice")
def a_second_gradient_before_step_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.ours.zero_grad()
    must_raise(lambda: loss_of(pair.ours, 1).backward(), "a second backward before step()")


@guards("consumed", "discarded")
def clipping_a_consumed_gradient_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    must_raise(lambda: nn.utils.clip_grad_norm_(pair.ours.parameters(), 0.1), "clip_grad_norm_")


@guards("consumed_twice")
def a_gradient_that_is_gone_is_not_left_out():
    pair = Pair(mode="backward")
    pair.train(0)
    must_raise(pair.fused.step, "a second step() on the same gradients")


@guards("discarded")
def a_gradient_thrown_away_after_it_was_applied_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.ours.zero_grad()
    must_raise(pair.fused.step, "step() after the gradients were thrown away")


@guards("overwritten", "discarded")
def a_gradient_overwritten_between_backward_and_step_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    must_raise(pair.ours[0].weight.grad.zero_, "zero_() before step()")


@guards("consumed_alias")
def an_alias_of_an_old_gradient_is_none_of_the_next_one():
    pair = Pair(mode="backward")
    pair.train(0)
    kept = pair.ours[0].weight.grad.data
    pair.train(1)
    kept.zero_()
    must_raise(pair.ours[0].weight.grad.sum, "a gradient that was zeroed through an older one")


@guards("late")
def a_learning_rate_changed_after_backward_is_not_ignored():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.fused.param_groups[0]["lr"] *= 0.5
    must_raise(pair.fused.step, "step() with another learning rate than backward used")


def between_backward_and_step():
    pair = Pair(mode="backward")
    pair.train(0)
    pair.fused.zero_grad()
    loss_of(pair.ours, 1).backward()
    return pair


@guards("late_groups")
def a_parameter_taken_out_after_backward_is_not_updated_in_silence():
    pair = between_backward_and_step()
    pair.fused.param_groups[0]["params"].pop()
    must_raise(pair.fused.step, "step() without a parameter that backward has updated")


@guards("late_state")
def a_state_thrown_away_after_backward_is_not_ignored():
    pair = between_backward_and_step()
    pair.fused.state.clear()
    must_raise(pair.fused.step, "step() with another state than backward used")


@guards("late_scale")
def an_overflow_said_after_backward_is_not_ignored():
    pair = between_backward_and_step()
    pair.fused.found_inf = torch.tensor(1.0)
    must_raise(pair.fused.step, "step() that stock would skip")


@guards("written")
def a_state_written_after_backward_is_not_left_as_it_is():
    pair = between_backward_and_step()
    next(iter(pair.fused.state.values()))["exp_avg"].zero_()
    must_raise(pair.fused.step, "step() with state that was written since backward")


@guards("late_load")
def a_state_loaded_after_backward_is_not_left_without_its_update():
    pair = Pair(mode="backward")
    pair.train(0)
    saved = copy.deepcopy(pair.fused.state_dict())
    pair.fused.zero_grad()
    loss_of(pair.ours, 1).backward()
    must_raise(lambda: pair.fused.load_state_dict(saved), "load_state_dict() before step()")


@guards("added_late")
def gradients_added_after_the_update_are_not_kept_for_a_later_step():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.ours.zero_grad()
    with optfuse.accumulate(pair.fused):
        must_raise(lambda: loss_of(pair.ours, 1).backward(), "adding before step()")


@guards("nested")
def a_backward_inside_another_is_not_counted_as_a_pass():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Backward(accumulate=2))

    def loss():
        x, y = batch(0)
        checked = torch.utils.checkpoint.checkpoint
        return (checked(model, x.requires_grad_(), use_reentrant=True) - y).sum()

    must_raise(lambda: loss().backward(), "counting a pass inside another")
    optimizer.step()


@guards("recheck")
def an_evicted_gradient_hook_is_put_back_by_step():
    pair = Pair(mode="backward")
    pair.train(0)
    for p in pair.ours.parameters():
        p._post_accumulate_grad_hooks = {}
    pair.train(1)
    made = optfuse.summary(pair.fused).created
    pair.fused.zero_grad()
    loss_of(pair.ours, 2).backward()
    more = optfuse.summary(pair.fused).created - made
    assert more == 6, f"{more} of 6 updates ran inside backward"


@guards("groups")
def a_group_taken_away_does_not_lend_its_learning_rate():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}]
    optimizer = optfuse.fuse(torch.optim.SGD(groups), mode="backward")
    del optimizer.param_groups[0]
    must_raise((a + b).sum().backward, "backward after a change of param_groups")


@guards("create_graph")
def create_graph_is_refused():
    pair = Pair(mode="backward")
    must_raise(lambda: loss_of(pair.ours, 0).backward(create_graph=True), "create_graph")


@guards("scaler")
def a_scaled_loss_is_refused():
    pair = Pair(mode="backward")
    scaler = torch.amp.GradScaler("cpu")
    must_raise(lambda: scaler.scale(loss_of(pair.ours, 0)).backward(), "a scaled loss")


@guards("shared_state", "early_state", "written")
def a_state_that_another_optimizer_has_is_used_in_the_order_of_step():
    a, b = Pair(mode="backward"), Pair(mode="backward")
    for i in range(4):
        for models, optimizers in (
            ([a.theirs, b.theirs], [a.stock, b.stock]),
            ([a.ours, b.ours], [a.fused, b.fused]),
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(loss_of(model, i + n) for n, model in enumerate(models)).backward()
            for optimizer in optimizers:
                optimizer.step()
            if i == 0:
                optimizers[1].load_state_dict(optimizers[0].state_dict())
    a.assert_same()
    b.assert_same()


@guards("early_state")
def a_state_that_backward_has_used_for_another_optimizer_raises():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    one, other = (optfuse.fuse(adamw([p]), mode="backward") for p in (first, second))
    for p, optimizer in ((first, one), (second, other)):
        p.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other.state[second] = one.state[first]
    first.sum().backward()
    second.sum().backward()
    must_raise(other.step, "a step() that comes before that of an update made in backward")
