# SPDX-License-Identifier: BSD-3-Clause
"""The section "kfac" of the benchmark: its process groups take the time that they are said to
take, and what is computed from times finds what was planted in them."""

import time

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def slow(benchmarks, tmp_path, monkeypatch):
    """A group of this process alone, which is not torch's."""
    from link import Network
    from slow_group import SlowGroup, _make

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(SlowGroup, "network", Network(1e3 * TAKES / 2, 1e3 * TAKES / 2 / 0.2))
    monkeypatch.setattr(SlowGroup, "made", [])
    store = dist.FileStore(str(tmp_path / "store"), 1)
    group = _make(store, 0, 1, dist.default_pg_timeout)
    yield group
    group.link.close()


TAKES = 0.25  # seconds for a message: more than a busy machine makes a process wait


def message():
    return [torch.ones(50_000)]  # 0.2 MB


def test_collectives_of_a_group_take_their_time_one_after_the_other(slow):
    began, busy = time.perf_counter(), time.process_time()
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    gathered = [[torch.zeros(50_000)]]
    works = [
        slow.allreduce(message(), None),
        slow.broadcast(message(), options),
        slow.allgather(gathered, message(), dist.distributed_c10d.AllgatherOptions()),
    ]
    assert time.perf_counter() - began < TAKES, "starting a message waits for it"
    for i, work in enumerate(works):
        work.wait()
        arrival = time.perf_counter() - began
        assert TAKES * (i + 1) <= arrival < TAKES * (i + 1) + 1, f"message {i}: {arrival:.3f} s"
    assert time.process_time() - busy < 0.5 * arrival, "it did not sleep"
    assert torch.equal(gathered[0][0], message()[0])
    assert len(slow.link.log) == 3


def test_without_a_delay_collectives_take_only_what_gloo_does(slow):
    slow.link.is_slow = False
    began = time.perf_counter()
    for _ in range(4):
        slow.allreduce(message(), None).wait()
    assert time.perf_counter() - began < 4 * TAKES


def planted(waits):
    """Two layers with factors of 2 x 2 to 5 x 5, ready at 10, 20, 30 and 40 ms; step() begins at
    41. The link takes 5 ms a message."""
    names = ("each", "all", "planned")
    return {
        "rounds": 2,
        "sizes": [2, 3, 4, 5],
        "order": dict.fromkeys(names, [0, 2, 3, 1]),
        "group": {"each": [0, 1, 2, 3], "all": [0, 0, 0, 0], "planned": [0, 0, 0, 1]},
        "slow": {name: [100.0 + waits[name]] * 4 for name in names},
        "fast": {name: [100.0] * 4 for name in names},
        "waited": {name: [waits[name]] * 4 for name in names},
        "ready": {"each": [41.0, 10.0, 20.0, 30.0, 40.0]},
    }


def test_figures_are_the_planted_ones(benchmarks):
    from kfac import figures, table
    from link import Network

    found = planted({"each": 9.0, "all": 9.5, "planned": 30.0})
    one = figures("exposure", "", Network(5.0, 0.0), found)
    lines = {line.name: line for line in one.lines}
    assert [line.messages for line in one.lines] == [4, 1, 2]
    assert one.on_the_link_ms == pytest.approx(5)
    for name, ms in (("each", 9.0), ("all", 9.5), ("planned", 30.0)):
        assert lines[name].exposed_ms.median == pytest.approx(ms)
        assert lines[name].waited_ms.median == pytest.approx(ms)
        # The last message ends at 45 ms, and then 5 ms for how many rows there were.
        assert lines[name].simulated_ms == pytest.approx(4 + 5)
    said = table(one).splitlines()
    assert "differs" not in said[1] and "9.0 differs differs" in said[3]


def test_another_order_of_messages_is_not_simulated(benchmarks):
    from kfac import figures
    from link import Network

    found = planted({"each": 9.0, "all": 9.5, "planned": 30.0})
    found["order"]["planned"] = [0, 2, 1, 3]
    with pytest.raises(RuntimeError, match="planned sends factors in another order"):
        figures("exposure", "", Network(5.0, 0.0), found)


def test_resnet_50_of_the_simulation_is_that_of_the_paper(benchmarks):
    from kfac_shapes import EVERYWHERE_BELOW, SCHEMES, packed, resnet50, simulated

    layers = resnet50()
    # 1,000 more for the bias of the last layer.
    assert len(layers) == 54 and sum(la.work for la in layers) == 4_089_184_256 + 1000
    assert sum(packed(la.inputs) for la in layers) == 62_348_671
    assert sum(packed(la.outputs) for la in layers) == 14_618_356
    sizes = [d for la in layers for d in (la.inputs, la.outputs)]
    assert max(sizes) == 4608 and sum(d >= EVERYWHERE_BELOW for d in sizes) == 34
    found = simulated()
    exposed = found["exposed_factors_s"]
    assert all(exposed["planned"][n] <= min(of[n] for of in exposed.values()) for n in (0, 1))
    for line, scheme in zip(found["schemes"], SCHEMES.values(), strict=True):
        assert sum(scheme.paper[:2]) + 0.4083 == pytest.approx(scheme.paper[2], abs=2e-4)
        assert line["simulated_s"][2] == pytest.approx(sum(line["simulated_s"][:2]) + 0.4083)


@pytest.mark.slow
def test_two_processes_train_behind_the_link(forked_ranks):
    import kfac_rank
    from kfac import figures
    from link import Network
    from two_processes import pair

    network = {"latency_ms": 1.0, "ms_per_mb": 0.0}
    options = {"seconds": 0.0, "rounds": 1, "network": network}
    options["stack"] = {"image": 8, "wide": 16, "narrow": 8, "bottlenecks": 6}
    found = pair(kfac_rank.__file__, "schemes", "schemes", options)
    one = figures("schemes", "", Network(**network), found)
    assert [line.name for line in one.lines] == list(kfac_rank.SCHEMES)
    waits = [line.waited_ms.median for line in one.lines]
    assert min(waits) >= 0 and max(waits) >= 1, f"{waits}: a busy machine may hide some"
