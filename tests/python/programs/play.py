# SPDX-License-Identifier: BSD-3-Clause
"""Plays a program with stock and with fused optimizers and judges the outcome."""

import contextlib
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import assert_same, one_process
from pytorchs_own import pytorchs_own

import optfuse
import programs.deeds  # noqa: F401 - fills the table
from optfuse._library.bindings import lib
from programs.deed import ANYWHERE, ARMED, BEFORE_FUSE, DEEDS, DIFFERS, Deed
from programs.world import World

MODES = ("forward", "backward")
# For updates that no deed has used.
AT_LAST = Deed("launch", World.launch, ANYWHERE)
BY_AUTOGRAD = "modified by an inplace operation"


class Broken(Exception):
    """A deed's own assertion."""


@dataclass
class Run:
    seen: list
    end: str = "equal"  # or "raised", "outside", "autograd"
    at: int = 0  # actions that went well, or raised what stock raises
    action: str = ""  # at which it ended
    error: str = ""
    had_pending: bool = False  # at the tested deed
    launched: bool = False  # by its use of them
    left: bool = False  # to step(): an update
    has_refused: bool = False
    created: int = 0  # updates, of all optimizers
    promised: bool = False  # gradients, since fuse()
    stuck: str = ""  # why training does not go on after an error


@dataclass
class Verdict:
    run: Run
    failure: str = ""  # what is wrong, or empty


def outside(world, deed):
    """Whether backward mode has no answer: it updates before step(), so that weights and state
    looked at or changed in between differ from stock."""
    if world.mode != "backward":
        return False
    if DIFFERS in deed.outcomes.values() and (world.unsettled or deed.where in ARMED):
        return world.tested != deed.name
    return bool(world.unsettled) and deed.where not in (ANYWHERE, *ARMED)


def is_of_a_deed(error):
    """An assertion that a deed makes, not PyTorch."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    return isinstance(error, AssertionError) and "/tests/" in file


# A read by address, under a pending update.
NO_ADDRESS = "Cannot access data pointer of Storage that is invalid"


def refused_in_cxx(world, error):
    """Whether an optimizer of a C++ program refuses it: its errors are no optfuse.Error."""
    said = any(words in str(error) for words in ("optfuse: ", NO_ADDRESS))
    return said and any(hasattr(optimizer, "_door") for optimizer in world.optimizers)


def raised_by(world, error):
    """How a run ends at this exception, or None where it goes on."""
    if isinstance(error, optfuse.Error) or refused_in_cxx(world, error):
        return "raised"
    if world.mode != "backward" or not world.in_backward:
        return None
    if BY_AUTOGRAD in str(error):
        return "autograd"
    # Half-way through backward some parameters are updated and others not.
    return "outside"


def label(i, name):
    return f"action {i}, {name}"


def act(world, deed, arguments):
    """The exception that the deed ended with, or None; nothing else is kept of it, since a
    traceback would hold aliases of every tensor in it."""
    world.in_backward = False
    try:
        world.play(deed, arguments)
    except Exception as error:
        world.clean_up()
        if is_of_a_deed(error):
            raise Broken(f"{type(error).__name__} in {deed.name}: {error}") from None
        return error.with_traceback(None)
    return None


def group_for(program):
    """The process group that it needs."""
    setup = program.setup
    needed = {"ddp", "group"} & set(setup) or "replicated" in setup["models"]
    return one_process() if needed and not dist.is_initialized() else contextlib.nullcontext()


def play(program, mode):
    usual = lib.of_shim_wait_from(0)
    lib.of_shim_wait_from(program.setup.get("wait_from", usual))
    try:
        with (
            group_for(program),
            pytorchs_own() if mode == "stock" else contextlib.nullcontext(),
        ):
            return played(program, mode)
    finally:
        lib.of_shim_wait_from(usual)


def begun(program, mode):
    """The world, or the run that has ended already."""
    torch.manual_seed(program.seed)
    try:
        return World(program.setup, mode), None
    except Exception as error:
        return None, ended_at_setup(error)


def ended_at_setup(error):
    if isinstance(error, optfuse.Error):
        return Run([], "raised", 0, "setup", str(error))
    return Run([("setup", type(error).__name__)], "equal", 0, "setup", str(error))


def played(program, mode):
    world, run = begun(program, mode)
    if run:
        return run
    run = Run(world.seen)
    actions = [(DEEDS[name], arguments) for name, arguments in program.actions]
    for i, (deed, arguments) in enumerate([*actions, (AT_LAST, {})]):
        if deed.where != BEFORE_FUSE and not world.is_begun:
            try:
                world.begin()
            except Exception as error:
                return ended_at_setup(error)
        name, run.at = deed.name, i
        if outside(world, deed):
            run.end, run.action = "outside", name
            break
        world.label = label(i, name)
        error = act(world, deed, arguments)
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
            break
    else:
        run.at = len(program.actions)
    run.had_pending, run.launched = world.had_pending, world.launched
    run.has_refused = world.has_refused
    run.created, run.left = world.created(), world.count("in_step") > 0
    run.promised = world.promised()
    if run.end == "raised" and program.setup.get("goes_on"):
        run.stuck = world.go_on()
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
    try:
        run = play(program, mode)
    except Broken as error:
        return Verdict(Run([], "broken"), str(error))
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
