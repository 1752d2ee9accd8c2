# SPDX-License-Identifier: BSD-3-Clause
"""Random training programs on three streams.

A program is a list of actions. It is drawn at random and then mended: run with
the stock optimizer, wherever the fake GPU reports a race, the stream at fault is
made to wait for the other one just before that action, and for nothing else. So
what comes out is free of races with stock, and only just."""

from __future__ import annotations

import functools
import gc
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import gpu
import torch
from gpu import NAME

import optfuse

STREAMS = 3
MOST_REPAIRS = 60


@dataclass
class Machine:
    """The objects that a program works on."""

    params: list[torch.Tensor]
    optimizer: torch.optim.Optimizer
    streams: list[torch.Stream]
    outputs: list[torch.Tensor] = field(default_factory=list)
    events: dict[int, torch.Event] = field(default_factory=dict)


def loss_of(params, seed):
    x = torch.full((4, 8), 0.1 * (seed % 7 + 1), device=NAME)
    hidden = (x @ params[0]).tanh() * (x @ params[1]).sigmoid()
    return (hidden @ params[2]).square().sum()


# Actions. Each runs on the stream `s`.


def backward(m, s, seed):
    loss_of(m.params, seed).backward()


def step(m, s, seed):
    m.optimizer.step()


def train(m, s, seed):
    """Forward, backward and step in one: all that backward mode allows."""
    m.optimizer.zero_grad()
    backward(m, s, seed)
    step(m, s, seed)


def zero_grad(m, s, seed):
    m.optimizer.zero_grad(set_to_none=seed % 3 != 0)


def evaluate(m, s, seed):
    with torch.no_grad():
        m.outputs.append(loss_of(m.params, seed))


def read_param(m, s, seed):
    m.outputs.append(m.params[seed % 3].detach() * 2)


def write_param(m, s, seed):
    with torch.no_grad():
        m.params[seed % 3].mul_(0.5)


def read_grad(m, s, seed):
    grad = m.params[seed % 3].grad
    if grad is not None:
        m.outputs.append(grad + 1)


def write_grad(m, s, seed):
    grad = m.params[seed % 3].grad
    if grad is not None:
        grad.mul_(0.5)


def clip(m, s, seed):
    """By torch's own function, where the optimizer is stock's."""
    m.outputs.append(optfuse.clip_grad_norm_(m.optimizer, 0.1 * (seed % 5)))


def drop_grad(m, s, seed):
    m.params[seed % 3].grad = None


def read_state(m, s, seed):
    for value in m.optimizer.state[m.params[seed % 3]].values():
        m.outputs.append(value.to(torch.float64) * 1)


def use_memory(m, s, seed):
    """Whatever was freed may be used again now."""
    for p in m.params:
        m.outputs.append(torch.full_like(p, float(seed)))
        del m.outputs[-1]


def wait(m, s, other):
    m.streams[s].wait_stream(m.streams[other])


def synchronize(m, s, seed):
    m.streams[s].synchronize()


def forget(m, s, seed):
    """The end, with work still under way."""
    m.params.clear()
    m.optimizer = None
    gc.collect()


FORWARD = [backward, step, step, zero_grad, evaluate, read_param, write_param, read_grad]
FORWARD += [write_grad, drop_grad, read_state, use_memory, clip, clip]
BACKWARD = [train, train, evaluate, read_param, write_param, read_state, use_memory]
Action = tuple[Callable, int, int]


def draw(mode: str, seed: int, length: int) -> list[Action]:
    pick = random.Random(seed)
    kinds = FORWARD if mode == "forward" else BACKWARD
    program = [(pick.choice(kinds), pick.randrange(STREAMS), pick.randrange(1000))]
    while len(program) < length:
        kind, s, number = pick.choice(kinds), pick.randrange(STREAMS), pick.randrange(1000)
        if pick.random() < 0.5:
            s = program[-1][1]  # programs stay on a stream for a while
        program.append((kind, s, number))
    if pick.random() < 0.5:
        program.append((forget, 0, 0))
    return program


def describe(program: list[Action]) -> str:
    return "\n".join(f"  {kind.__name__} on {s} ({number})" for kind, s, number in program)


# Running


@functools.cache
def streams_of_all() -> list[torch.Stream]:
    return [gpu.current(), gpu.stream(), gpu.stream()]


def new_machine(make, wrap) -> Machine:
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 8), (8, 600)]
    params = [torch.nn.Parameter(torch.randn(shape).to(NAME)) for shape in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = wrap(make(params))
    return Machine(params, optimizer, streams_of_all())


def values_of(m: Machine) -> list[torch.Tensor]:
    gpu.synchronize()
    state = [v for p in m.params for v in m.optimizer.state[p].values()]
    return [value.detach().cpu() for value in m.outputs + m.params + state]


@dataclass
class Outcome:
    values: list[torch.Tensor]
    failed_at: int | None = None  # the action that raced
    races: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)  # as races name them


def run(program: list[Action], make, wrap=lambda optimizer: optimizer) -> Outcome:
    """Up to the first race."""
    m = new_machine(make, wrap)
    gpu.synchronize()
    gpu.clear()
    names = ["the default stream of device 0", *(f"stream {s.stream_id}" for s in m.streams[1:])]
    for i, (kind, s, number) in enumerate(program):
        with m.streams[s]:
            kind(m, s, number)
        races = gpu.races()
        if races:
            del m
            gpu.synchronize()
            gc.collect()
            gpu.clear()
            return Outcome([], i, races, names)
    values = values_of(m)
    gpu.clear()
    return Outcome(values)


def mended(program: list[Action], make) -> tuple[list[Action], Outcome]:
    """The program with what stock needs to be free of races, and what stock then gives."""
    for _ in range(MOST_REPAIRS):
        outcome = run(program, make)
        if outcome.failed_at is None:
            return program, outcome
        # The one that comes too early, and the one it should wait for. Where
        # memory is freed, its owner is the last to be named.
        named = re.findall(r"the default stream of device 0|stream \d+", outcome.races[0])
        late, early = (named[0], named[1])
        if not outcome.races[0].startswith("memory is freed"):
            late, early = early, late
        repair = (wait, outcome.streams.index(early), outcome.streams.index(late))
        program = [*program[: outcome.failed_at], repair, *program[outcome.failed_at :]]
    raise AssertionError(f"{MOST_REPAIRS} repairs do not mend\n{describe(program)}")
