# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.ab: complete, honest results on a small model. Times are not judged."""

import json
import math
import random
import re

import pytest
import torch
from torch import nn

import optfuse
from optfuse import _fuse
from optfuse_tools.ab.result import median_interval
from optfuse_tools.ab.variants import VARIANTS

STOCK = ("default", "foreach=True", "fused=True")
OURS = ("backward fusion", "forward fusion")


def build(wrap, make=torch.optim.AdamW, **options):
    """Draws its batches, dropout and a Python random number from the global generators."""
    model = nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 3))
    optimizer = wrap(make(model.parameters(), lr=1e-2, **options))

    def iteration():
        x = torch.randn(16, 20) * (1 + random.random())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        return loss

    return iteration


def compare(build_fn=build, **options):
    return optfuse.ab(build_fn, **{"rounds": 4, "iterations": 3, "warmup": 2, **options})


@pytest.fixture(scope="module")
def result():
    return compare(rounds=10)


def test_every_variant_reports_every_round_and_every_loss(result):
    assert [row.name for row in result.rows] == list(VARIANTS)
    assert result.steps == 2 + 10 * (1 + 3)
    for row in result.rows:
        assert row.note == ""
        assert len(row.rounds_ms) == 10 and min(row.rounds_ms) > 0, row.name
        assert len(row.losses) == result.steps, row.name
        assert row.final_loss == row.losses[-1]
        for interval in (row.ms, row.speed):
            assert 0 < interval.low <= interval.median <= interval.high < math.inf, row.name


def test_losses_and_weights_of_ours_are_those_of_fused_by_bits(result):
    assert (result.baseline, result.reference) == ("fused=True", "fused=True")
    for name in OURS:
        assert result[name].losses == result["fused=True"].losses, name
        assert result[name].equal_bits is True, name
        assert result[name].max_difference == result["fused=True"].max_difference, name


def test_all_variants_start_alike_and_those_with_an_optimizer_learn(result):
    assert len({row.losses[0] for row in result.rows}) == 1
    for name in (*STOCK, *OURS):
        early, late = result[name].losses[:10], result[name].losses[-10:]
        assert sum(late) < sum(early), name
        assert result[name].max_difference < 1e-2, name
    assert result["default"].max_difference == 0.0


def test_without_an_optimizer_nothing_is_updated():
    before, after = [], []

    def watched(wrap):
        model = nn.Linear(4, 4)
        optimizer = wrap(torch.optim.AdamW(model.parameters()))
        before.append(model.weight.detach().clone())
        after.append(model.weight)

        def iteration():
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4)).square().sum()
            loss.backward()
            assert optimizer.step(lambda: 7.0) in (7.0, loss)
            return loss

        return iteration

    row = compare(watched, variants={"no optimizer": VARIANTS["no optimizer"]})["no optimizer"]
    assert torch.equal(before[0], after[0]), "the variant without an optimizer changed a weight"
    assert row.equal_bits is None and row.max_difference is None


def test_a_variant_that_trains_otherwise_is_reported_as_different():
    def slower(optimizer):
        optimizer.param_groups[0]["lr"] /= 2
        return optimizer

    def fused(optimizer):
        return VARIANTS["fused=True"](optimizer)

    result = compare(variants={"fused=True": fused, "half the lr": lambda o: slower(fused(o))})
    assert result["half the lr"].equal_bits is False
    assert result["half the lr"].max_difference > 1e-3
    (wrong,) = result.wrong
    assert wrong.startswith("WEIGHTS ARE WRONG under half the lr: after step 1 parameter ")
    assert re.search(r" of shape \(.*\) is 0\.\d+ of its size away from fused=True's \(", wrong)
    assert str(result).startswith(f"verdict: {wrong}; half the lr is ")


@pytest.mark.parametrize("what", ("nan", "late"))
def test_wrong_weights_have_their_first_step_and_parameter(what):
    """One weight of the second layer becomes NaN, or another number, as if by a fault of fusion."""

    class Faulty(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 6:
                weight = self.param_groups[0]["params"][2]
                weight.data[1, 2] = math.nan if what == "nan" else weight.data[1, 2] + 0.5

    def faulty(optimizer):
        group = optimizer.param_groups[0]
        return Faulty([{"params": group["params"], "param_names": list("abcd")}], lr=group["lr"])

    result = compare(lambda wrap: build(wrap, torch.optim.SGD), variants={
        "default": VARIANTS["default"], "fused=True": VARIANTS["fused=True"], "faulty": faulty
    })  # fmt: skip
    (wrong,) = result.wrong
    assert "under faulty: after step 6 parameter 'c' of shape (3, 32)" in wrong
    assert ("has NaN or infinities that fused=True's has not" in wrong) is (what == "nan")


def test_other_roundings_are_not_wrong_weights():
    variants = {
        **{name: VARIANTS[name] for name in STOCK},
        "mine": lambda o: VARIANTS["foreach=True"](o),
    }
    result = compare(variants=variants)
    assert result["mine"].equal_bits is False and not result.wrong
    assert "weights of mine have other bits than fused=True's; " in result.verdict


def test_batches_that_end_say_how_many_are_needed():
    def short(wrap):
        iteration = build(wrap)
        batches = iter(range(9))

        def drawn():
            next(batches)
            return iteration()

        return drawn

    with pytest.raises(
        ValueError, match=r"ended after 9, and ab\(\) takes 18 for each variant"
    ) as e:
        compare(short)
    assert isinstance(e.value.__cause__, StopIteration) and "itertools.cycle()" in str(e.value)
    compare(short, rounds=1, iterations=3, warmup=5)  # nine


def test_memory_and_page_faults_of_each_variant(result):
    for row in result.rows:
        assert 50 < row.peak_mb < 20000 and 0.0 <= row.fault_share < 1.0
    assert "page faults take" not in str(result), "all is small"
    assert {"date", "cpu", "threads", "torch"} <= {*result.settings}
    assert f"torch {torch.__version__}" in str(result)


def test_nothing_is_pending_when_a_clock_starts_or_stops(monkeypatch):
    fused, seen = [], []
    flush = optfuse.flush

    def forward(optimizer):
        fused.append(optfuse.fuse(optimizer))
        return fused[0]

    def watched_flush(*args):
        seen.append(optfuse.summary(fused[0]).pending if fused else 0)
        flush(*args)
        if fused:
            assert optfuse.summary(fused[0]).pending == 0

    monkeypatch.setattr(_fuse, "flush", watched_flush)
    variants = {"fused=True": VARIANTS["fused=True"], "ours": forward}
    compare(variants=variants)
    assert max(seen) > 0, "nothing was ever pending: the test proves nothing"
    # Two variants, each with the warm-up and twice a round: one flush before, one after.
    assert len(seen) == 2 * 2 * (1 + 2 * 4)


class Unknown(torch.optim.RMSprop):
    """It looks at values."""

    def step(self, closure=None):
        for group in self.param_groups:
            assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in group["params"])
        return super().step(closure)


def test_an_optimizer_without_fused_is_compared_with_the_default_one():
    result = compare(lambda wrap: build(wrap, Unknown))
    assert (result.baseline, result.reference) == ("default", "default")
    assert all(result[name].ms is not None and not result[name].note for name in OURS)


def test_a_refusal_during_training_is_a_note_and_the_others_go_on():
    def clipped(wrap):
        model = nn.Linear(4, 1)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1e-2))

        def iteration():
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        return iteration

    result = compare(clipped)
    assert result["backward fusion"].note, "clipping after backward must be refused"
    assert result["backward fusion"].ms is None
    assert result["forward fusion"].equal_bits is True


def test_several_optimizers_and_no_loss():
    def two(wrap):
        a, b = nn.Linear(4, 4), nn.Linear(4, 2)
        first = wrap(torch.optim.AdamW(a.parameters()))
        second = wrap(torch.optim.SGD(b.parameters()))

        def iteration():
            first.zero_grad()
            second.zero_grad()
            b(a(torch.randn(3, 4))).sum().backward()
            first.step()
            second.step()

        return iteration

    result = compare(two)
    for row in result.rows:
        assert row.ms is not None and row.final_loss is None and row.losses == [], row.name
    for name in OURS:
        assert result[name].equal_bits is True, name


def test_the_result_goes_to_json_and_prints_as_a_table(result):
    read = json.loads(json.dumps(result.to_dict()))
    assert [row["name"] for row in read["rows"]] == list(VARIANTS)
    assert read["settings"]["rounds"] == 10 and read["steps"] == result.steps
    assert read["rows"][3]["losses"] == result["fused=True"].losses
    said = str(result).splitlines()
    assert said[0] == f"verdict: {read['verdict']}" == f"verdict: {result.verdict}"
    assert said[0].startswith("verdict: weights equal those of fused=True bit by bit; ")
    table = said[2:]
    assert [line.split("  ")[0] for line in table[1:7]] == list(VARIANTS)
    assert "equal" in table[5] and "equal" in table[6]


def test_the_seed_decides_and_the_callers_random_numbers_are_kept():
    torch.manual_seed(5)
    random.seed(5)
    wanted = (torch.rand(3), random.random())
    torch.manual_seed(5)
    random.seed(5)
    curves = [compare(seed=seed)["default"].losses for seed in (1, 1, 2)]
    assert curves[0] == curves[1] != curves[2]
    assert torch.equal(torch.rand(3), wanted[0]) and random.random() == wanted[1]


def test_the_limit_in_seconds_still_leaves_five_rounds():
    result = compare(rounds=50, seconds=0.0)
    assert result.settings["rounds"] == 5


def test_a_build_that_forgets_wrap_is_told_so():
    with pytest.raises(optfuse.Error, match="wrap"):
        compare(lambda wrap: lambda: None)


def test_errors_of_the_users_own_code_are_not_swallowed():
    def broken(wrap):
        wrap(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        compare(broken)


def test_the_interval_holds_the_median_and_narrows_with_more_samples():
    draw = random.Random(0)
    few = [draw.gauss(10, 1) for _ in range(10)]
    many = [draw.gauss(10, 1) for _ in range(1000)]
    for samples in (few, many):
        found = median_interval(samples)
        assert found.low <= found.median <= found.high
    assert median_interval(many).high - median_interval(many).low < 0.3
    assert median_interval(few).high - median_interval(few).low > 0.3
    assert median_interval([2.0, 4.0]).median == 3.0
