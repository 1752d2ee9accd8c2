# SPDX-License-Identifier: BSD-3-Clause
"""The ledger reads an optimizer in C, by the addresses of objects. Between two looks an address may
come back with another object; and where nothing has changed no Python runs."""

import gc
import sys
import threading
import time
import weakref

import pytest
import torch
from common import adamw, loss_of, net, sgd, train
from torch import nn

import optfuse
from optfuse._library import bindings
from optfuse._library.bindings import lib, lib_with_gil
from optfuse._link import link_of
from optfuse._updaters.slots import Slots

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
CALLS = ("of_shim_ledger_step", "of_shim_ledger_zero_grad")


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
        name = frame.f_code.co_name
        is_ours = event == "call" and "/optfuse/" in frame.f_code.co_filename
        if is_ours and name != "run_and_tell":  # if a test before has used Backward(final=True)
            self.python.append(name)

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


@pytest.mark.parametrize("option", ("max_grad_norm", "delay"))
def test_what_a_step_does_beside_updates_is_a_part_of_it(option, monkeypatch):
    """The second step begins when the first one is about to update."""
    params = [nn.Parameter(torch.ones(3, 3))]
    params[0].grad = torch.ones(3, 3)
    value = {"max_grad_norm": 1.0, "delay": {params[0]: 1}}[option]
    optimizer = optfuse.fuse(sgd(params), optfuse.Forward(**{option: value}))
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
