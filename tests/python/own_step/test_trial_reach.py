# SPDX-License-Identifier: BSD-3-Clause
"""A trial of a class's step() reaches nothing real: not the parameters, gradients, state,
options and attributes of the optimizer, and no other optimizer."""

import contextlib
import copy
import functools
import sys
import weakref

import pytest
import torch
from common import assert_same, everything, net, refused, same, sgd, snapshot, train
from own_classes import REAL, Holding, Reaching, Tensors, Wrapper
from own_scripts import MODES

import optfuse


@pytest.fixture(autouse=True)
def registered():
    classes = Holding, Reaching, Tensors, Wrapper
    for cls in classes:
        optfuse.register(cls)
    yield
    REAL.clear()
    for cls in classes[:2]:
        optfuse.register(cls, per_parameter=False)


def trained(make):
    """A model with gradients and state, its optimizer, and copies of all of it."""
    torch.manual_seed(0)
    model = net()
    optimizer = make(list(model.parameters()))
    for i in range(2):
        train(model, optimizer, i)
    return model, optimizer


def look(model, optimizer):
    """Everything that is real."""
    gradients = [p.grad for p in model.parameters()]
    state = [dict(optimizer.state[p]) for p in model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return snapshot([list(model.parameters()), gradients, state, copy.deepcopy(groups)])


def test_an_optimizer_that_holds_another_is_refused_and_changes_nothing():
    model, optimizer = trained(lambda params: Wrapper(sgd(params)))
    before = look(model, optimizer.inner)
    refused(lambda: optfuse.fuse(optimizer), "SGD", way_out="optfuse.fuse(optimizer.inner)")
    assert_same("all of it", look(model, optimizer.inner), before)


@pytest.mark.parametrize("mode", MODES)
def test_the_optimizer_inside_may_be_fused(mode):
    def script(wrap):
        model = net()
        optimizer = Wrapper(wrap(sgd(model.parameters())))
        for i in range(6):
            train(model, optimizer, i)
        yield from everything(model, optimizer.inner)

    same(script, mode, prove=False)


def zero_redundancy(params):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


def post_local_sgd(params):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    return PostLocalSGDOptimizer(torch.optim.SGD(params, lr=0.1), averager)


@pytest.mark.parametrize("make", [zero_redundancy, post_local_sgd])
def test_wrappers_of_torch_are_told_which_optimizer_to_fuse(gloo, make):
    def script(wrap):
        model = net()
        optimizer = make(list(model.parameters()))
        if wrap.fused:
            refused(lambda: optfuse.fuse(optimizer), way_out="optfuse.fuse(optimizer.optim)")
        wrap(optimizer.optim)
        for i in range(4):
            train(model, optimizer, i)
        yield "parameters", dict(model.state_dict())

    same(script)


class Slots:
    __slots__ = ("it",)

    def __init__(self, it):
        self.it = it


class Owner:
    def __init__(self, it):
        self.it = it

    def method(self):
        return self.it


HOLDERS = {
    "a list": lambda it: [[it]],
    "a dict's key": lambda it: {it: 1},
    "a dict's value": lambda it: {"a": {"b": it}},
    "an attribute": Owner,
    "a slot": Slots,
    "a bound method": lambda it: Owner(it).method,
    "a closure": lambda it: lambda: it,
    "a partial": lambda it: functools.partial(print, it),
    "a default": lambda it: eval("lambda x=it: x", {"it": it}),
    "a weak reference": weakref.ref,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("where", ["attribute", "option", "state"])
@pytest.mark.parametrize("what", ["optimizer", "parameter", "alias"])
def test_what_is_real_is_found_wherever_it_is_held(holder, where, what):
    model = net()
    other = model[2].weight
    alias = other.detach()[2:4]
    inner = sgd(model[0].parameters())
    it = {"optimizer": inner, "parameter": other, "alias": alias}[what]
    optimizer = Holding(list(model.parameters()))
    held = HOLDERS[holder](it)
    if where == "attribute":
        optimizer.held = held
    elif where == "option":
        optimizer.param_groups[0]["held"] = held
    else:
        optimizer.state[model[0].weight]["held"] = held
    word = "optimizer" if it is inner else "parameter"
    refused(lambda: optfuse.fuse(optimizer), word, way_out="as it is")


def test_a_way_back_to_the_optimizer_itself_is_found():
    optimizer = Holding(net().parameters(), lambda self: [self.update])
    refused(lambda: optfuse.fuse(optimizer), "the optimizer itself", way_out="as it is")


def test_the_state_of_a_parameter_may_hold_its_own_memory():
    model = net()
    optimizer = Holding(list(model.parameters()))
    weight = model[0].weight
    optimizer.state[weight] |= {"t": torch.zeros(()), "m": torch.zeros(8, 6), "alias": weight.data}
    optfuse.fuse(optimizer)


def overwrite(real):
    real.data.add_(1)


def view(real):
    real.detach().numpy()[:] = 1


def swallow(real):
    with contextlib.suppress(RuntimeError):
        overwrite(real)


def read(real):
    real.sum()


def drop_gradient(real):
    real.grad = None


def exchange(real):
    real.data = torch.zeros(3)


def freeze(real):
    real.requires_grad_(False)


def set_(real):
    with torch.no_grad():
        real.set_(torch.zeros(3))


ACTS = (overwrite, view, swallow, read, drop_gradient, exchange, freeze, set_)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_the_search_does_not_find_is_out_of_reach(act):
    """A global variable, say."""
    model, optimizer = trained(lambda params: Reaching(params, act))
    before = look(model, optimizer)
    params, gradients = list(model.parameters()), [p.grad for p in model.parameters()]
    addresses = [p.data_ptr() for p in params]
    REAL.extend(params)
    if act is swallow:
        optfuse.fuse(optimizer)
    else:
        refused(lambda: optfuse.fuse(optimizer), way_out="as it is")
    REAL.clear()
    assert_same("all of it", look(model, optimizer), before)
    assert all(p.grad is g for p, g in zip(params, gradients, strict=True))
    assert [p.data_ptr() for p in params] == addresses
    train(model, optimizer, 2)


RAN = "Its step() was tried on small copies: whatever it counts outside of the optimizer"


def test_a_refusal_after_a_trial_says_that_step_has_run():
    """A trial can't set back a counter that it does not find; at the next one, too."""
    counts = []

    def count(real):
        counts.append(None)
        overwrite(real)

    model, optimizer = trained(lambda params: Reaching(params, count))
    REAL.extend(model.parameters())
    before = len(counts)
    for _ in range(2):
        message = refused(lambda: optfuse.fuse(optimizer), way_out=RAN)
        assert message.count(RAN) == 1 and len(counts) > before
    untried = torch.optim.LBFGS(net().parameters())
    assert RAN not in refused(lambda: optfuse.fuse(untried), way_out="as it is")


def test_gradients_and_state_are_out_of_reach():
    model, optimizer = trained(lambda params: Reaching(params, overwrite))
    before = look(model, optimizer)
    weight = model[0].weight
    for real in (weight.grad, optimizer.state[weight]["m"]):
        REAL[:] = [real]
        refused(lambda: optfuse.fuse(optimizer), way_out="as it is")
        assert_same("all of it", look(model, optimizer), before)


def test_options_and_state_that_were_changed_are_put_back():
    def act(real):
        real["lr"] = 5.0

    def act_on_state(real):
        real.clear()

    for change in (act, act_on_state):
        model, optimizer = trained(lambda params, change=change: Reaching(params, change))
        before = look(model, optimizer)
        REAL[:] = [optimizer.param_groups[0] if change is act else optimizer.state]
        refused(functools.partial(optfuse.fuse, optimizer), "changed", way_out="as it is")
        assert_same("all of it", look(model, optimizer), before)


def test_a_write_by_a_raw_address_is_noticed():
    def act(real):
        real[0] += 1

    model, optimizer = trained(lambda params: Reaching(params, act))
    REAL.append(model[2].weight.detach().numpy())
    refused(lambda: optfuse.fuse(optimizer), "raw address", way_out="checkpoint")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_a_trial_that_failed_everything_is_as_it_was(error):
    def act(real):
        raise error("half-way")

    model, optimizer = trained(lambda params: Reaching(params, act))
    before = look(model, optimizer)
    REAL.append(None)
    with pytest.raises(optfuse.Error if error is ValueError else error):
        optfuse.fuse(optimizer)
    assert_same("all of it", look(model, optimizer), before)
    REAL.clear()
    train(model, optfuse.fuse(optimizer), 2)


def test_another_optimizers_pending_updates_come_first():
    """The trial is of one that shares the parameters."""

    def script(wrap):
        model = net()
        first = wrap(sgd(model.parameters()))
        for i in range(2):
            train(model, first, i)
        wrap.pending(first) if wrap.fused else None
        second = wrap(Tensors(model.parameters()))
        train(model, second, 2)
        yield from everything(model, second)

    same(script, prove=False)


def test_tensors_inside_of_others_are_out_of_reach():
    """As in states that are kept in 8 bits."""
    from torch.testing._internal.two_tensor import TwoTensor

    def act(real):
        real.data.add_(1)

    model, optimizer = trained(lambda params: Reaching(params, act))
    inner = torch.ones(3)
    optimizer.state[model[0].weight]["wrapped"] = TwoTensor(inner, torch.ones(3))
    REAL[:] = [inner]
    refused(lambda: optfuse.fuse(optimizer), "data pointer", way_out="as it is")
    assert_same("inner tensor", inner, torch.ones(3))


def test_random_numbers_are_not_drawn():
    import random

    def act(real):
        random.random()

    model, optimizer = trained(lambda params: Reaching(params, act))
    REAL.append(None)
    before, numbers = random.getstate(), torch.get_rng_state()
    optfuse.fuse(optimizer)
    assert random.getstate() == before and torch.equal(torch.get_rng_state(), numbers)


def test_numpys_random_numbers_are_not_drawn():
    numpy = pytest.importorskip("numpy")

    def act(real):
        numpy.random.random()

    model, optimizer = trained(lambda params: Reaching(params, act))
    REAL.append(None)
    numpy.random.seed(3)
    expected = numpy.random.random(2)
    numpy.random.seed(3)
    numpy.random.random()
    optfuse.fuse(optimizer)
    assert numpy.random.random() == expected[1], "the trial drew NumPy's next number"


def test_a_trial_does_not_import_numpy(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    _, optimizer = trained(Tensors)
    optfuse.fuse(optimizer)
    assert "numpy" not in sys.modules


def test_wrappers_whose_parts_belong_to_something_else_are_refused():
    class Foreign(Tensors):
        @property
        def state(self):
            return {}

        @state.setter
        def state(self, value):
            pass

    optfuse.register(Foreign)
    refused(lambda: optfuse.fuse(Foreign(net().parameters())), "state", way_out="as it is")
    optfuse.register(Foreign, per_parameter=False)


def test_what_an_interactive_prompt_shows_last_is_not_held_by_functions(monkeypatch):
    """It is among the built-in names, which every Python function refers to."""
    import builtins

    model = net()
    monkeypatch.setattr(builtins, "_", model, raising=False)
    optfuse.fuse(Holding(list(model.parameters()), lambda self: lambda x: x))
