# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: small gradients wait for each other, and until their updates run
everything is as before step() in stock."""

import gc
import threading

import pytest
import torch
from common import adamw, assert_same, loss_of, net, python_ok, sgd, weights
from scripts import trained
from torch import nn

import optfuse


def changed(change, make=adamw, zero=True):
    """A script that calls change(model, optimizer, i) before each iteration."""

    def iteration(model, optimizer, i):
        yield "change", change(model, optimizer, i)
        if zero:
            optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(make, iteration=iteration)


def failing_backward(model, optimizer, i):
    handle = model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, i + 10).backward()
    handle.remove()
    return [p.grad for p in model.parameters()]


def test_summary_tells_updates_in_step_from_those_in_backward():
    """An update that goes by itself in backward is none in step()."""

    def seen(keep):
        model = nn.Linear(300, 300, bias=False)
        optimizer = optfuse.fuse(sgd(model.parameters()), "backward")
        kept = model.weight.detach() if keep else None
        for _ in range(2):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = optfuse.summary(optimizer)
        del kept
        return found.created, found.at_once, found.in_step, "ran inside step()" in str(found)

    assert seen(keep=False) == (2, 2, 0, False)
    assert seen(keep=True) == (2, 2, 2, True)


def test_what_fills_a_bucket_runs_before_backward_ends():
    model = nn.Sequential(*(nn.Linear(120, 120) for _ in range(24)))  # 58 kB each
    optimizer = optfuse.fuse(sgd(model.parameters()), "backward", bucket_bytes=400_000)
    created = []
    model[0].register_full_backward_pre_hook(
        lambda *_: created.append(optfuse.summary(optimizer).created)
    )
    model(torch.ones(2, 120)).sum().backward()
    found = optfuse.summary(optimizer)
    assert 30 <= created[0] < 46 and found.created == found.at_close == 48
    assert 3 <= found.launches <= 4


def test_another_thread_ends_no_waiting():
    """One pass ends while the other one looks at its own gradients, as it may in stock."""
    here, there = net(), net()
    looking, ended, looked = threading.Event(), threading.Event(), []

    def look(*_):
        looked.append([p.grad.clone() for p in there[4].parameters()])
        looking.set()
        ended.wait(10)
        looked.append([p.grad.clone() for p in there[4].parameters()])

    there[0].register_full_backward_hook(look)
    optimizer = optfuse.fuse(adamw([*here.parameters(), *there.parameters()]), "backward")
    before = weights(there[4])
    thread = threading.Thread(target=loss_of(there, 1).backward)
    thread.start()
    assert looking.wait(60), "the other pass has not come that far"
    loss_of(here, 0).backward()
    assert_same("weights", weights(there[4]), before)
    ended.set()
    thread.join()
    optimizer.step()
    assert len(looked) == 2, "the second look raised"
    assert_same("gradients", *looked)
    assert optfuse.summary(optimizer).created == 12


@pytest.mark.parametrize("how", ("unfused", "deleted"))
def test_an_optimizer_that_goes_while_gradients_wait(how):
    model = net()
    held = [optfuse.fuse(adamw(model.parameters()), "backward")]
    loss_of(model, 0).backward()
    held[0].step()
    held[0].zero_grad()
    before = weights(model)

    def go(_):
        if how == "unfused":
            with pytest.raises(optfuse.Error, match="inside backward"):
                optfuse.unfuse(held[0])
        else:
            held.clear()
            gc.collect()

    handle = model[0].weight.register_post_accumulate_grad_hook(go)
    loss_of(model, 1).backward()
    handle.remove()  # a circle that Python does not see
    if how == "deleted":
        assert_same("weights", weights(model), before)
        assert all(p.grad.isfinite().all() for p in model.parameters())
    else:
        held[0].step()


def test_what_a_failed_backward_has_left_is_let_go():
    """When its graph task is gone, and not only with the next one."""
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), "backward")
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = weights(model)
    failing_backward(model, optimizer, 0)
    optimizer.zero_grad()
    model[0](torch.ones(1, 6)).sum().backward()  # of the first layer alone
    after = weights(model)
    changed = [k for k in before if not torch.equal(before[k], after[k])]
    assert changed == ["0.weight", "0.bias"]


def test_a_gradient_whose_end_takes_the_optimizer_along():
    """The gradient has strides of its own; no lock is held when it dies."""
    out = python_ok(
        "import gc, torch, optfuse, weakref\n"
        "from torch.nn import Parameter\n"
        "apart = [Parameter(torch.empty_strided((6,), (2,)).fill_(1.0)) for _ in range(9)]\n"
        "dense = [Parameter(torch.ones(6)) for _ in range(9)]\n"
        "def gone():\n"
        "    held.clear()\n"
        "    gc.collect()\n"
        "    print('gone')\n"
        "both = [p for pair in zip(apart, dense) for p in pair]\n"
        "held = [optfuse.fuse(torch.optim.SGD(both, lr=0.1, momentum=0.9), 'backward')]\n"
        "class Last(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        weakref.finalize(apart[3].grad, gone)\n"
        "        return g\n"
        "first = Last.apply(torch.ones(1, requires_grad=True))\n"
        "try:\n"
        "    (first + sum((p * 2).sum() for p in both)).backward()\n"
        "except optfuse.Error as error:\n"
        "    print(error)\n"
    )
    assert out.startswith("gone")


def test_a_failure_names_its_parameter_and_changes_nothing():
    table = nn.Embedding(4, 4, sparse=True)
    others = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    params = [others[0], table.weight, others[1]]
    optimizer = optfuse.fuse(torch.optim.SGD(params, lr=0.1), "backward")
    before = [p.detach().clone() for p in params]
    loss = table(torch.tensor([1])).sum() + sum(p.sum() for p in others)
    with pytest.raises(optfuse.Error, match="parameter 1 of group 0.*sparse"):
        loss.backward()
    assert_same("parameters", [p.detach() for p in params], before)
    assert optfuse.summary(optimizer).created == 0
