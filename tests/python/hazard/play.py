# SPDX-License-Identifier: BSD-3-Clause
"""Plays a program with stock and with fused optimizers and judges the outcome."""

import warnings
from dataclasses import dataclass

import torch
from common import assert_same

import optfuse
from hazard.registry import ACTIONS
from hazard.world import World

MODES = ("forward", "backward")
BY_AUTOGRAD = "modified by an inplace operation"


@dataclass
class Run:
    seen: list
    end: str = "equal"  # or "raised", "outside", "autograd"
    at: int = 0  # actions that went well, or raised what stock raises
    action: str = ""  # at which it ended
    error: str = ""


@dataclass
class Verdict:
    run: Run
    failure: str = ""  # what is wrong, or empty


def outside(world, action):
    """What backward mode has no answer for: it updates before step(), so that
    weights and state looked at or changed in between differ from stock."""
    return world.mode == "backward" and bool(world.unsettled) and not action.between


def raised_by(world, error):
    """How a run ends at this exception, or None where it goes on."""
    if isinstance(error, optfuse.Error):
        return "raised"
    if world.mode != "backward" or not world.in_backward:
        return None
    if BY_AUTOGRAD in str(error):
        return "autograd"
    # Half-way through backward some parameters are updated and others not.
    return "outside"


def act(world, action, arguments):
    """The exception that the action ended with, or None; nothing else is kept
    of it, since a traceback would hold aliases of every tensor in it."""
    world.in_backward = False
    try:
        action.function(world, **arguments)
    except Exception as error:
        world.clean_up()
        return error.with_traceback(None)
    return None


def play(program, mode):
    run = Run([])
    torch.manual_seed(program.seed)
    try:
        world = World(program.setup, mode)
    except optfuse.Error as error:
        return Run([], "raised", 0, "setup", str(error))
    except Exception as error:
        return Run([("setup", type(error).__name__)], "equal", 0, "setup", str(error))
    run.seen = world.seen
    for i, (name, arguments) in enumerate(program.actions):
        action = ACTIONS[name]
        run.at = i
        if outside(world, action):
            run.end, run.action = "outside", name
            return run
        world.label = f"action {i}, {name}"
        error = act(world, action, arguments)
        if error is None:
            continue
        end = raised_by(world, error)
        if end != "raised":
            world.see("exception", type(error).__name__)
            run.error = str(error)
        if end is not None:
            run.end, run.action, run.error = end, name, str(error)
            if end == "autograd":
                world.seen.pop()
            return run
    run.at = len(program.actions)
    return run


def difference(stock, run):
    """What was seen otherwise than in stock, or an empty string."""
    for ours, theirs in zip(run.seen, stock.seen, strict=False):
        if ours[0] != theirs[0]:
            return f"saw {ours}, in stock {theirs}"
        try:
            assert_same(theirs[0], ours[1], theirs[1])
        except AssertionError as error:
            return str(error)
    n = len(stock.seen)
    if len(run.seen) > n:
        return f"saw {run.seen[n]}, in stock nothing there"
    if len(run.seen) < n and run.end == "equal":
        return f"saw nothing where stock has {stock.seen[len(run.seen)]}"
    return ""


def judge(program, modes=MODES):
    """{mode: verdict}"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = play(program, "stock")
        verdicts = {}
        for mode in modes:
            run = play(program, mode)
            verdicts[mode] = Verdict(run, difference(stock, run))
    return verdicts


def check(program, modes=MODES):
    """For a test: raises AssertionError if the program fails."""
    for mode, verdict in judge(program, modes).items():
        assert not verdict.failure, f"in {mode} mode: {verdict.failure}"
