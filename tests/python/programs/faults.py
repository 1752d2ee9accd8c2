# SPDX-License-Identifier: BSD-3-Clause
"""Negative controls: with a guard of the library off, the deed that needs it fails, and random
programs find a difference. Run with the test-only library in OPTFUSE_LIBRARY."""

import json
import os
import sys

from optfuse._library.bindings import lib
from programs.cases import failures
from programs.deed import DEEDS, GUARDS
from programs.draw import generate
from programs.play import MODES
from programs.runner import in_child, prepare, run, what_fails

PROGRAMS = 2000  # at most, for each guard
AT_A_TIME = 20

# Actions that lead to each guard and are drawn more often, so that it takes
# seconds and not minutes.
OFTEN = {
    "key": (),
    "privacy": ("hold", "see_what_is_held"),
    "seal": ("read",),
    "raw": ("read",),
    "version": ("keep_a_loss", "backward_of_a_kept_loss"),
    "rearm": ("step",),
    "twice": ("discarded_backward",),
    "consumed": ("clipped",),
    "consumed_twice": ("step_twice",),
    "lazy": ("step_with_negated_gradients",),
    "clear": ("replace_the_optimizer",),
    "dense": ("new_data", "set_gradient"),
    "copyback": (),
    "postpone": (),
    "discarded": ("discarded_backward",),
    "late": ("hook_before_step",),
    "late_state": ("change_state",),
    "factors": ("clipped_by_optfuse",),
    "unread": ("clipped_by_optfuse", "clip_by_optfuse"),
    "clip": ("clipped_by_optfuse",),
    "nonfinite": ("scaled",),
    "native": (),
}

# Why programs can't see that these are off.
OUT_OF_REACH = {
    "average_alias": "programs keep no alias of an average",
    "foreign": "it prevents a race; a program's other thread ends before the next action",
    "fork": "programs don't fork",
    "ddp": "programs have one process",
    "reduced": "programs have one process",
    "bucket": "programs have one process",
    "await": "programs have one process",
    "reuse": "programs have one process",
    **dict.fromkeys(
        ("base", "held", "sibling", "wrapper", "wrapper_version"), "programs have no DTensors"
    ),
    "compile": "compiling takes seconds; its deed needs key, seal and raw off as well",
    **dict.fromkeys(
        ("order", "hand_on", "task_version", "budget"), "programs run backward in stock's order"
    ),
    **dict.fromkeys(("late_write", "exchange"), "programs delay no updates"),
    **dict.fromkeys(
        ("factors_copied", "product_bits", "norm_bound"),
        "gradients are promises where OPTFUSE_PRODUCTS says so: test_promised_deeds.py",
    ),
    **dict.fromkeys(
        ("late_groups", "late_scale", "written"),
        "programs with it off have raised for other reasons so far; its deed shows it",
    ),
    "groups": "step() refuses late changes of groups by themselves; its deed shows it",
    **dict.fromkeys(
        ("overwritten", "consumed_alias"), "programs overwrite no gradient that was consumed"
    ),
    "late_load": "programs load states between two iterations",
    "copy_on_write": "programs make no lazy clones",
    "create_graph": "programs drop such gradients, to end their cycle, which raises at step()",
    "recheck": "without it the update runs in step(): later, with the same bits",
    "norm": "it matters on CPUs only where PyTorch's operator has other roundings",
    "added_late": "step() then finds the added gradients and raises: later, with no wrong bits",
    "nested": "a pass that is counted twice updates too early, and the next one raises",
    "interrupts": "programs are not interrupted; tests/python/process/test_interrupts.py does that",
    "gil": "it prevents a deadlock of two threads; a program has one at a time",
    "graphs": "a graph of the tests' own replays here; programs have none",
    "buffer": "programs have no gradients in memory that they know by another name",
    **{
        name: "it is about what a class does in step()"
        for name in GUARDS
        if name.startswith(("recorded_", "ahead_"))
    },
    **dict.fromkeys(
        ("shared_state", "early_state"), "programs give no optimizer the state of another one"
    ),
    "late_values": "it is about recorded classes; programs have those of torch.optim",
    "alone": "it is about classes that break the promise of register()",
    "floating": "programs never flush denormals",
    "strides": "programs with 16 bits have Adam and AdamW only",
    "apart": "a gradient that is its weight is rare, and shows after some updates only",
    "scaler": "GradScaler then reads gradients that are consumed, which raises too",
}


def switch_off(*guards):
    os.environ["OPTFUSE_TEST_GUARDS_OFF"] = ",".join(guards)


def by_the_guard(failure, others):
    """Whether the program ends otherwise with the guard on: it may have found something else."""
    switch_off(*others)
    return what_fails(generate(failure.seed, **failure.how), failure.mode) != failure.what


def found(guard):
    """The message of the first program that fails without the guard, or an empty string."""
    others = next(f[1:] for f in DEEDS[GUARDS[guard]].faults if f[0] == guard)
    for first in range(1, PROGRAMS + 1, AT_A_TIME):
        switch_off(guard, *others)
        for failure in run(first, AT_A_TIME, often=OFTEN.get(guard, ())).failures:
            if by_the_guard(failure, others):
                return str(failure)
    return ""


def control(name, guard, *others):
    """[what fails with all guards, without the one that the deed needs]"""
    outcomes = []
    for off in (others, (guard, *others)):
        switch_off(*off)
        *said, status = in_child(lambda write: write(*(failures(name, mode) for mode in MODES)))
        outcomes.append(sum(said[0], []) if said else [f"crashed: {status}"])
    return outcomes


def ready():
    prepare()
    lib.of_shim_wait_from(0)  # clipping is left to the updates of these small parameters, too


def of_deeds():
    ready()
    wanted = sys.argv[1:] or DEEDS
    controls = [(name, fault) for name in wanted for fault in DEEDS[name].faults]
    print(json.dumps({f"{name} {fault[0]}": control(name, *fault) for name, fault in controls}))


def main():
    ready()
    guards = sys.argv[1:] or OFTEN
    print(json.dumps({guard: found(guard) for guard in guards}))
