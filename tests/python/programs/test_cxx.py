# SPDX-License-Identifier: BSD-3-Clause
"""Deeds and random programs with optimizers of C++ programs (cxx_door.py): stock's bits, or an
error; and with a guard off a deed sees other bits."""

import json
import os
import sys
from pathlib import Path

import pytest
from common import python

from programs import cxx_door
from programs.cases import Case, around, setup_of
from programs.deed import ALONE, DEEDS, DIFFERS, EQUAL
from programs.draw import Program
from programs.faults import switch_off
from programs.optimizers import OF_CXX
from programs.play import MODES, NO_ADDRESS, Broken, play, verdict_of
from programs.runner import in_child, prepare, run

#: Setups that C++ has.
SETUPS = {"groups", "wait_from"}
DEEDS_OF_CXX = [
    name
    for name, deed in DEEDS.items()
    if deed.where != ALONE and not deed.make and SETUPS.issuperset(deed.setup)
    and any(map(deed.takes, OF_CXX)) and name not in cxx_door.left_out()
]  # fmt: skip
#: Guards without which a deed sees other bits through this door, too.
NEEDED = (
    *("key", "seal", "rearm", "lazy", "late", "late_state", "consumed", "consumed_twice"),
    *("copyback", "copy_on_write", "version"),
)
GUARDS = {
    fault[0]: (name, fault)
    for name in DEEDS_OF_CXX
    for fault in DEEDS[name].faults
    if fault[0] in NEEDED
}
PROGRAMS = 60  # of each kind


def failures(name):
    """With each kind, the deed's first arguments and first model."""
    deed, arguments = DEEDS[name], next(iter(DEEDS[name].variants()))
    for kind in filter(deed.takes, OF_CXX):
        for actions, is_late in around(deed, arguments):
            program = Program(0, setup_of(deed, kind, deed.models[0]), actions)
            case = Case(deed, kind, arguments, program, is_late)
            try:
                stock = play(program, "stock")
                for mode in MODES:
                    yield from (f"{case}, {mode}: {why}" for why in wrong(case, mode, stock))
            except Broken as error:
                yield f"{case}, with stock: {error}"


def wrong(case, mode, stock):
    """Words of errors are C++'s own."""
    verdict = verdict_of(case.program, mode, stock)
    expected = case.deed.outcome(mode, case.kind, case.arguments, case.is_late)
    if expected is DIFFERS:
        return
    if verdict.failure:
        yield verdict.failure
    elif NO_ADDRESS in verdict.run.error:
        pass  # C++ saves after flush()
    elif expected is EQUAL and verdict.run.end != "equal":
        yield f"it ended, {verdict.run.end}, at {verdict.run.action}: {verdict.run.error}"
    elif verdict.run.created == 0 and verdict.run.end == "equal":
        yield "no update was made: it proves nothing"


def main():
    prepare()
    cxx_door.load()
    said = {name: list(failures(name)) for name in DEEDS_OF_CXX}
    tallies = [run(1, PROGRAMS, kind=kind.name) for kind in OF_CXX]
    said["programs"] = [str(failure) for tally in tallies for failure in tally.failures]
    for guard, (name, fault) in GUARDS.items():
        switch_off(*fault)
        *found, status = in_child(lambda write, name=name: write(*failures(name)))
        said[guard] = found[0] if found else [f"crashed: {status}"]
    print(json.dumps(said), file=sys.stderr)


@pytest.fixture(scope="module")
def said():
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    if not cxx_door.library_of(Path(library)).is_file():
        pytest.skip("the build has no tests in C++ (-Dtests=true)")
    done = python("from programs.test_cxx import main\nmain()", 900, OPTFUSE_LIBRARY=library)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("name", [*DEEDS_OF_CXX, "programs"])
def test_deeds_and_programs(name, said):
    assert not said[name], f"{len(said[name])} fail, such as\n" + "\n".join(said[name][:3])


@pytest.mark.parametrize("guard", GUARDS)
def test_a_deed_fails_without_its_guard(guard, said):
    assert said[guard], "it is as well without the guard"
