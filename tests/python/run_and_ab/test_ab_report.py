# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.ab says where it is, what its words mean, and when its figures mean little."""

import io
import math
import random
import sys

import numpy as np
import pytest
import torch
from common import refused
from own_classes import Tensors
from test_ab import build, compare
from torch import nn

import optfuse
from optfuse_tools.ab import page_faults, progress
from optfuse_tools.ab.interval import median_interval
from optfuse_tools.ab.result import Comparison, Row, in_page_faults, undecided
from optfuse_tools.ab.variants import VARIANTS

TWO = {name: VARIANTS[name] for name in ("no optimizer", "default")}


# Nothing trained


def broken(wrap, *, backward=True, step=True, use=True):
    model = nn.Linear(4, 2)
    given = torch.optim.AdamW(model.parameters())
    wrapped = wrap(given)
    optimizer = wrapped if use else given

    def iteration():
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        if backward:
            loss.backward()
        if step:
            optimizer.step()
        return loss

    return iteration


def only(result, *words):
    """The one warning about training; whether intervals are wide is left to chance."""
    found = [text for text in result.warnings if "step()" in text]
    assert len(found) == 1, found
    for word in words:
        assert word in found[0], found[0]
    assert f"warning: {found[0]}" in str(result)


def test_without_backward_nothing_trained():
    result = compare(lambda wrap: broken(wrap, backward=False))
    only(result, "no parameter changed under default, foreach=True, fused=True, backward")
    assert result["default"].trained is result["forward fusion"].trained is False
    assert result["no optimizer"].trained is None


def test_without_step_nothing_trained():
    stock = {name: wrap for name, wrap in VARIANTS.items() if "backward" not in name}
    only(compare(lambda wrap: broken(wrap, step=False), variants=stock), "no parameter changed")


def test_an_iteration_that_steps_the_optimizer_it_gave_to_wrap():
    result = compare(lambda wrap: broken(wrap, use=False), variants=TWO)
    only(result, "never called under no optimizer", "what wrap() returned")
    assert result["default"].trained is True


def test_training_that_begins_after_the_warm_up_is_training():
    """The learning rate is still 0 then."""

    def late(wrap):
        iteration = build(lambda optimizer: late.optimizers.append(wrap(optimizer)) or optimizer)
        calls = []

        def counted():
            calls.append(1)
            late.optimizers[-1].param_groups[0]["lr"] = 0.0 if len(calls) < 4 else 0.1
            return iteration()

        return counted

    late.optimizers = []
    result = compare(late, variants={"default": VARIANTS["default"]}, warmup=2)
    assert result["default"].trained is True
    assert not [text for text in result.warnings if "step()" in text]


def test_training_as_it_should_be_has_no_such_warning():
    result = compare(build)
    assert not [text for text in result.warnings if "step()" in text]
    assert {row.name: row.trained for row in result.rows} == {
        name: None if name == "no optimizer" else True for name in VARIANTS
    }


# Intervals


def row(name, low, high):
    """A row whose rounds were as often `low` as `high` times as fast as the baseline."""
    speeds = [low, high] * 20
    return Row(name, speed=median_interval(speeds[:-1]))


def test_an_interval_from_a_loss_to_a_gain_says_nothing():
    known = [row("gain", 1.2, 2.0), row("loss", 0.3, 0.8), row("narrow", 0.92, 1.2)]
    known += [row("narrow too", 0.5, 1.08), Row("left out", note="refused")]
    assert list(undecided(known, rounds=39, fewest=5)) == []
    (text,) = undecided([*known, row("unknown", 0.85, 1.15)], rounds=39, fewest=5)
    assert "unknown" in text and "0.9" in text and "1.1" in text and "gain" not in text


def test_a_few_rounds_are_no_interval():
    """One round has an interval of no width, which looks exact."""
    for rounds, wanted in ((1, True), (4, True), (5, False)):
        found = compare(variants=TWO, rounds=rounds, iterations=1).warnings
        assert any(f"rounds={rounds} is too few" in text for text in found) is wanted, rounds


# The reference


def compared_with(make, **options):
    result = compare(lambda wrap: build(wrap, make, **options))
    assert result["default"].equal_bits is not None
    for name in ("backward fusion", "forward fusion"):
        assert result[name].equal_bits is True, name
    assert ("reference: the flags" in str(result)) is (result.reference == "reference")
    return result.reference


def test_the_reference_is_the_implementation_whose_bits_fusion_has():
    """As written, what bits are compared with, and fusion stand beside each other."""
    assert compared_with(torch.optim.AdamW) == "fused=True"
    assert compared_with(torch.optim.RMSprop) == "default"
    assert compared_with(torch.optim.RMSprop, foreach=True) == "reference"
    assert compared_with(torch.optim.RMSprop, foreach=False) == "default"
    assert compared_with(torch.optim.Adafactor) == "default"
    assert compared_with(optfuse.optim.Lion) == "default"


class OfAdamW(torch.optim.AdamW):
    """Has a fused=True, but its own step() is what fusion runs."""


@pytest.mark.parametrize("make", (OfAdamW, Tensors))
def test_the_reference_of_a_registered_class_is_the_class_as_written(make):
    optfuse.register(make)
    try:
        assert compared_with(make) == "default"
    finally:
        if make is OfAdamW:
            optfuse.register(make, per_parameter=False)


def test_one_optimizer_with_fused_and_one_without():
    seen = []

    def two(wrap):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        first = wrap(torch.optim.AdamW(model[0].parameters()))
        second = wrap(torch.optim.RMSprop(model[1].parameters(), foreach=True))
        seen.append(
            [o.param_groups[0].get("fused", o.defaults["foreach"]) for o in (first, second)]
        )

        def iteration():
            for optimizer in (first, second):
                optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            for optimizer in (first, second):
                optimizer.step()

        return iteration

    result = compare(two)
    assert result.reference == "reference"
    assert [True, False] in seen, "no variant had the flags of both"
    for name in ("backward fusion", "forward fusion"):
        assert result[name].equal_bits is True, name


# The legend


def judged(name, **found):
    return Row(name, ms=median_interval([1.0]), **found)


def test_differ_is_explained_where_it_stands():
    equal, other = judged("fused=True", equal_bits=True), judged("default", equal_bits=False)
    table = str(Comparison([equal, other], "fused=True", "fused=True", steps=3, settings={}))
    assert "differ: at the end some weight has other bits than under fused=True" in table
    assert "default: the optimizer as written" in table
    table = str(Comparison([equal], "fused=True", "fused=True", steps=3, settings={}))
    assert "differ:" not in table and "default:" not in table


# Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_line_says_where_it_is(monkeypatch):
    """And nothing of it is left behind."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    compare(rounds=5, iterations=1)
    shown = sys.stderr.getvalue()
    lines = [line for line in shown.split("\r\x1b[K") if line]
    assert lines[0] == "optfuse.ab: warm-up of no optimizer", lines
    assert [line.split(",")[0] for line in lines[-5:]] == [
        f"optfuse.ab: round {i} of 5" for i in range(1, 6)
    ]
    assert shown.endswith("\r\x1b[K") and "\n" not in shown


def test_the_line_is_taken_away_by_an_error_too(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())

    def failing(wrap):
        iteration = build(wrap)
        calls = []

        def fails():
            calls.append(iteration())
            assert len(calls) < 4, "the user's own"

        return fails

    with pytest.raises(AssertionError, match="the user's own"):
        compare(failing, variants=TWO)
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


def test_in_a_log_nothing_is_shown_in_the_first_seconds(capfd):
    compare(variants=TWO)
    assert capfd.readouterr() == ("", "")


def test_a_log_has_a_line_every_ten_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    shown = progress.Progress(None)
    for second in range(35):
        clock[0] = float(second)
        shown.show(f"at {second}")
        shown.tick()
    shown.clear()
    lines = sys.stderr.getvalue().splitlines()
    assert lines == [f"at {s} (after {s} s)" for s in (10, 20, 30)]


# Page faults


def test_page_faults_are_named_above_five_percent():
    rows = [Row("default", fault_share=0.37), Row("forward fusion", fault_share=0.2), Row("x")]
    (text,) = in_page_faults(rows)
    assert text.startswith("page faults take about 37% of the processor's time under default")
    assert "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296" in text
    assert "optfuse.keep_memory()" in text
    assert not [*in_page_faults([Row("default", fault_share=0.049), Row("x")])]


def test_the_share_is_bounded_by_the_time_in_the_kernel(monkeypatch):
    monkeypatch.setattr(page_faults, "seconds_a_fault", lambda: 1e-6)
    assert page_faults.share(page_faults.Usage(1e6, 10.0, 4.0)) == pytest.approx(0.1)
    assert page_faults.share(page_faults.Usage(1e6, 10.0, 0.5)) == pytest.approx(0.05)
    assert page_faults.share(page_faults.Usage()) == 0.0


def test_fresh_memory_has_page_faults_and_kept_memory_has_none():
    assert 1e-8 < page_faults.seconds_a_fault() < 1e-3
    fresh, kept = page_faults.Usage(), page_faults.Usage()
    before = page_faults.Usage.now()
    memory = bytearray(64 << 20)
    fresh.add_since(before)
    before = page_faults.Usage.now()
    memory[::4096] = b"x" * len(memory[::4096])
    kept.add_since(before)
    assert fresh.faults > 10 * max(kept.faults, 1)


def test_a_function_of_the_caller_hears_of_each_round():
    heard = []
    compare(variants=TWO, rounds=3, progress=heard.append)
    assert heard == [f"round {i} of 3" for i in (1, 2, 3)]


# Mistakes in build_fn


MISTAKES = {
    "wrap gets parameters": (
        lambda wrap: wrap(list(nn.Linear(2, 2).parameters())), "wrap() got optimizer=["
    ),
    "it takes nothing": (lambda: None, "build_fn=", "one argument, wrap; this one has too many"),
    "the iteration was called": (
        lambda wrap: build(wrap)(), "build_fn(wrap)", "without calling it"
    ),
    "nothing is returned": (lambda wrap: None if build(wrap) else 1, "build_fn(wrap)=None"),
    "one loss for each element": (
        lambda wrap: build(wrap) and (lambda: torch.ones(4)), "loss=<Tensor of shape (4,)>"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_build_fn_is_named(name):
    mistaken, *words = MISTAKES[name]
    refused(lambda: compare(mistaken), *words, way_out=" must be ")


def test_a_variant_that_returns_nothing():
    refused(
        lambda: compare(variants={"mine": lambda o: None}), "variants['mine']", way_out="return"
    )


def test_a_row_that_does_not_exist_is_a_key_error():
    result = Comparison([judged("default")], "default", "default", steps=1, settings={})
    with pytest.raises(KeyError, match="forward"):
        result["forward"]


def test_numpys_random_numbers_are_the_same_for_every_variant():
    def drawing(wrap):
        model = nn.Linear(4, 2)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), fused=True))

        def iteration():
            optimizer.zero_grad()
            x = torch.from_numpy(np.random.standard_normal((3, 4)).astype(np.float32))
            loss = model(x * random.random()).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        return iteration

    np.random.seed(3)
    wanted = np.random.random()
    np.random.seed(3)
    result = compare(drawing)
    assert np.random.random() == wanted, "the caller's random numbers were not kept"
    assert len({tuple(result[name].losses) for name in ("default", "fused=True")}) == 1
    assert result["default"].equal_bits is True


def test_complex_parameters_are_compared():
    def complex_model(wrap):
        weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        optimizer = wrap(torch.optim.Adam([weight]))

        def iteration():
            optimizer.zero_grad()
            weight.abs().sum().backward()
            optimizer.step()

        return iteration

    stock = {name: VARIANTS[name] for name in ("default", "foreach=True")}
    result = compare(complex_model, variants=stock)
    assert result["default"].trained is True and result["default"].max_difference == 0.0
    assert not math.isnan(result["foreach=True"].max_difference)
