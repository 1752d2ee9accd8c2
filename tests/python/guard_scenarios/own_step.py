# SPDX-License-Identifier: BSD-3-Clause
"""Guards of optimizers that update by their class's own step() in backward mode."""

import os
import signal
import threading
import time

import torch
from common import loss_of, net, train
from own_classes import Tensors
from torch import nn
from torch.optim import Adafactor

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise

SECONDS = 10  # to wait for what takes half a second


@guards("native")
def what_is_not_usual_is_left_to_the_class():
    """Two of its implementations round differently, and a tensor as learning rate
    makes it compute its numbers in float32."""
    for options in ({"foreach": True}, {"lr": torch.tensor(0.1)}):
        pair = Pair("backward", make=lambda p, options=options: Adafactor(p, **options))
        for i in range(4):
            pair.train(i)
        pair.assert_same()


class MovesAll(Tensors):
    """Decays the state of parameters without a gradient, too."""

    @torch.no_grad()
    def step(self, closure=None):
        for entry in self.state.values():
            entry["m"].mul_(0.9)
        super().step(closure)


@guards("alone", "written", "late_state")
def a_class_that_does_not_keep_its_promise_raises():
    optfuse.register(MovesAll)
    model = net()
    optimizer = optfuse.fuse(MovesAll(model.parameters()), "backward")
    must_raise(
        lambda: [train(model, optimizer, i) for i in range(2)], "a step() that changes others"
    )


class Interrupted(Tensors):
    """Ctrl-C comes in the middle of an update, when armed."""

    armed = []

    def update(self, group, p, state):
        if self.armed:
            self.armed.clear()
            signal.raise_signal(signal.SIGINT)
        super().update(group, p, state)


@guards("interrupts")
def an_interrupt_comes_when_the_update_that_it_meets_is_made():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    optfuse.register(Interrupted)
    pair, came = Pair("backward", make=Interrupted), 0
    for i in range(3):
        train(pair.theirs, pair.stock, i)
        Interrupted.armed += [True] if i == 1 else []
        try:
            loss_of(pair.ours, i).backward()
        except KeyboardInterrupt:
            came += 1
        try:
            pair.fused.step()
        except optfuse.Error as error:
            raise AssertionError(f"an interrupt ended the optimizer: {error}") from None
        pair.fused.zero_grad()
    assert came == 1, f"{came} interrupts arrived"
    pair.assert_same()


class Slow(Tensors):
    """Gives the GIL away in the update, and wants it back."""

    running = threading.Event()

    def update(self, group, p, state):
        self.running.set()
        time.sleep(0.5)
        super().update(group, p, state)


def fork_during_an_update():
    optfuse.register(Slow)
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Slow([p]), "backward")
    thread = threading.Thread(target=lambda: (p * p).sum().backward())
    thread.start()
    Slow.running.wait()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    thread.join()
    optimizer.step()


@guards("gil", "fork")
def who_waits_for_an_update_in_python_lets_python_run():
    """The process that hangs does so with the GIL held, and must be killed."""
    child = os.fork()
    if child == 0:
        try:
            fork_during_an_update()
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + SECONDS
    ended, status = 0, 0
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("both threads wait for each other")
    if status != 0:
        raise RuntimeError(f"the process ended with {status}")
