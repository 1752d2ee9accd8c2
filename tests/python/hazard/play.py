# SPDX-License-Identifier: BSD-3-Clause
"""Plays a program with stock and with fused optimizers and judges the outcome."""

import contextlib
import warnings
from dataclasses import dataclass

import torch
from common import assert_same, one_process
from pytorchs_own import pytorchs_own

import optfuse
from hazard.registry import ACTIONS, Action
from hazard.world import World

MODES = ("forward", "backward")
# For updates that no action has used.
AT_LAST = Action("launch", World.launch, {}, weight=0, gentle=False, between=False)
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
    """Actions that backward mode has no answer for: it updates before step(), so that
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


def label(i, name):
    return f"action {i}, {name}"


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
    alone = one_process() if "ddp" in program.setup else contextlib.nullcontext()
    with alone, pytorchs_own() if mode == "stock" else contextlib.nullcontext():
        return played(program, mode)


def played(program, mode):
    run = Run([])
    torch.manual_seed(program.seed)
    try:
        world = World(program.setup, mode)
    except optfuse.Error as error:
        return Run([], "raised", 0, "setup", str(error))
    except Exception as error:
        return Run([("setup", type(error).__name__)], "equal", 0, "setup", str(error))
    run.seen = world.seen
    actions = [(ACTIONS[name], arguments) for name, arguments in program.actions]
    for i, (action, arguments) in enumerate([*actions, (AT_LAST, {})]):
        name, run.at = action.name, i
        if outside(world, action):
            run.end, run.action = "outside", name
            return run
        world.label = label(i, name)
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
    """The first difference from stock, or an empty string."""
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


def verdict_of(program, mode, stock):
    run = play(program, mode)
    return Verdict(run, difference(stock, run))


def judge(program, modes=MODES):
    """{mode: verdict}"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = play(program, "stock")
        return {mode: verdict_of(program, mode, stock) for mode in modes}


def check(program, modes=MODES):
    """For a test: raises AssertionError if the program fails."""
    for mode, verdict in judge(program, modes).items():
        assert not verdict.failure, f"in {mode} mode: {verdict.failure}"
