# SPDX-License-Identifier: BSD-3-Clause
"""AveragedModel of models whose optimizer is fused: what is pending, who sees it, and averages that
are left to others. The bits are deeds (programs/deeds/averaging.py)."""

import gc
import threading
import weakref

import pytest
import torch
from averaged import KINDS, averaged_net, averages_of
from common import adamw, assert_same, net, python_ok, train
from test_marks import is_marked
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

import optfuse
from optfuse import _averages


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


# Averages that are left to PyTorch's own function, or to somebody else's


def test_a_model_of_another_shape_gets_pytorchs_error():
    model, other = net(), nn.Sequential(nn.Linear(5, 8))
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = AveragedModel(model, **KINDS["EMA"]())
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    for function in (_averages.stock_update_parameters, AveragedModel.update_parameters):
        with pytest.raises(RuntimeError, match="size of tensor"):
            function(averaged, other)


def test_without_a_fused_optimizer_it_is_pytorchs(monkeypatch):
    called = []
    monkeypatch.setattr(_averages, "stock_update_parameters", lambda *_: called.append(1))
    monkeypatch.setattr(_averages._link, "links", {})
    AveragedModel(net()).update_parameters(net())
    assert called


def test_a_subclass_keeps_its_own_function():
    class Own(AveragedModel):
        def update_parameters(self, model):
            super().update_parameters(model)
            self.seen = getattr(self, "seen", 0) + 1

    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = Own(model, **KINDS["EMA"]())
    for i in range(3):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    assert averaged.seen == 3
    assert averages_of(optimizer) == 2 * len([*model.parameters()])


def test_another_release_that_averages_otherwise_is_left_alone(monkeypatch):
    """As if this PyTorch's functions had other formulas."""
    assert _averages._are_as_here()
    _averages._are_as_here.cache_clear()
    kinds = [{}, {"avg_fn": lambda a, w, n: a}]
    monkeypatch.setattr(_averages, "_OWN_KINDS", kinds)
    monkeypatch.setattr(_averages, "_is_made_as", lambda f, known: f is not None)
    monkeypatch.setattr(_averages, "_decay_of", lambda f: 0.5)
    try:
        model, optimizer, averaged = averaged_net(optfuse.fuse)
        for i in range(2):
            train(model, optimizer, i)
            averaged.update_parameters(model)
        assert averages_of(optimizer) == 0
    finally:
        _averages._are_as_here.cache_clear()


FORKS = """
import os, signal, torch, optfuse
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
torch.set_num_threads(2)
(torch.ones(400000) * 2).sum()  # starts threads, which a child has not
child = os.fork()
if child == 0:
    signal.alarm(300)
    model = torch.nn.Linear(6, 3)
    optimizer = optfuse.fuse(torch.optim.AdamW(model.parameters()))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    os._exit(0 if optfuse.summary(optimizer).averages else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_averages():
    assert python_ok(FORKS).split() == ["0"]


PATCHED = """
import torch, optfuse
from torch.optim.swa_utils import AveragedModel
stock = AveragedModel.update_parameters
def mine(self, model):
    stock(self, model)
AveragedModel.update_parameters = mine
optfuse.fuse(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
print(AveragedModel.update_parameters is mine)
"""


def test_a_function_of_somebody_elses_stays():
    assert python_ok(PATCHED).split() == ["True"]
