# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of every optimizer class share: which classes, and the training
before and after what a test is about."""

import pytest
from common import everything, train
from optim_classes import CLASSES, build, model_for

STEPS = 5
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def trained(cls, wrap, steps=3, **options):
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
