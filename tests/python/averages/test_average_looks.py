# SPDX-License-Identifier: BSD-3-Clause
"""Whoever looks at an average whose weight's update is pending finds it made; and it lives as long
as it is needed."""

import gc
import threading
import weakref

import torch
from averaged import KINDS, averaged_net, update
from common import (
    adamw,
    assert_same,
    net,
    same,
    snapshot,
    train,
)
from test_marks import is_marked
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

import optfuse


def test_nothing_is_launched():
    model, optimizer, averaged = averaged_net(optfuse.fuse)
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    summary = optfuse.summary(optimizer)
    assert summary.pending == summary.averages == len([*model.parameters()])
    assert "averages of weights: 6 made with updates" in str(summary)


def test_an_average_that_dies_before_the_update():
    model, optimizer, averaged = averaged_net(optfuse.fuse)
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    gone = weakref.ref(averaged.module[0].weight)
    del averaged
    optfuse.flush(optimizer)
    gc.collect()
    assert gone() is None


def test_the_optimizer_may_die_first():
    def script(wrap):
        model = net()
        optimizer = adamw(model.parameters())
        averaged = AveragedModel(model, **KINDS["EMA"]())
        fused = wrap(optimizer)
        for i in range(2):
            train(model, fused, i)
            update(wrap, averaged, model)
        if wrap.fused:
            wrap.optimizers.clear()
        del fused, optimizer
        gc.collect()
        yield "average", dict(averaged.state_dict())

    same(script, prove=False)


def test_another_thread_sees_the_average():
    def script(wrap):
        model, optimizer, averaged = averaged_net(wrap)
        seen = []
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
        reader = threading.Thread(target=lambda: seen.append(snapshot([*averaged.parameters()])))
        reader.start()
        reader.join()
        yield "average", seen[0]

    same(script)


def test_flush_takes_the_mark_off_where_another_thread_has_made_the_average():
    model, optimizer, averaged = averaged_net(optfuse.fuse)
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    weights = [*averaged.parameters()]
    assert all(map(is_marked, weights))
    reader = threading.Thread(target=lambda: [p + 0 for p in model.parameters()])
    reader.start()
    reader.join()
    optfuse.flush(optimizer)
    assert not any(map(is_marked, [*weights, *model.parameters()]))


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_observers_see_pytorchs_operators():
    model, optimizer, averaged = averaged_net(optfuse.fuse)
    for i in range(2):
        train(model, optimizer, i)
        with Seen() as seen:
            averaged.update_parameters(model)
    assert "_foreach_lerp_" in seen.names


def test_compiled_code_sees_no_marks_of_averages():
    model, optimizer, averaged = averaged_net(optfuse.fuse)
    run = torch.compile(averaged.module, backend="eager")
    x = torch.ones(2, 6)
    for i in range(3):
        train(model, optimizer, i)
        averaged.update_parameters(model)
        ours = run(x)
        assert_same("output", ours, averaged.module(x))
