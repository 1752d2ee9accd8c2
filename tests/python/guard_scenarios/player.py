# SPDX-License-Identifier: BSD-3-Clause
"""Plays scenarios, each in a process of its own and two at a time, since some of
them wait."""

import gc
import json
import os
import signal
import sys
import traceback

import torch

from guard_scenarios.registry import SCENARIOS

SECONDS = 300  # one that takes longer hangs
AT_A_TIME = 2


def start(name, off):
    """Runs a scenario in a forked child with these guards off: its id, and the pipe
    in which it says what came of it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.environ["OPTFUSE_TEST_GUARDS_OFF"] = ",".join(off)
        os.write(write, outcome(SCENARIOS[name][0]).encode()[:4000])
        os._exit(0)
    os.close(write)
    return child, read


def said(read, status):
    with os.fdopen(read) as pipe:
        return pipe.read() or f"crashed: signal or status {status}"


def play(runs):
    """The outcome of each (name, guards that are off)."""
    gc.collect()
    gc.freeze()  # a child that collects garbage would copy the pages of all that was imported
    played, waiting, running = {}, list(reversed(runs)), {}
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            run = waiting.pop()
            child, read = start(*run)
            running[child] = (run, read)
        child, status = os.wait()
        run, read = running.pop(child)
        played[run] = said(read, status)
    return played


def outcome(scenario):
    try:
        scenario()
    except AssertionError as error:
        return f"broken: {error}"
    except BaseException:
        return f"crashed: {traceback.format_exc()}"
    return "kept"


def main():
    torch.set_num_threads(1)
    runs = {}
    for name in sys.argv[1:] or SCENARIOS:
        others = SCENARIOS[name][1]
        runs[name] = [(name, others), (name, (name, *others))]
    played = play([run for both in runs.values() for run in both])
    print(json.dumps({name: [played[run] for run in both] for name, both in runs.items()}))
