# SPDX-License-Identifier: BSD-3-Clause
"""Plays scenarios, each in a process of its own."""

import json
import os
import signal
import sys
import traceback

import torch

from guard_scenarios.registry import SCENARIOS

SECONDS = 60


def play(name, off):
    """Runs a scenario in a forked child with these guards off; what came of it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.environ["OPTFUSE_TEST_GUARDS_OFF"] = ",".join(off)
        os.write(write, outcome(SCENARIOS[name][0]).encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or f"crashed: signal or status {status}"


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
    names = sys.argv[1:] or SCENARIOS
    played = {}
    for name in names:
        others = SCENARIOS[name][1]
        played[name] = [play(name, others), play(name, (name, *others))]
    print(json.dumps(played))
