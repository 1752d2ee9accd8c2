# SPDX-License-Identifier: BSD-3-Clause
"""The effects of a step, and what it leaves alone, for every class that fuses: a theme of
PyTorch's own test/test_optim.py. A fused optimizer and its stock twin are led
through the same and compared by bits."""

import pytest
from common import assert_same, everything, loss_of, same, snapshot, train
from optim_classes import accepts, build, matrices, model_for, set_gradients
from optim_scripts import STEPS, both_modes, every_class
from scripts import trained
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import optfuse


@every_class
@both_modes
def test_steps_are_counted_where_there_was_a_gradient(cls, mode):
    def script(wrap):
        params = matrices()
        optimizer = wrap(build(cls, params))
        for i in range(6):
            optimizer.zero_grad()
            used = [p for k, p in enumerate(params) if i % (k + 1) == 0]
            sum((p * p).sum() for p in used).backward()
            optimizer.step()
        yield "steps", [optimizer.state[p].get("step") for p in params]
        yield "state", optimizer.state_dict()
        yield "parameters", params

    same(script, mode)


@every_class
@both_modes
def test_hooks_of_this_and_of_all_optimizers(cls, mode):
    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        seen = []

        def saw(what):
            return lambda it, args, kwargs: seen.append((what, it is optimizer, args[1:], kwargs))

        handles = [
            optimizer.register_step_pre_hook(saw("pre")),
            optimizer.register_step_post_hook(saw("post")),
            register_optimizer_step_pre_hook(saw("pre, of all")),
            register_optimizer_step_post_hook(saw("post, of all")),
        ]
        for i in range(3):
            train(model, optimizer, i)
        for handle in handles:
            handle.remove()
        train(model, optimizer, 3)
        yield "calls", seen
        yield from everything(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_a_closure(cls, mode):
    def iteration(model, optimizer, i):
        def closure(i=i):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            return loss

        yield "loss", optimizer.step(closure)

    same(
        trained(lambda p: build(cls, p), lambda: model_for(cls), iteration=iteration, steps=STEPS),
        mode,
    )


@every_class
@both_modes
@pytest.mark.parametrize("set_to_none", (True, False))
def test_zero_grad(cls, mode, set_to_none):
    """With zeros kept, what has momentum moves on."""

    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i, set_to_none)
        optimizer.zero_grad(set_to_none)
        yield "gradients", [p.grad for p in model.parameters()]
        optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_parameters_without_a_gradient_stay(cls, mode):
    def script(wrap):
        params = matrices()
        optimizer = wrap(build(cls, params))
        for _ in range(STEPS):
            optimizer.zero_grad()
            (params[0] * params[2].sum()).sum().backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    same(script, mode)


@every_class
def test_the_gradient_is_left_as_it_was(cls):
    """Options that change it, such as weight decay, change a copy."""
    options = {k: v for k, v in {"weight_decay": 0.1, "maximize": True}.items() if accepts(cls, k)}
    params = matrices()
    optimizer = optfuse.fuse(build(cls, params, **options))
    for i in range(STEPS):
        set_gradients(params, i)
        before = snapshot([p.grad for p in params])
        optimizer.step()
        optfuse.flush()
        assert_same("gradients", [p.grad for p in params], before)
