# SPDX-License-Identifier: BSD-3-Clause
"""A backward pass while another one is half-way through the same graph, which is kept."""

import threading

import pytest
import torch
from common import assert_same
from reorder_scripts import mlp, random, x_of
from torch import nn

import optfuse


def here(call):
    call()


def in_another_thread(call):
    raised = []

    def run():
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def reordered(schedule):
    def arrange(model):
        reordering = optfuse.reorder(model, schedule)
        return reordering.remove

    return arrange


def promised(model):
    optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1))
    return lambda: optfuse.unfuse(optimizer)


ARRANGED = {"stock": reordered("stock"), "last": reordered("last"), "promises": promised}


@pytest.mark.parametrize("runs", [here, in_another_thread])
@pytest.mark.parametrize("arranged", ARRANGED)
@pytest.mark.parametrize("bias", [False, True])
def test_a_pass_that_is_recorded(arranged, runs, bias, monkeypatch):
    """The other one has counted the graph's edges."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")

    def gradients(arrange):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh(), nn.Linear(8, 8), mlp())
        end = arrange(model)
        x, slopes = x_of(0).requires_grad_(), []
        found = [x]
        for layer in model:
            found.append(layer(found[-1]))
        first = found[3].square().sum()

        def differentiate(_):
            handle.remove()
            runs(lambda: slopes.extend(torch.autograd.grad(first, x, create_graph=True)))

        handle = found[3].register_hook(differentiate)
        found[-1].square().sum().backward(retain_graph=True)
        (slopes[0].square().sum() + found[-1].sum()).backward()
        made = [p.grad.clone() for p in [x, *model.parameters()]]
        end()
        return [*made, slopes[0].detach()]

    stock = gradients(lambda model: lambda: None)
    assert_same("gradients", gradients(ARRANGED[arranged]), stock)


def convolutions():
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))


@pytest.mark.parametrize("runs", [here, in_another_thread])
@pytest.mark.parametrize("arranged", ["stock", "last"])
@pytest.mark.parametrize("build", [mlp, convolutions])
def test_a_pass_where_weight_gradients_of_the_other_one_wait(build, arranged, runs):
    def gradients(arrange):
        torch.manual_seed(0)
        model = build()
        end = arrange(model)
        x = random(0, 2, 3, 8, 8) if build is convolutions else x_of(0)
        found, inner = [x.requires_grad_()], []
        for layer in model:
            found.append(layer(found[-1]))
        weights = [layer.weight for layer in model[2:] if hasattr(layer, "weight")]
        loss = found[-1].square().sum()

        def differentiate(_):
            handle.remove()
            runs(lambda: inner.extend(torch.autograd.grad(loss, weights, retain_graph=True)))

        handle = found[2].register_hook(differentiate)
        found[-1].exp().sum().backward(retain_graph=True)
        made = [p.grad for p in [x, *model.parameters()]]
        end()
        return [*made, *inner]

    stock = gradients(lambda model: lambda: None)
    assert_same("gradients", gradients(ARRANGED[arranged]), stock)
