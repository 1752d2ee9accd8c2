# SPDX-License-Identifier: BSD-3-Clause
"""Parameter groups and their options, for every class that fuses: a theme of
PyTorch's own test/test_optim.py. A fused optimizer and its stock twin are led
through the same and compared by bits."""

import pytest
import torch
from common import assert_same, same, snapshot, train
from optim_classes import accepts, build, matrices, model_for, set_gradients
from optim_scripts import STEPS, begun, both_modes, every_class, go_on, minimized

import optfuse

#: With a learning rate that is a float32 tensor, the for-loop of these computes
#: the step size in float32, which with a number is done in double.
LR_IN_FLOAT32 = ("ASGD", "Adamax", "NAdam", "RAdam")


@every_class
@both_modes
def test_groups_with_options_of_their_own(cls, mode):
    def script(wrap):
        params = matrices()
        groups = [
            {"params": params[:1], "lr": 0.1},
            {"params": params[1:2], "weight_decay": 0.3} if accepts(cls, "weight_decay")
            else {"params": params[1:2]},
            {"params": params[2:]},
        ]  # fmt: skip
        optimizer = wrap(build(cls, groups))
        yield from minimized(params, optimizer)

    same(script, mode)


def check_adds_groups(cls):
    """Adagrad of 2.11 makes state in its constructor only, and has none for later groups."""
    params = matrices()
    optimizer = build(cls, params[:1])
    optimizer.add_param_group({"params": params[1:]})
    set_gradients(params, 0)
    try:
        optimizer.step()
    except KeyError:
        assert cls.__name__ == "Adagrad"
        pytest.skip("stock itself can't step a group that was added")


@every_class
@both_modes
def test_a_group_added_later(cls, mode):
    check_adds_groups(cls)

    def script(wrap):
        params = matrices()
        optimizer = wrap(build(cls, params[:2]))
        for i in range(STEPS):
            if i == 2:
                optimizer.add_param_group({"params": params[2:], "lr": 0.2})
            for p in params:
                p.grad = None
            sum((p * p).sum() for p in params[: 2 if i < 2 else 3]).backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    same(script, mode)


def changed(value):
    """Another value that the option may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 0.5 if value else 0.1
    if isinstance(value, tuple) and all(isinstance(v, float) for v in value):
        return tuple(v * 0.5 for v in value)
    return value


@every_class
@both_modes
def test_every_option_changed_in_the_group(cls, mode):
    """One after the other, while updates with the old value are pending."""
    fixed = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
    fixed += ("centered", "amsgrad", "momentum")  # they need other state from the start
    fixed += ("nesterov",) if cls.__name__ == "SGD" else ()

    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        (group,) = optimizer.param_groups
        for i, option in enumerate(key for key in list(group) if key not in fixed):
            train(model, optimizer, i)
            if i > 0:
                wrap.pending()
            group[option] = changed(group[option])
            if option == "etas":
                group[option] = (0.4, 1.3)
        yield from go_on(model, optimizer, 30)

    same(script, mode)


@every_class
@both_modes
def test_lr_as_a_tensor_on_the_cpu(cls, mode):
    """Where stock computes with it in float32 before it becomes a number, the
    reference gets the number."""

    def script(wrap):
        lr = torch.tensor(0.02)
        model = model_for(cls)
        as_tensor = wrap.fused or cls.__name__ not in LR_IN_FLOAT32
        optimizer = wrap(build(cls, model.parameters(), lr=lr if as_tensor else lr.item()))
        for i in range(STEPS):
            train(model, optimizer, i)
            if i > 0:  # a class's own step() makes the state at once
                wrap.pending()
            lr.mul_(0.7)
            if not as_tensor:
                optimizer.param_groups[0]["lr"] = lr.item()
        yield "lr", torch.as_tensor(optimizer.param_groups[0]["lr"])
        yield "parameters", dict(model.state_dict())
        yield "state", optimizer.state_dict()["state"]

    same(script, mode)


@every_class
def test_maximize_is_the_same_as_negated_gradients(cls):
    if not accepts(cls, "maximize"):
        assert cls.__name__ == "Muon", f"{cls.__name__} has no maximize"
        return
    results = []
    for maximize in (False, True):
        params = matrices()
        optimizer = optfuse.fuse(build(cls, params, maximize=maximize))
        for i in range(STEPS):
            set_gradients(params, i, -1.0 if maximize else 1.0)
            optimizer.step()
        results.append(snapshot([p.detach() for p in params]))
    assert_same("parameters", *results)


@every_class
def test_bad_options_are_refused_in_stock_s_words(cls):
    def why_not(kind):
        with pytest.raises(ValueError) as error:
            kind(matrices(), lr=-1.0)
        return str(error.value)

    fused = optfuse.fuse(build(cls, matrices()))
    assert why_not(type(fused)) == why_not(cls)


@every_class
@both_modes
def test_another_optimizer_made_of_its_class(cls, mode):
    """type(optimizer)(...) makes an optimizer that steps, fused or not."""

    def script(wrap):
        _, optimizer = begun(cls, wrap)
        model = model_for(cls)
        defaults = {k: v for k, v in optimizer.defaults.items() if accepts(cls, k)}
        another = type(optimizer)(model.parameters(), **defaults)
        yield "class", type(another) is cls
        yield from go_on(model, another)

    same(script, mode)
