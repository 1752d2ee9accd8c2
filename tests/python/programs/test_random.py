# SPDX-License-Identifier: BSD-3-Clause
"""A thousand random training programs, always the same: every bit as
in stock, or an error. By hand: run_programs.py."""

import json
import os
from collections import Counter

import pytest
from common import python

from programs import runner
from programs.deed import DEEDS, GUARDS
from programs.draw import LAST, Program, generate
from programs.faults import OFTEN, OUT_OF_REACH
from programs.optimizers import ALL
from programs.play import Run, difference, judge
from programs.runner import Tally, explain, run
from programs.shrink import shrink

PROGRAMS = 1000


@pytest.fixture(scope="module")
def tally():
    return run(1, PROGRAMS)


@pytest.mark.slow
def test_a_thousand_programs_are_equal_or_raise(tally):
    assert tally.programs == PROGRAMS or tally.failures
    shown = "\n\n".join(str(explain(failure)) for failure in tally.failures[:3])
    assert not tally.failures, f"{len(tally.failures)} programs failed, such as\n{shown}"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "least"), (("forward", 0.95), ("backward", 0.35)))
def test_most_programs_run_to_their_end(mode, least, tally):
    """A mode that always raised would pass the test above."""
    share = tally.share(mode, "equal")
    assert share >= least, f"{share:.0%} of all programs ran to their end in {mode} mode"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_every_deed_is_played_and_goes_well(mode, tally):
    """In backward mode those that it can answer."""
    refused = {"train_in_another_dtype"}  # always: the state has the old one
    drawn = [deed for deed in DEEDS.values() if deed.weight and any(map(deed.takes, ALL))]
    wanted = [deed.name for deed in drawn if deed.is_gentle or mode == "forward"]
    never = {name for name in wanted if not tally.played[mode, name]}
    assert never <= refused, f"never played in {mode} mode: {never}"


# Negative controls


@pytest.fixture(scope="module")
def found():
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    done = python("from programs.faults import main\nmain()", 500, OPTFUSE_LIBRARY=library)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("guard", OFTEN)
def test_programs_find_that_a_guard_is_off(guard, found):
    assert found[guard], f"no program failed with the guard {guard!r} off"


def test_every_guard_is_looked_for_or_has_a_reason_not_to():
    assert set(OFTEN) | set(OUT_OF_REACH) == set(GUARDS)
    assert not set(OFTEN) & set(OUT_OF_REACH)


# The tester tested


def test_a_seed_gives_the_same_program_every_time():
    assert generate(7) == generate(7) != generate(8)
    code = generate(7).code().replace("check(", "program = (")
    namespace = {}
    exec(code, namespace)
    assert namespace["program"] == generate(7), "the printed code is another program"


def test_a_difference_in_one_bit_is_seen():
    import torch

    zero, minus = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert not difference(Run([("a", zero)]), Run([("a", zero.clone())]))
    assert "1 of 3 elements differ" in difference(Run([("a", zero)]), Run([("a", minus)]))
    assert difference(Run([("a", 1), ("b", 2)]), Run([("a", 1)])), "less seen than in stock"
    assert difference(Run([("a", 1)]), Run([("a", 1), ("b", 2)])), "more seen than in stock"
    assert not difference(Run([("a", 1), ("b", 2)]), Run([("a", 1)], end="raised"))


def test_shrinking_leaves_what_is_needed():
    program = next(p for p in map(generate, range(99)) if len(p.actions) > 12)
    names = [name for name, _ in program.actions]
    needed = Counter((names[3], names[9]))

    def fails(candidate):
        return not needed - Counter(name for name, _ in candidate.actions)

    small = shrink(program, fails)
    assert sorted(name for name, _ in small.actions) == sorted((names[3], names[9]))


ONE_OPTIMIZER = {
    "kind": "Adafactor",
    "over": "all",
    "groups": 1,
    "tensor_lr": False,
    "options": {"lr": 0.01},
}
ITERATION = ("iteration", {"model": 0, "batch": 0, "set_to_none": True})


def small_program(*actions):
    setup = {"models": ["mlp"], "optimizers": [ONE_OPTIMIZER]}
    return Program(0, setup, [ITERATION, *actions])


OTHER_DTYPE = ("train_in_another_dtype", {"model": 0, "batch": 4})


def test_an_update_that_raises_in_backward_is_as_good_as_one_in_step():
    """Stock's step() raises, since the state has another dtype. Nothing is
    looked at afterwards."""
    for actions in ((OTHER_DTYPE,), (OTHER_DTYPE, ITERATION, LAST)):
        for mode, verdict in judge(small_program(*actions)).items():
            assert not verdict.failure, f"{mode}: {verdict.failure}"
            assert verdict.run.end == ("outside" if mode == "backward" else "equal"), mode


@pytest.mark.parametrize("ours", (None, 3, 4))
def test_an_exception_that_only_stock_raises_is_a_failure(ours, monkeypatch):
    """Whether ours then raises nothing or raises in another step()."""
    import optfuse
    from programs.world import World

    step = World.step

    def step_or_raise(world, i, closure=None):
        world.steps = getattr(world, "steps", 0) + 1
        if not world.fused and world.steps == 2:
            raise RuntimeError
        if world.fused and world.steps == ours:
            raise optfuse.Error
        return step(world, i, closure)

    monkeypatch.setattr(World, "step", step_or_raise)
    for mode, verdict in judge(small_program(*[ITERATION] * 4, LAST)).items():
        assert "exception" in verdict.failure, mode


def test_what_is_explained_is_the_program_that_failed(monkeypatch):
    """With the deeds that were drawn more often for it."""
    how = {"often": ("scaled",)}
    tally = Tally()
    results = {"forward": ("equal", 0, "", "other bits")}
    tally.add(7, results, generate(7, **how), how)
    (failure,) = tally.failures
    tried = []
    monkeypatch.setattr(runner, "what_fails", lambda program, mode: tried.append(program))
    assert explain(failure).code == generate(7, **how).code() != generate(7).code()
    assert tried, "it was not tried to shrink the program"


def test_a_deed_that_goes_wrong_is_a_failure(monkeypatch):
    from programs.world import World

    look = World.look

    def look_twice(world, gradients=True):
        look(world, gradients)
        if world.mode == "backward":
            world.see("more", 1)

    monkeypatch.setattr(World, "look", look_twice)
    program = next(p for p in map(generate, range(99)) if not judge(p)["backward"].run.error)
    verdicts = judge(program)
    assert verdicts["backward"].failure and not verdicts["forward"].failure
