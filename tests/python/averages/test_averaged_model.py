# SPDX-License-Identifier: BSD-3-Clause
"""torch.optim.swa_utils.AveragedModel of models whose optimizer is fused: the averages of PyTorch,
made with the updates of the weights in forward mode."""

import contextlib
import copy
import ctypes
import functools
import gc
import io
import threading
import weakref

import pytest
import torch
from clip_scripts import DTYPES, backward, long_net
from common import (
    adamw,
    assert_same,
    everything,
    net,
    python_ok,
    same,
    sgd,
    snapshot,
    train,
)
from pytorchs_own import pytorchs_own
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

import optfuse
from optfuse._averages import averaged_model
from optfuse._averages.averaged_model import stock_update_parameters

STEPS = 5
KINDS = {
    "EMA": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "EMA of little decay": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.3)},
    "EMA one by one": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.99)},
    "SWA": dict,
    "SWA one by one": lambda: {"avg_fn": swa_utils.get_swa_avg_fn()},
    "SWA by its function": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}
#: Averages that are left to PyTorch's own function.
OTHERS = {
    "a function": lambda: {"avg_fn": lambda average, weight, _: 0.8 * average + 0.2 * weight},
    "EMA in a wrapper": lambda: {"multi_avg_fn": halved(swa_utils.get_ema_multi_avg_fn(0.9))},
    "a tensor for decay": lambda: {"multi_avg_fn": decay_of_tensor()},
}


def halved(function):
    @functools.wraps(function)
    def of_half(averages, weights, n):
        function(averages, [weight * 0.5 for weight in weights], n)

    return of_half


def decay_of_tensor():
    return swa_utils.get_ema_multi_avg_fn(torch.tensor(0.9))


def update(wrap, averaged, model):
    with contextlib.nullcontext() if wrap.fused else pytorchs_own():
        averaged.update_parameters(model)


def averages_of(optimizer):
    return optfuse.summary(optimizer).averages


def script_of(kind, dtype=torch.float32, make=adamw, look=None, n_averages=None, build=long_net):
    """n_averages: how many of each model's parameters are averaged with their update; None: all."""

    def script(wrap):
        model = build(dtype)
        optimizer = wrap(make(model.parameters()))
        averaged = AveragedModel(model, **kind())
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i, dtype)
            optimizer.step()
            update(wrap, averaged, model)
            if look is not None and i > 1:
                yield "look", look(averaged)
        if wrap.fused and n_averages != "any":
            n = len([*model.parameters()]) if n_averages is None else n_averages
            assert averages_of(optimizer) == n * (STEPS - 1)
        yield "average", dict(averaged.state_dict())
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_trainings(kind, dtype):
    same(script_of(kind, dtype))


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_other_averages_are_made_by_pytorch(kind):
    same(script_of(kind, n_averages=0), prove=False)


@pytest.mark.parametrize("kind", [*KINDS.values(), *OTHERS.values()], ids=[*KINDS, *OTHERS])
def test_backward_mode_has_nothing_pending(kind):
    same(script_of(kind, n_averages=0), "backward")


def wide_net(dtype):
    return nn.Sequential(nn.Linear(33, 4001), nn.Linear(4001, 3)).to(dtype)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("threads", (1, 2))
def test_threads(kind, threads):
    """PyTorch's operator shares large tensors out among threads."""
    n = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same(script_of(kind, build=wide_net), prove=False)
    finally:
        torch.set_num_threads(n)


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
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = AveragedModel(model, **KINDS["EMA"]())
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    summary = optfuse.summary(optimizer)
    assert summary.pending == summary.averages == len([*model.parameters()])
    assert "averages of weights: 6 made with updates" in str(summary)


def test_an_alias_of_the_average_that_somebody_keeps_sees_it():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        array = averaged.module[0].weight.detach().numpy()
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
            yield "array", torch.from_numpy(array.copy())
        if wrap.fused:
            assert averages_of(optimizer) == 2 * (len([*model.parameters()]) - 1)

    same(script, prove=False)


def test_twice_in_a_step_and_two_averages_of_a_model():
    def script(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        first, second = (AveragedModel(model, **KINDS[k]()) for k in ("EMA", "SWA"))
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, first, model)
            update(wrap, second, model)
            if i == 1:
                update(wrap, first, model)
        yield "first", dict(first.state_dict())
        yield "second", dict(second.state_dict())

    same(script)


def test_an_average_of_the_average_and_a_model_trained_from_it():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        slower = AveragedModel(averaged.module, **KINDS["EMA"]())
        for i in range(4):
            train(model, optimizer, i)
            update(wrap, averaged, model)
            update(wrap, slower, averaged.module)
            if i == 2:
                with torch.no_grad():
                    for p, q in zip(model.parameters(), averaged.parameters(), strict=True):
                        p.copy_(q)
        yield "slower", dict(slower.state_dict())
        yield from everything(model, optimizer)

    same(script)


MAKERS = {
    "SGD": sgd,
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_optimizers(make):
    same(script_of(KINDS["EMA"], make=make, n_averages="any"))


def test_with_clipping_scaling_and_a_scheduler():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        for i in range(6):
            optimizer.zero_grad()
            scaler.scale(
                nn.functional.mse_loss(model(torch.ones(4, 6) * i), torch.ones(4, 3))
            ).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            update(wrap, averaged, model)
            yield "average", [p.detach().clone() for p in averaged.parameters()] if i % 2 else []
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("use_buffers", (True, False))
@pytest.mark.parametrize("norm", (nn.BatchNorm1d, nn.LayerNorm), ids=("buffers", "none"))
def test_buffers(norm, use_buffers):
    def script(wrap):
        model = nn.Sequential(nn.Linear(33, 8), norm(8), nn.Linear(8, 3))
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, use_buffers=use_buffers, **KINDS["EMA"]())
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            optimizer.step()
            update(wrap, averaged, model)
        yield "average", dict(averaged.state_dict())

    same(script, prove=False)


def test_frozen_and_tied_weights_and_some_that_are_not_pending():
    def script(wrap):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        optimizer = wrap(adamw([p for p in model.parameters() if p.requires_grad]))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        for i in range(3):
            train(model, optimizer, i)
            model[0].bias.sum().item()
            update(wrap, averaged, model)
        yield "average", dict(averaged.state_dict())

    same(script)


def test_another_dtype_is_pytorchs():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA one by one"]()).double()
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
        yield "average", dict(averaged.state_dict())

    same(script, prove=False)


def test_an_average_that_dies_before_the_update():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = AveragedModel(model, **KINDS["EMA"]())
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
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        seen = []
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
        reader = threading.Thread(target=lambda: seen.append(snapshot([*averaged.parameters()])))
        reader.start()
        reader.join()
        yield "average", seen[0]

    same(script)


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_observers_see_pytorchs_operators():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = AveragedModel(model, **KINDS["EMA"]())
    for i in range(2):
        train(model, optimizer, i)
        with Seen() as seen:
            averaged.update_parameters(model)
    assert "_foreach_lerp_" in seen.names


def test_a_model_of_another_shape_gets_pytorchs_error():
    model, other = net(), nn.Sequential(nn.Linear(5, 8))
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = AveragedModel(model, **KINDS["EMA"]())
    for i in range(2):
        train(model, optimizer, i)
        averaged.update_parameters(model)
    for function in (stock_update_parameters, AveragedModel.update_parameters):
        with pytest.raises(RuntimeError, match="size of tensor"):
            function(averaged, other)


def test_without_a_fused_optimizer_it_is_pytorchs(monkeypatch):
    called = []
    monkeypatch.setattr(averaged_model, "stock_update_parameters", lambda *_: called.append(1))
    monkeypatch.setattr(averaged_model._link, "links", {})
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


def test_compiled_code_sees_no_marks_of_averages():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    averaged = AveragedModel(model, **KINDS["EMA"]())
    run = torch.compile(averaged.module, backend="eager")
    x = torch.ones(2, 6)
    for i in range(3):
        train(model, optimizer, i)
        averaged.update_parameters(model)
        ours = run(x)
        assert_same("output", ours, averaged.module(x))


def test_another_release_that_averages_otherwise_is_left_alone(monkeypatch):
    """As if this PyTorch's functions had other formulas."""
    assert averaged_model._are_as_here()
    averaged_model._are_as_here.cache_clear()
    kinds = [{}, {"avg_fn": lambda a, w, n: a}]
    monkeypatch.setattr(averaged_model, "_OWN_KINDS", kinds)
    monkeypatch.setattr(averaged_model, "_is_made_as", lambda f, known: f is not None)
    monkeypatch.setattr(averaged_model, "_decay_of", lambda f: 0.5)
    try:
        model = net()
        optimizer = optfuse.fuse(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        for i in range(2):
            train(model, optimizer, i)
            averaged.update_parameters(model)
        assert averages_of(optimizer) == 0
    finally:
        averaged_model._are_as_here.cache_clear()


def test_a_decay_of_zero_is_pytorchs():
    """Its lerp at 1 has another zero in its tails, also in those between two threads."""

    def script(wrap):
        model = nn.ParameterList([nn.Parameter(torch.full((40011,), -0.0))])
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        averaged = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.0))
        for _ in range(3):
            model[0].grad = torch.zeros(40011)
            optimizer.step()
            update(wrap, averaged, model)
        yield "average", averaged.module[0].view(torch.int32)

    n = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same(script, prove=False)
    finally:
        torch.set_num_threads(n)


FORKS = """
import os, signal, torch, optfuse
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
torch.set_num_threads(2)
(torch.ones(400000) * 2).sum()  # starts threads, which a child has not
child = os.fork()
if child == 0:
    signal.alarm(60)
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
