# SPDX-License-Identifier: BSD-3-Clause
"""Foundations of the benchmark's figures: the no-math kernel moves every byte it is said to move,
and computations from times find the effects that were planted in them."""

import ctypes
import json
import os
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import forked_python
import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def benchmarks():
    """Lets the benchmark's modules be imported, with the build that tests/run made."""
    with pytest.MonkeyPatch.context() as patch:
        if "OPTFUSE_BUILD" not in os.environ:
            patch.setenv("OPTFUSE_BUILD", str(Path(sys.prefix) / "build"))
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


@pytest.fixture
def mix(benchmarks):
    """The mask under which the gradient's bits are mixed into what the floor writes."""
    import bytes_alone

    if not bytes_alone.path().exists():
        pytest.skip("libbytes_alone.so is not built")
    mask = ctypes.c_int.in_dll(ctypes.CDLL(str(bytes_alone.path())), "moves_mix")
    yield mask
    mask.value = 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("elements", [16, 16 * 37, 100_000])
def test_the_floor_reads_and_writes_every_byte(mix, optimizer, elements, threads):
    import bytes_alone

    run, gradient, written = bytes_alone.one_tensor(optimizer, elements, torch.float32)
    assert gradient.numel() == elements and len(written) == bytes_alone.WRITTEN[optimizer]
    for array in (gradient, *written):
        array.view(torch.uint8).random_()
    before = [array.view(torch.int32).clone() for array in (gradient, *written)]
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    mix.value = -1
    run()
    torch.set_num_threads(torch_threads)
    assert torch.equal(gradient.view(torch.int32), before[0])
    for array, old in zip(written, before[1:], strict=True):
        assert torch.equal(array.view(torch.int32), old ^ before[0])


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("where", ["InBackward", "InForward"])
def test_bytes_alone_are_all_moved(mix, several_threads, where, optimizer):
    """Mixed with the gradient's bits they show that they were; in a benchmark they stay."""
    import bytes_alone

    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4992))
    params = list(model.parameters())
    made: list[torch.Tensor] = []
    with patch("torch.zeros_like", side_effect=lambda p: made.append(p.detach() * 2) or made[-1]):
        floor = getattr(bytes_alone, where)(torch.optim.SGD(params), name=optimizer)
    n_state = {"adamw": 2, "momentum": 1, "sgd": 0}[optimizer]
    assert len(made) == n_state * len(params)
    arrays = [[p.detach(), *made[i * n_state :][:n_state]] for i, p in enumerate(params)]
    grads: dict[torch.Tensor, torch.Tensor] = {}
    for p in params:
        p.register_hook(lambda g, p=p: grads.update({p: g.clone()}))
    for bits in (0, *[-1] * 9):  # with three threads InBackward tries both kinds of stores
        before = [[array.clone() for array in some] for some in arrays]
        try:
            mix.value = bits
            model(torch.randn(3, 64)).square().sum().backward()
            assert all((p.grad is None) == (where == "InBackward") for p in params)
            floor.step()
            floor.zero_grad()
            if where == "InForward":
                first, was = arrays[0][0], before[0][0]
                assert torch.equal(first.view(torch.int32), was.view(torch.int32)), "not yet used"
            with torch.no_grad():
                model(torch.randn(3, 64))
        finally:
            mix.value = 0
        for p, some, old in zip(params, arrays, before, strict=True):
            x = grads[p].view(torch.int32) & bits
            for array, was in zip(some, old, strict=True):
                assert torch.equal(array.view(torch.int32), was.view(torch.int32) ^ x)


def test_bytes_a_parameter(benchmarks):
    from bytes_alone import bytes_each

    assert [bytes_each(name) for name in ("adamw", "momentum", "sgd")] == [28, 20, 12]
    assert bytes_each("adamw", element=2) == 14


def noisy(middle: float, seed: int) -> list[float]:
    noise = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    return (middle + 0.1 * noise).tolist()


def test_recovered_share_is_the_planted_one(benchmarks):
    from figures import share

    found = share(noisy(30, 0), noisy(24, 1), noisy(20, 2))
    assert found is not None and found.low < 0.6 < found.high, found
    assert found.high - found.low < 0.05, found


def test_no_share_of_a_cost_that_may_be_nothing(benchmarks):
    from figures import share

    assert share(noisy(20, 0), noisy(19, 1), noisy(20, 2)) is None
    assert share(noisy(19, 0), noisy(18, 1), noisy(20, 2)) is None, "stock is faster than none"


def test_optimizer_and_rest_make_the_iteration(benchmarks):
    from figures import lines

    from optfuse_tools.ab.result import Comparison, Row, median_interval

    times = {"no optimizer": noisy(20, 0), "fused=True": noisy(30, 1)}
    times["backward fusion"] = noisy(22, 2)
    rows = [Row(name, ms=median_interval(ms), rounds_ms=ms) for name, ms in times.items()]
    compared = Comparison(rows, "fused=True", "fused=True", steps=0, settings={})
    none, stock, backward = lines(compared, range(40))
    assert none.cost_ms is None
    assert stock.cost_ms.median == pytest.approx(10, abs=0.2)
    assert stock.cost_ms.median / stock.ms.median == pytest.approx(1 / 3, abs=0.02)
    assert backward.cost_ms.median == pytest.approx(2, abs=0.2)
    assert backward.recovered.median == pytest.approx(0.8, abs=0.02)


# As callgrind writes it: f takes 10 itself and calls g twice and, in another object, h once;
# g calls h, too.
CALLGRIND = """version: 1
desc: Trigger: Client Request: flush

ob=(1) /lib/one.so
fl=(1) one.c
fn=(1) f
1 4
+1 6
cfn=(2) g
calls=2 7
* 50
cob=(2) /lib/two.so
cfi=(2) two.c
cfn=(3) h
calls=1 9
+2 20

fn=(2)
7 30
cob=(2)
cfn=(3)
calls=2 9
7 20

ob=(2)
fl=(2)
fn=(3)
9 40

totals: 80
"""


def test_what_callgrind_counted_is_read(benchmarks):
    import launch

    counts = launch.read(iter(CALLGRIND.splitlines(keepends=True)))
    assert counts.title == "flush" and counts.total() == 80
    assert counts.own == {("one.so", "f"): 10, ("one.so", "g"): 30, ("two.so", "h"): 40}
    assert counts.without(lambda function: function[1] == "h") == 40
    assert counts.without(lambda function: function[1] in "gh") == 10
    assert counts.calls_of("h") == 3 and counts.calls_of("g") == 2


def test_instructions_are_subtracted(benchmarks):
    import launch

    names = {name for part in launch.PARTS for name in part.names}
    counts = {one.what: one.instructions for one in launch.counts(dict.fromkeys(names, 100.0))}
    assert counts["gradient hook, with the update"] == 0
    assert counts["gradient hook, above the update"] == -100
    assert counts["step() in forward mode, in C"] == 100


def test_budgets_are_shares_of_stocks_step_in_the_same_run(benchmarks):
    import launch

    names = {name for part in launch.PARTS for name in part.names}
    found = dict.fromkeys(names, 0.0) | {launch.WHOLE: 20_000.0, "step in C": 938.0}
    for machine in (1.0, 1.3):  # another compiler, another processor's library
        counts = launch.counts({name: machine * n for name, n in found.items()})
        cells = {one.what: one.cells() for one in counts}
        row = cells["step() in forward mode, in C"]
        assert row[1:] == (f"{machine * 938:,.0f}", "4.7 %", "4.7 %", "within")
        assert cells["step() of fused=True, with the update"][2:] == ("100 %", "", "")
    (over,) = (one for one in launch.counts(found | {"step in C": 942.0}) if "in C" in one.what)
    assert over.cells()[-1] == "OVER"


def test_host_work_is_that_above_no_optimizer(benchmarks):
    import launch
    from launch import Counts

    f, played = ("one.so", "f"), (launch.PLAYED, "x")
    found = {
        f"{phase}, {way}": Counts("", Counter({f: 100, played: 50}), Counter({(f, played): 50}))
        for phase in launch.PHASES
        for way in (launch.STOCK, *launch.WAYS)
    }
    found["use, forward fusion"].own[f] += 30
    found["use, forward fusion"].calls[f, ("two.so", launch.LAUNCHES)] = 3
    stock, forward, *_ = launch.host_work(found, 10)
    assert stock.instructions == {"backward": 0, "step": 10, "use": 0, "use again": 0}
    assert forward.instructions == {"backward": 0, "step": 10, "use": 3, "use again": 0}
    assert (stock.launches, forward.launches) == (0, 3)


def test_the_stored_counts_are_within_todays_budgets(benchmarks):
    import launch

    stored = json.loads((ROOT / "benchmarks" / "results" / "launch-adamw.json").read_text("utf-8"))
    shares = {count["what"]: count["share"] for count in stored["counts"]}
    for part in launch.PARTS:
        assert part.budget is None or shares[part.what] <= part.budget, part.what


def test_what_cant_be_written_is_printed(benchmarks, capsys):
    import bench

    assert not bench.write("what was measured", Path("/dev/full"))
    assert "No space left on device" in (said := capsys.readouterr().out) and "was meas" in said


@pytest.mark.slow
def test_a_benchmark_that_cant_write_prints_its_summaries_and_raw_rounds(benchmarks):
    program = ROOT / "benchmarks" / "bench.py"
    options = ["--smoke", "--section", "cells", "--rounds", "2", "--threads", "1"]
    options += ["--out", "/proc/nowhere", "--raw", "/dev/full"]
    asked = forked_python.started([program, *options], ROOT, dict(os.environ))
    done = forked_python.run(asked, timeout=600)
    assert done.returncode == 1 and "error: not all could be written" in done.stderr
    summary, raw = done.stdout.split("can't be written (")[1:]
    assert summary.startswith("No such file or directory") and '"against_fused"' in summary
    assert raw.startswith("No space left on device") and '"rounds_ms"' in raw
