# SPDX-License-Identifier: BSD-3-Clause
"""A gradient that is another parameter or its state, by whatever strides: PyTorch updates the
parameters one after the other, and each reads what those before it have written."""

import threading

import pytest
import torch
from common import same
from torch import nn, optim

import optfuse
from optfuse._link import link_of


class WritesGradients(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.01)
                    p.sub_(p.grad, alpha=group["lr"])


MAKE = {
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2),
    "WritesGradients": WritesGradients,
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2, foreach=False),
}
STATE = {"Rprop": "prev", "SGD": "momentum_buffer", "AdamW": "exp_avg", "RMSprop": "square_avg"}
SIZES = (6, 150)  # less and more elements than are updated by one thread
PLACES = {"as it is": lambda t: t, "by an alias": lambda t: t.detach(), "turned": lambda t: t.t()}
# PyTorch's fused kernels read memory in its order, whatever the strides.
CASES = [(m, how) for m in STATE for how in PLACES if how != "turned" or m in ("Rprop", "RMSprop")]


def three(size):
    return [nn.Parameter(torch.randn(size, size)) for _ in range(3)]


def scripted(make, size, borrow):
    """borrow(optimizer, params): gives a parameter the memory of another as its gradient."""

    def script(wrap):
        params = three(size)
        optimizer = wrap(MAKE[make](params))
        for i in range(5):
            for p in params:
                p.grad = torch.randn(size, size)
            if i > 1:
                borrow(optimizer, params)
            optimizer.step()
            yield "weights", [p.detach() for p in params]
            yield "state", optimizer.state_dict()

    return script


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reader, owner", ((0, 2), (2, 0), (1, 0), (1, 2)))
@pytest.mark.parametrize("make, how", CASES)
def test_a_gradient_that_is_the_state_of_another_parameter(make, reader, owner, how, size):
    def borrow(optimizer, params):
        state = optimizer.state[params[owner]][STATE[make]]
        params[reader].grad = PLACES[how](state)

    same(scripted(make, size, borrow), prove=False)


@pytest.mark.parametrize("make", ("SGD", "AdamW"))
def test_the_state_itself_of_one_behind_while_several_threads_update(make, several_threads):
    """The tensor is the only user of its memory, and has two owners."""

    def borrow(optimizer, params):
        for reader, owner in ((0, 1), (1, 2)):
            params[reader].grad = optimizer.state[params[owner]][STATE[make]]

    same(scripted(make, 300, borrow), prove=False)


@pytest.mark.parametrize("make", ("Rprop", "SGD", "AdamW", "NAdam", "WritesGradients"))
def test_steps_of_several_threads_come_one_after_the_other(make):
    """Each looks who else writes to the memory of gradients, which variables know."""

    def script(wrap):
        params = [nn.Parameter(torch.randn(20, 20)) for _ in range(8)]
        kept = [torch.randn(20, 20) for _ in params]
        optimizer = wrap(MAKE[make](params))
        for p, g in zip(params, kept, strict=True):
            p.grad = g.detach()

        def steps(n):
            for _ in range(n):
                optimizer.step()

        steps(1)
        threads = [threading.Thread(target=steps, args=(100,)) for _ in range(3)]
        if wrap.fused:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            steps(300)
        yield "weights", [p.detach() for p in params]
        yield "state", optimizer.state_dict()

    same(script, prove=False)


@pytest.mark.parametrize("option", ("max_grad_norm", "delay"))
def test_what_a_step_does_beside_updates_is_a_part_of_it(option, monkeypatch):
    """The second step begins when the first one is about to update."""
    params = [nn.Parameter(torch.ones(3, 3))]
    params[0].grad = torch.ones(3, 3)
    value = {"max_grad_norm": 1.0, "delay": {params[0]: 1}}[option]
    optimizer = optfuse.fuse(MAKE["SGD"](params), optfuse.Forward(**{option: value}))
    link, seen = link_of(optimizer), []
    second = threading.Thread(target=optimizer.step)
    update = link.step

    def slow(*args):
        seen.append(threading.current_thread() is second)
        if not seen[-1]:
            second.start()
            second.join(0.5)  # ends first, if nothing holds it up
        update(*args)
        seen.append(threading.current_thread() is second)
        return True

    monkeypatch.setattr(link, "step", slow)
    optimizer.step()
    second.join()
    assert seen == [False, False, True, True]


@pytest.mark.parametrize("reader, owner", ((0, 2), (2, 0)))
def test_a_gradient_that_is_written_where_another_parameter_is(reader, owner):

    def borrow(optimizer, params):
        params[reader].grad = params[owner].detach()

    same(scripted("WritesGradients", 6, borrow), prove=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reader, owner", ((0, 2), (2, 0), (1, 0), (1, 2)))
@pytest.mark.parametrize("make, how", [case for case in CASES if case[1] != "as it is"])
def test_a_gradient_that_is_another_parameter(make, reader, owner, how, size):
    def borrow(optimizer, params):
        params[reader].grad = PLACES[how](params[owner].detach())

    same(scripted(make, size, borrow), prove=False)


def test_two_gradients_that_are_a_state_before_and_one_behind():
    def borrow(optimizer, params):
        state = [optimizer.state[p]["prev"] for p in params]
        params[1].grad, params[2].grad = state[0].t(), state[1].t()
        params[0].grad = state[2].t()

    same(scripted("Rprop", 6, borrow), prove=False)


def test_a_gradient_over_two_states_before_and_behind_it_is_refused():
    params = three(6)
    optimizer = optfuse.fuse(MAKE["SGD"](params))
    for p in params:
        p.grad = torch.randn(6, 6)
    optimizer.step()
    buffer = torch.randn(12, 6)
    optimizer.state[params[0]]["momentum_buffer"] = buffer[:6]
    optimizer.state[params[2]]["momentum_buffer"] = buffer[6:]
    params[1].grad = buffer[3:9]
    before = [p.detach().clone() for p in params]
    with pytest.raises(optfuse.Error, match=r"before and after it: put its clone\(\) there"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    params[1].grad = buffer[3:9].clone()
    optimizer.step()


@pytest.mark.parametrize("owner, holder", ((0, 1), (1, 0)))
def test_state_that_is_another_parameter_is_refused(owner, holder):
    params = three(6)
    optimizer = optfuse.fuse(MAKE["SGD"](params))
    for p in params:
        p.grad = torch.randn(6, 6)
    optimizer.step()
    optimizer.state[params[holder]]["momentum_buffer"] = params[owner].detach()
    before = [p.detach().clone() for p in params]
    with pytest.raises(optfuse.Error, match="shares memory with the optimizer state of another"):
        optimizer.step()
    assert all(map(torch.equal, before, params))


def test_parts_of_one_buffer_are_no_overlap():
    """Gradients and state side by side in one memory."""

    def borrow(optimizer, params):
        flat = torch.arange(36 * 6, dtype=torch.float32).div_(100)
        for i, p in enumerate(params):
            p.grad = flat[36 * i : 36 * (i + 1)].view(6, 6)
            optimizer.state[p]["momentum_buffer"] = flat[36 * (i + 3) : 36 * (i + 4)].view(6, 6)

    same(scripted("SGD", 6, borrow), prove=False)
