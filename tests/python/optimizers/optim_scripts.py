# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of every optimizer class: which classes, and the training
before and after what a test is about."""

import copy

import pytest
from common import everything, train
from optim_classes import CLASSES, build, model_for

STEPS = 5
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def begun(cls, wrap, steps=3, **options):
    """A model and its optimizer after some steps, with no gradients left."""
    model = model_for(cls)
    optimizer = wrap(build(cls, model.parameters(), **options))
    for i in range(steps):
        train(model, optimizer, i)
    optimizer.zero_grad()
    return model, optimizer


def go_on(model, optimizer, begin=3):
    for i in range(begin, begin + STEPS):
        train(model, optimizer, i)
    return everything(model, optimizer)


def saved_from(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def resumed(cls, model, state, wrap, order=list):
    """A copy of the model, and an optimizer of its own that has loaded the state."""
    twin = copy.deepcopy(model)
    other = wrap(build(cls, order(list(twin.parameters()))))
    other.load_state_dict(state)
    return twin, other


def minimized(params, optimizer):
    """Training to make the sum of squares small; all that stock shows then."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum((p * p).sum().double() for p in params).backward()
        optimizer.step()
    yield "parameters", params
    yield "state", optimizer.state_dict()
