# SPDX-License-Identifier: BSD-3-Clause
"""Runs many programs, in forked children, so that a crash is an outcome too."""

import gc
import json
import os
import signal
import traceback
from collections import Counter
from dataclasses import dataclass, field

import torch

from programs.draw import generate
from programs.play import MODES, judge
from programs.shrink import shrink

SECONDS = 300  # more is a hang
CHUNK = 200  # programs for each child


@dataclass
class Failure:
    seed: int
    mode: str
    what: str
    how: dict = field(default_factory=dict)  # the program was generated
    code: str = ""  # of the shrunk program

    def __str__(self):
        return f"seed {self.seed}, {self.mode} mode: {self.what}\n{self.code}"


@dataclass
class Tally:
    programs: int = 0
    ends: Counter = field(default_factory=Counter)  # (mode, end)
    played: Counter = field(default_factory=Counter)  # (mode, action): went well
    ended: Counter = field(default_factory=Counter)  # (mode, action, end): the run ended there
    failures: list = field(default_factory=list)

    def add(self, seed, results, program, how):
        self.programs += 1
        for mode, (end, at, name, failure) in results.items():
            self.ends[mode, end] += 1
            if end != "equal":
                self.ended[mode, name, end] += 1
            for played, _ in program.actions[:at]:
                self.played[mode, played] += 1
            if failure:
                self.failures.append(Failure(seed, mode, failure, how))

    def share(self, mode, end):
        return self.ends[mode, end] / max(1, self.programs)


def in_child(function):
    """Calls function(write) in a forked child, which writes lines; yields them,
    and at last the child's exit status."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "w", buffering=1) as pipe:
                function(lambda *line: print(json.dumps(line), file=pipe))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        for line in pipe:
            yield json.loads(line)
    yield os.waitpid(child, 0)[1]


def results_of(program):
    found = {}
    for mode, verdict in judge(program).items():
        run = verdict.run
        found[mode] = (run.end, run.at, run.action, verdict.failure[:2000])
    return found


def prepare():
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def play_chunk(seeds, how):
    def play_all(write):
        for seed in seeds:
            write(seed, None)
            signal.alarm(SECONDS)
            write(seed, results_of(generate(seed, **how)))
        signal.alarm(0)
        gc.collect()

    return in_child(play_all)


def crash(status):
    number = os.waitstatus_to_exitcode(status)
    return f"it hangs for {SECONDS} s" if number == -signal.SIGALRM else f"crashed, status {number}"


def run(first, count, say=lambda tally: None, **how):
    """Plays the programs of `count` seeds; how: more arguments of generate()."""
    tally = Tally()
    seed, last = first, first + count
    while seed < last:
        seeds = range(seed, min(last, seed + CHUNK))
        for line in play_chunk(seeds, how):
            if isinstance(line, list):
                seed = line[0]
                if line[1] is not None:
                    tally.add(seed, line[1], generate(seed, **how), how)
                    seed += 1
            elif line != 0 or seed < seeds.stop:
                tally.failures.append(Failure(seed, "any", crash(line), how))
                seed += 1
        say(tally)
    return tally


def what_fails(program, mode):
    """The fault as seen from outside, or an empty string."""
    *lines, status = in_child(lambda write: (signal.alarm(SECONDS), write(results_of(program))))
    if status != 0 or not lines:
        return crash(status)
    ((results,),) = lines
    failures = [results[m][3] for m in MODES if mode in (m, "any")]
    return next(filter(None, failures), "")


def explain(failure):
    """Shrinks the program and adds its code."""
    program = generate(failure.seed, **failure.how)
    program = shrink(program, lambda p: what_fails(p, failure.mode))
    failure.code = program.code()
    return failure
