# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios that several processes play together, over gloo on this machine.

A module of scenarios has SCENARIOS: functions by name that every rank calls, and that raise
on a rank where something is wrong. So many processes are started once for all scenarios that
were selected, of all modules, since importing torch takes longer than most of them."""

import functools
import importlib
import json
import os
import tempfile
import time
from pathlib import Path

import forked_python
import pytest
from common import same

HERE = Path(__file__).parent
# tests/run --full says "2,3,4"; a sample is played by more than two processes anyway.
WORLDS = tuple(map(int, os.environ.get("OPTFUSE_TEST_WORLDS", "2").split(",")))
STEPS = int(os.environ.get("OPTFUSE_TEST_STEPS", "12"))  # of training, in most scenarios
LONG = max(STEPS, 20)  # where something begins at the 10th step only
GRACE = 3.0  # seconds for the other ranks once one has failed
PATIENCE = 90.0  # for one scenario


def scenario_of(scenarios, *modes, **cases):
    """Adds the function to a module's scenarios, once for each mode and case; called as
    function(mode, **case)."""

    def add(function):
        for mode in modes:
            for case, options in (cases or {"": {}}).items():
                name = " ".join(filter(None, (function.__name__, case, mode)))
                scenarios[name] = functools.partial(function, mode, **options)
        return function

    return add


def script_of(scenarios, *modes, prove=True, recorded=None, **cases):
    """Adds a script of common.py to a module's scenarios, once for each mode and case. It is a
    function of wrap, which knows the mode as its way, and of what the case says."""

    def add(script):
        def compared(mode, **case):
            def told(wrap):
                wrap.way = mode
                yield from script(wrap, **case)

            options = {} if recorded is None else {"recorded": recorded}
            same(told, "forward" if mode == "awaited" else mode, prove, **options)

        compared.__name__ = script.__name__
        scenario_of(scenarios, *modes, **cases)(compared)
        return script

    return add


def differs(comparison):
    """A control: the comparison has to find other bits than stock's."""
    try:
        comparison()
    except AssertionError as error:
        assert "differ from stock" in str(error), error
    else:
        raise RuntimeError("training with a fault had stock's bits")


def cases(module, more=None, worlds=WORLDS, all_usual=False):
    """The scenarios of a module for each number of processes, as parameters `world` and `scenario`.
    more: some of them by other numbers, too. Of the cases of a scenario in a mode, two of three are
    for tests/run --full."""
    scenarios = importlib.import_module(module).SCENARIOS
    runs = [(world, name) for world in worlds for name in scenarios]
    usual = set(scenarios) if all_usual else _usual(scenarios).union(*(more or {}).values())
    for world, names in (more or {}).items():
        known = [name for name in names if name in scenarios]  # by this release of PyTorch
        assert known, f"none of {names} is a scenario of {module}"
        runs += [(world, name) for name in known if world not in worlds]
    return [
        pytest.param(
            world,
            f"{module}:{name}",
            marks=[pytest.mark.slow] * (world > 2) + [pytest.mark.full] * (name not in usual),
        )
        for world, name in runs
    ]


def _usual(scenarios):
    """A third of the cases of each scenario and mode, and other cases of another mode."""
    cases = {}
    for name in scenarios:
        words = name.split()
        cases.setdefault(words[0], {}).setdefault(words[-1], []).append(name)
    return {
        name
        for modes in cases.values()
        for turn, names in enumerate(modes.values())
        for place, name in enumerate(names)
        if (place + turn) % min(3, len(names)) == 0
    }


def play(world, names):
    """The outcome of each scenario, which is named MODULE:NAME: None, or the errors of the
    ranks."""
    outcomes = {}
    while left := [name for name in names if name not in outcomes]:
        outcomes |= _play_up_to_a_failure(world, left)
    return outcomes


def _play_up_to_a_failure(world, names):
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(folder, rank, world, names) for rank in range(world)]
        _wait(folder, ranks)
        told = [_read(folder, rank) for rank in range(world)]
        outcomes = {}
        for name in names:
            errors = {r: one[name] for r, one in enumerate(told) if one.get(name)}
            if not errors and all(name in one for one in told):
                outcomes[name] = None
                continue
            for rank, process in enumerate(ranks):
                if process.returncode not in (0, 1) and name not in told[rank]:
                    said = Path(f"{folder}/output-{rank}").read_text("utf-8", "replace")[-3000:]
                    errors[rank] = f"exit {process.returncode}\n{said}"
            outcomes[name] = "\n".join(f"rank {r}: {e}" for r, e in errors.items()) or "no end"
            break
        return outcomes


def _start(folder, rank, world, names):
    code = forked_python.script(HERE / "worker.py", folder, rank, world, *names)
    output = f"{folder}/output-{rank}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forked_python.into(forked_python.coded(code, HERE, environment), output, output)


def _wait(folder, ranks):
    """Until all have ended; kills them when one has failed, or none says anything new."""
    heard, last = 0, time.monotonic()
    while any(process.poll() is None for process in ranks):
        time.sleep(0.05)
        now = sum(file.stat().st_size for file in Path(folder).glob("outcomes-*"))
        failed = any(process.poll() not in (None, 0) for process in ranks)
        if now != heard:
            heard, last = now, time.monotonic()
        if time.monotonic() - last > (GRACE if failed else PATIENCE):
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def _read(folder, rank):
    path = Path(f"{folder}/outcomes-{rank}")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return dict(map(json.loads, lines))
