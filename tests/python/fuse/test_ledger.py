# SPDX-License-Identifier: BSD-3-Clause
"""The ledger reads an optimizer in C, by the addresses of objects. Between two looks an address may
come back with another object; and where nothing has changed no Python runs."""

import collections
import gc
import sys
import threading
import time
import weakref

import pytest
import torch
from common import adamw, everything, loss_of, net, same, train
from torch import nn

import optfuse
from optfuse._library import bindings
from optfuse._library.bindings import lib, lib_with_gil
from optfuse._updaters.slots import Slots

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
CALLS = ("of_shim_ledger_step", "of_shim_ledger_zero_grad")


def rate(i):
    """A new float, at an address that has just been freed."""
    return 1e-3 * (1 + i % 7)


@both_modes
def test_a_rate_that_is_changed_twice_between_two_looks(mode):
    """A freed float's address comes back at once."""

    def script(wrap):
        p = nn.Parameter(torch.ones(3))
        optimizer = wrap(adamw([p]))
        group = optimizer.param_groups[0]
        for i in range(1000):
            group["lr"] = rate(i + 1)
            group["lr"] = rate(i)
            optimizer.zero_grad()
            (p * (i % 5 - 2)).sum().backward()
            optimizer.step()
        yield "weights", p.detach()

    same(script, mode)


@both_modes
def test_state_that_is_replaced_and_freed_between_two_looks(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(8):
            train(model, optimizer, i)
            optimizer.zero_grad()
            for entry in optimizer.state.values():
                for factor in (0.5, 3.0):
                    entry["exp_avg"] = entry["exp_avg"] * factor
                entry["step"] = entry["step"].clone()
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_lists_that_are_replaced_and_freed_between_two_looks(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        group = optimizer.param_groups[0]
        for i in range(8):
            train(model, optimizer, i)
            optimizer.zero_grad()
            for _ in range(3):
                group["params"] = group["params"][::-1]
            optimizer.param_groups = list(optimizer.param_groups)
            if i == 5:
                optimizer.param_groups = [dict(group)]
                group = optimizer.param_groups[0]
        yield from everything(model, optimizer)

    same(script, mode)


def test_nothing_keeps_what_was_replaced_after_the_next_look():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    optfuse.flush(optimizer)

    class Note(float):
        pass

    note = Note(0.5)
    optimizer.param_groups[0]["lr"] = note
    train(model, optimizer, 1)
    gone = weakref.ref(note)
    del note
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, 2)
    assert gone() is None


def test_an_optimizer_and_its_parameters_die_with_their_cycle():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    for i in range(2):
        train(model, optimizer, i)
    first = next(model.parameters())
    first.owner = optimizer  # a cycle
    gone = weakref.ref(optimizer), weakref.ref(first)
    del model, optimizer, first
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class Calls:
    """Calls of the library's functions, and of Python's functions in optfuse."""

    def __init__(self, monkeypatch):
        self.native, self.python = [], []
        for library, names in ((lib, bindings._PROTOTYPES), (lib_with_gil, bindings._WITH_GIL)):
            for name in names:
                monkeypatch.setattr(library, name, self.counted(name, getattr(library, name)))

    def counted(self, name, function):
        def call(*arguments):
            self.native.append(name)
            return function(*arguments)

        return call

    def profile(self, frame, event, _):
        if event == "call" and "/optfuse/" in frame.f_code.co_filename:
            self.python.append(frame.f_code.co_name)

    def during(self, work):
        self.native.clear()
        self.python.clear()
        sys.setprofile(self.profile)
        try:
            work()
        finally:
            sys.setprofile(None)


@both_modes
def test_an_iteration_in_which_nothing_changed_calls_the_library_twice(mode, monkeypatch):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    calls = Calls(monkeypatch)
    calls.during(lambda: train(model, optimizer, 3))
    assert sorted(calls.native) == sorted(CALLS)
    few = len(calls.python)
    more = nn.Sequential(net(), *(nn.Linear(3, 3) for _ in range(20)))
    other = optfuse.fuse(adamw(more.parameters()), mode=mode)
    for i in range(3):
        train(more, other, i)
    calls.during(lambda: train(more, other, 3))
    assert sorted(calls.native) == sorted(CALLS)
    assert len(calls.python) == few, "Python runs for each parameter"
    other.zero_grad()
    calls.during(loss_of(more, 4).backward)
    assert calls.python == [] and calls.native == []


@both_modes
def test_another_rate_is_asked_for_once_a_group(mode, monkeypatch):
    model = net()
    groups = [{"params": list(part.parameters())} for part in (model[0], model[2], model[4])]
    optimizer = optfuse.fuse(adamw(groups), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    calls = Calls(monkeypatch)
    calls.during(lambda: train(model, optimizer, 3))
    assert sorted(calls.native) == sorted(CALLS)
    assert calls.python.count("ask") == calls.python.count("numbers") == 3


class Entries(collections.UserDict):
    """A state that is no dict; stock takes it."""

    def __missing__(self, param):
        return self.data.setdefault(param, {})


@both_modes
def test_entries_of_a_state_that_is_no_dict_are_looked_at_in_every_step(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        param = model[0].weight
        for i in range(6):
            train(model, optimizer, i)
            if i == 1:
                optimizer.state = Entries(optimizer.state)
            if i == 3:
                optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"] * 3
            if i == 4:
                entry = {key: value.clone() for key, value in optimizer.state[param].items()}
                optimizer.state[param] = entry
        yield "weights", dict(model.state_dict())

    same(script, mode)


def test_a_rebuild_that_fails_half_way_is_made_again(monkeypatch):
    """The library has other slots by then than it has looked at; updates are unconfirmed."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = optfuse.fuse(adamw(params[:2]), "backward")
    for _ in range(2):
        optimizer.zero_grad()
        sum(p.sum() for p in params).backward()
        optimizer.step()
    optimizer.zero_grad()
    sum(p.sum() for p in params[:2]).backward()
    optimizer.param_groups[0]["params"].append(params[2])
    attach = Slots.attach

    def fails_once(self):
        monkeypatch.setattr(Slots, "attach", attach)
        raise KeyboardInterrupt

    monkeypatch.setattr(Slots, "attach", fails_once)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        sum(p.sum() for p in params).backward()
    assert optfuse.summary(optimizer).parameters == 3


def test_other_threads_run_while_step_updates():
    """With intervals this long a thread gets the GIL only where another gives it up."""
    p = nn.Parameter(torch.ones(4_000_000))
    optimizer = optfuse.fuse(adamw([p]), eager=[p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    count, stop = [0], threading.Event()

    def run():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)

    interval, thread = sys.getswitchinterval(), threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(30)
    try:
        before, steps = count[0], 0
        while count[0] == before and steps < 300:  # a busy machine may not run it at once
            optimizer.step()
            steps += 1
        after = count[0]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert after > before
