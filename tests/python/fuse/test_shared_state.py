# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that share tensors of their state, as b.load_state_dict(a.state_dict()) makes them:
it copies none that has the right dtype and device."""

import copy
import gc

import own_classes
import pytest
import style_classes
import torch
from common import same
from torch import nn

import optfuse

MODES = ["forward", "backward"]
KINDS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, foreach=False),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01, foreach=False),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, foreach=False),
    "recorded": style_classes.AdaBelief,
    "recorded, counter a tensor": style_classes.TensorCounter,
    "registered": own_classes.Tensors,
}
COMPILED = ["sgd", "adamw", "rmsprop", "nadam"]
RECORDED = [kind for kind in KINDS if kind.startswith("recorded")]


@pytest.fixture(autouse=True)
def registered():
    optfuse.register(own_classes.Tensors, per_parameter=True)


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def train(models, optimizers, i, order=1):
    torch.manual_seed(i)
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(model(torch.randn(4, 6)).square().sum() for model in models).backward()
    for optimizer in optimizers[::order]:
        optimizer.step()


def everything(models, optimizers):
    for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        yield f"weights of {n}", [p.detach() for p in model.parameters()]
        yield f"state of {n}", [optimizer.state[p] for p in model.parameters()]


def by_loading(a, b):
    b.load_state_dict(a.state_dict())


def by_entries(a, b):
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        b.state[q] = a.state[p]


def of_one_parameter(a, b):
    b.state[b.param_groups[0]["params"][1]] = a.state[a.param_groups[0]["params"][1]]


def proves(mode, kind):
    """State that two without kernels share leaves all to the class's step()."""
    return mode == "backward" and kind in COMPILED


GIVEN = [by_loading, by_entries, of_one_parameter]


def shared(make, give, order=1, steps=5, wraps=(True, True)):
    def script(wrap):
        models = [net(), net()]
        optimizers = [make(list(model.parameters())) for model in models]
        optimizers = [wrap(o) if w else o for o, w in zip(optimizers, wraps, strict=True)]
        for i in range(2):
            train(models, optimizers, i)
        give(*optimizers)
        for i in range(steps):
            train(models, optimizers, 2 + i, order)
        yield from everything(models, optimizers)

    return script


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_share_state_by_load_state_dict(mode, kind, order):
    same(shared(KINDS[kind], by_loading, order), mode, prove=proves(mode, kind))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("give", [by_entries, of_one_parameter])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_share_entries(mode, kind, give, order):
    same(shared(KINDS[kind], give, order), mode, prove=proves(mode, kind) and order == 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_have_one_state(mode, kind):
    def script(wrap):
        models = [net(), net()]
        optimizers = [wrap(KINDS[kind](list(model.parameters()))) for model in models]
        for i in range(2):
            train(models, optimizers, i)
        optimizers[1].state = optimizers[0].state
        for i in range(4):
            train(models, optimizers, 2 + i)
        yield from everything(models, optimizers)

    same(script, mode, prove=False)


@pytest.mark.parametrize("both_fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shallow_copy_of_an_optimizer(kind, both_fused):
    """In forward mode: in backward mode two optimizers can't have the same parameters."""

    def script(wrap):
        model = net()
        optimizer = wrap(KINDS[kind](list(model.parameters())))
        for i in range(2):
            train([model], [optimizer], i)
        other = copy.copy(optimizer)
        if both_fused:
            other = wrap(other)
        for i in range(4):
            train([model], [optimizer, other], 2 + i)
        yield from everything([model], [optimizer])

    same(script, prove=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_group_is_added_whose_state_another_optimizer_has(mode, kind):
    def script(wrap):
        models = [net(), net()]
        optimizers = [wrap(KINDS[kind](list(models[0].parameters())))]
        optimizers.append(wrap(KINDS[kind](list(models[1][0].parameters()))))
        for i in range(2):
            train(models, optimizers, i)
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1][2].zero_grad()
        for p, q in zip(models[0][2].parameters(), models[1][2].parameters(), strict=True):
            optimizers[1].state[q] = optimizers[0].state[p]
        optimizers[1].add_param_group({"params": list(models[1][2].parameters())})
        for i in range(4):
            train(models, optimizers, 2 + i, order=-1)
        yield from everything(models, optimizers)

    same(script, mode, prove=False)


@pytest.mark.parametrize("kind", [*COMPILED, *RECORDED])
def test_one_in_each_mode(kind):
    for backward in (0, 1):

        def script(wrap, backward=backward):
            made = []

            def by_turns(optimizer):
                made.append(optimizer)
                mode = "backward" if len(made) - 1 == backward else "forward"
                return wrap(optimizer, mode=mode)

            yield from shared(KINDS[kind], by_loading)(by_turns)
            del made[:]

        same(script, prove=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_stock_optimizer_shares_state_and_steps_later(mode, kind):
    same(shared(KINDS[kind], by_loading, wraps=(True, False)), mode, prove=False)


@pytest.mark.parametrize("still", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_new_optimizer_takes_over_the_state(mode, kind, still):
    """still: the old one lives on, unused."""

    def script(wrap):
        models = [net(), net()]
        old = wrap(KINDS[kind](list(models[0].parameters())))
        for i in range(2):
            train(models[:1], [old], i)
        new = wrap(KINDS[kind](list(models[1].parameters())))
        new.load_state_dict(old.state_dict())
        if not still:
            del old
        for i in range(4):
            train(models[1:], [new], 2 + i)
        yield from everything(models[1:], [new])
        if wrap.fused and proves(mode, kind):
            in_backward = optfuse.summary(new).created
            assert in_backward > 0

    same(script, mode, prove=False)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "recorded", "registered"])
def test_when_the_other_optimizer_is_gone_updates_run_in_backward_again(kind):
    models = [net(), net()]
    optimizers = [optfuse.fuse(KINDS[kind](list(m.parameters())), mode="backward") for m in models]
    for i in range(2):
        train(models, optimizers, i)
    by_loading(*optimizers)
    train(models, optimizers, 2)
    parameters = list(models[1].parameters())
    loss = models[1](torch.randn(4, 6)).square().sum()
    optimizers[1].zero_grad()
    before = [p.detach().clone() for p in parameters]
    loss.backward()
    assert all(map(torch.equal, before, parameters)), "an update did not wait for step()"
    optimizers[1].step()
    del optimizers[0]
    optimizers[0].zero_grad()
    before = [p.detach().clone() for p in parameters]
    models[1](torch.randn(4, 6)).square().sum().backward()
    assert not any(map(torch.equal, before, parameters)), "an update waited for step()"


def trained(kind):
    """Two models and their optimizers in backward mode, with state and without gradients."""
    models = [net(), net()]
    optimizers = [
        optfuse.fuse(KINDS[kind](list(model.parameters())), mode="backward") for model in models
    ]
    for i in range(2):
        train(models, optimizers, i)
    for optimizer in optimizers:
        optimizer.zero_grad()
    return models, optimizers


def too_late(kind):
    """Two optimizers, of which the second step() is refused, and what it raised: the first
    backward pass begins with a parameter of the one that gave its state."""
    models, optimizers = trained(kind)
    by_entries(*optimizers)
    for model in models:
        model(torch.randn(4, 6)).square().sum().backward()
    message = r"parameter 0 of group 0.*in common with parameter 0 of group 0.*of another optimizer"
    with pytest.raises(optfuse.Error, match=message) as raised:
        optimizers[1].step()
    return optimizers, raised


def test_state_that_is_shared_too_late_raises():
    optimizers, _ = too_late("adamw")
    optimizers[0].step()
    optimizers[1].step()  # which is what stock's would have done


@pytest.mark.parametrize("kind", COMPILED)
def test_state_of_its_own_is_what_a_refused_step_needs(kind):
    optimizers, _ = too_late(kind)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    optimizers[1].step()
    optimizers[0].step()


def test_who_keeps_the_error_may_unfuse_the_other_optimizer():
    """The frame that raised it must not keep, and ask, a plan that is gone."""
    optimizers, raised = too_late("adamw")
    optimizers[0].step()
    optfuse.unfuse(optimizers[0])
    gc.collect()
    optimizers[1].step()
    del raised


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("mode", MODES)
def test_two_parameters_of_one_optimizer_with_one_state_are_refused(mode, kind):
    model = net()
    parameters = list(model.parameters())
    parameters.append(nn.Parameter(torch.ones_like(parameters[0])))
    model.other = nn.Linear(6, 5, bias=False)
    model.other.weight = parameters[-1]
    optimizer = optfuse.fuse(KINDS[kind](parameters), mode=mode)

    def iterate():
        optimizer.zero_grad()
        x = torch.randn(4, 6)
        (model[:3](x).sum() + model.other(x).square().sum()).backward()
        optimizer.step()

    iterate()
    optimizer.state[parameters[-1]] = optimizer.state[parameters[0]]
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(optfuse.Error, match="parameter 0 of group 0.*parameter 4 of group 0"):
        iterate()
    assert all(map(torch.equal, before, parameters))
    optimizer.state[parameters[-1]] = copy.deepcopy(optimizer.state[parameters[0]])
    if mode == "forward":
        iterate()
        assert not any(map(torch.equal, before, parameters))


@pytest.mark.parametrize("kind", ["adafactor", "registered", *RECORDED])
@pytest.mark.parametrize("mode", MODES)
def test_two_parameters_of_one_optimizer_with_one_state(mode, kind):
    """PyTorch's operators update one after the other."""

    def script(wrap):
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
        optimizer = wrap(KINDS[kind](list(model.parameters())))
        for i in range(5):
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            if i == 0:
                optimizer.state[model[2].weight] = optimizer.state[model[0].weight]
        yield "weights", [p.detach() for p in model.parameters()]
        yield "state", [optimizer.state[p] for p in model.parameters()]

    same(script, mode, prove=False)


def test_parameters_exchange_their_states():
    def script(wrap):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        optimizer = wrap(KINDS["adamw"](list(model.parameters())))
        for i in range(4):
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            a, b = model[0].weight, model[1].weight
            optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]
        yield "weights", [p.detach() for p in model.parameters()]

    for mode in MODES:
        same(script, mode)
