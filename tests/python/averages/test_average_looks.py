# SPDX-License-Identifier: BSD-3-Clause
"""Whoever looks at an average whose weight's update is pending finds it made; and it lives as long
as it is needed."""

import copy
import ctypes
import gc
import io
import threading
import weakref

import pytest
import torch
from averaged import KINDS, averaged_net, averages_of, script_of, update
from common import (
    adamw,
    assert_same,
    net,
    same,
    snapshot,
    train,
)
from test_marks import is_marked
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

import optfuse


def through_address(tensor):
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def saved(averaged):
    memory = io.BytesIO()
    torch.save(averaged.state_dict(), memory)
    memory.seek(0)
    return dict(torch.load(memory))


LOOKS = {
    "an operator": lambda a: a.module[0].weight + 0,
    "a list": lambda a: torch._foreach_add([*a.parameters()], 1.0),
    ".data": lambda a: a.module[2].bias.data.clone(),
    "NumPy": lambda a: torch.from_numpy(a.module[0].bias.detach().numpy().copy()),
    "an address": lambda a: through_address(a.module[0].weight),
    "tolist": lambda a: a.module[0].bias.tolist(),
    "state_dict": lambda a: dict(a.state_dict()),
    "torch.save": saved,
    "deepcopy": lambda a: [*copy.deepcopy(a).parameters()],
    "a forward pass": lambda a: a(torch.ones(3, 33)),
    "a write": lambda a: nn.init.constant_(a.module[2].weight, 0.5),
    "a version": lambda a: a.module[0].weight._version,
    "one of storage": lambda a: bytes(a.module[0].weight.untyped_storage()),
}


@pytest.mark.parametrize("kind", ("EMA", "EMA one by one"))
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_looks_find_the_average_made(look, kind):
    same(script_of(KINDS[kind], look=look))


def test_nothing_is_launched():
    model, optimizer, averaged = averaged_net(optfuse.fuse)
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    summary = optfuse.summary(optimizer)
    assert summary.pending == summary.averages == len([*model.parameters()])
    assert "averages of weights: 6 made with updates" in str(summary)


def test_an_alias_of_the_average_that_somebody_keeps_sees_it():
    def script(wrap):
        model, optimizer, averaged = averaged_net(wrap)
        array = averaged.module[0].weight.detach().numpy()
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
            yield "array", torch.from_numpy(array.copy())
        if wrap.fused:
            assert averages_of(optimizer) == 2 * (len([*model.parameters()]) - 1)

    same(script, prove=False)


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
