# SPDX-License-Identifier: BSD-3-Clause
"""The section "distributed" of the benchmark: its link takes the time that it is said to take,
asleep, and what is computed from times finds what was planted in them."""

import time
from dataclasses import asdict, replace

import pytest
import torch

MESSAGES = 4
TAKES = 0.25  # seconds for a message: more than a busy machine makes a process wait


@pytest.fixture
def link(benchmarks, gloo):
    """A process group of this process alone, so that reducing takes no time."""
    from link import Link, Network

    link = Link(Network(1e3 * TAKES / 2, 1e3 * TAKES / 2 / 0.2))
    yield link
    link.close()


def message():
    return torch.ones(50_000)  # 0.2 MB


def test_messages_take_their_time_one_after_the_other(link):
    began, busy = time.perf_counter(), time.process_time()
    futures = [link.mean(message()) for _ in range(MESSAGES)]
    arrivals = []
    for future in futures:
        assert torch.equal(future.wait(), message())
        arrivals.append(time.perf_counter() - began)
    for i, arrival in enumerate(arrivals):
        assert TAKES * (i + 1) <= arrival < TAKES * (i + 1) + 1, f"message {i}: {arrival:.3f} s"
    assert time.process_time() - busy < 0.5 * arrivals[-1], "it did not sleep"


def test_what_a_message_starts_holds_up_no_other_one(link):
    began = time.perf_counter()
    first = link.mean(message()).then(lambda _: time.sleep(5 * TAKES))
    for future in [link.mean(message()) for _ in range(5)]:
        future.wait()
    first.wait()
    took = (time.perf_counter() - began) / TAKES
    assert 6 <= took < 6 + 4, "messages wait: 6 + 5"


def test_without_a_delay_messages_take_only_what_gloo_does(link):
    link.is_slow = False
    began = time.perf_counter()
    for future in [link.mean(message()) for _ in range(MESSAGES)]:
        future.wait()
    assert time.perf_counter() - began < MESSAGES * TAKES


@pytest.mark.slow
def test_two_processes_train_with_stock_s_bits_behind_the_link(forked_ranks):
    import distributed
    from distributed import DDP_VARIANTS, SMOKE, figures
    from link import Network
    from two_processes import pair

    network = {"latency_ms": 0.1, "ms_per_mb": 1.0}
    options = {"optimizer": "adamw", "seconds": 0.0, "rounds": 2, "network": network}
    found = pair(distributed.__file__, "DDP", "DDP", asdict(SMOKE), options)
    assert found["equal_bits"] and len(found["buckets"]) >= 8
    assert sum(found["buckets"]) == 4 * found["parameters"]
    one = figures(SMOKE, "DDP", Network(**network), found)
    assert one.rounds == 2 and tuple(line.name for line in one.lines) == DDP_VARIANTS


def noisy(middle, seed):
    generator = torch.Generator().manual_seed(seed)
    return (middle + 0.1 * torch.randn(40, generator=generator)).tolist()


def planted(ours, none=40.0):
    """20 ms of an iteration are computing, the rest is waiting; fused=True costs 10 ms."""
    from distributed import DDP_VARIANTS, FAST, FUSED, NONE, SMOKE, figures
    from link import Network

    times = {FAST: 20.0, NONE: none, FUSED: none + 10.0, **ours}
    names = [name for name in DDP_VARIANTS if name in times]
    rounds = {name: noisy(times[name], i) for i, name in enumerate(names)}
    found = {"rounds_ms": rounds, "equal_bits": True, "parameters": 1000}
    return figures(SMOKE, "DDP", Network(0.1, 1.0), {**found, "buckets": [400, 400, 200]})


def test_figures_are_the_planted_ones(benchmarks):
    one = planted({"backward fusion": 42.0, "forward fusion": 48.0})
    assert one.exposed.low < 0.5 < one.exposed.high and one.is_behind()
    assert one.last_bucket == 0.2 and one.buckets == 3
    lines = {line.name: line for line in one.lines}
    assert lines["backward fusion"].recovered.median == pytest.approx(0.8, abs=0.02)
    assert lines["forward fusion"].recovered.median == pytest.approx(0.2, abs=0.02)
    assert lines["fused=True"].cost_ms.median == pytest.approx(10, abs=0.2)
    assert lines["backward fusion"].against_fused.median == pytest.approx(50 / 42, abs=0.01)


def test_the_verdict_leaves_out_what_can_not_hide_and_cells_that_do_not_wait(benchmarks):
    from distributed import verdict

    ours = {"backward fusion": 42.0, "forward fusion": 48.0}
    waits, computes = planted(ours), planted(dict.fromkeys(ours, 30.0), none=21.0)
    assert not computes.is_behind()
    assert "(1 of 2 cells) recovers 1.00 of" in verdict([waits, computes], "backward fusion")
    assert "recovers 0.25 of" in verdict([waits, computes], "forward fusion")
    assert "costs nothing" in verdict([computes], "forward fusion")


def test_bits_that_differ_are_said(benchmarks):
    from distributed import described

    one = planted({"backward fusion": 42.0, "forward fusion": 48.0})
    assert "BITS DIFFER" not in described(one)
    assert "BITS DIFFER" in described(replace(one, equal_bits=False))
