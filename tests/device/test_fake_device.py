# SPDX-License-Identifier: BSD-3-Clause
"""The fake GPU itself: it computes what the CPU computes, and it finds what a
program leaves open between streams."""

import gpu
import pytest
import torch
from common import assert_same
from gpu import NAME
from torch import nn

BYTES = 4000


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(200, 10),
    )


class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.wide = nn.Sequential(*wide)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.project(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 3).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.between(x))


def transformer():
    return nn.Sequential(nn.Embedding(50, 32), Block(), Block(), nn.Linear(32, 50))


def images():
    return torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,))


def words():
    return torch.randint(0, 50, (3, 7)), torch.randint(0, 50, (3, 7))


def trained(device, build, batch):
    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(4):
        x, y = (part.to(device) for part in batch())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.usefixtures("rounds_as_cpu")
@pytest.mark.parametrize(("build", "batch"), [(conv_net, images), (transformer, words)])
def test_training_gives_the_bits_of_the_cpu(build, batch):
    assert_same("weights", trained(NAME, build, batch), trained("cpu", build, batch))


def test_operators_of_every_kind_give_what_the_cpu_gives():
    def script(device):
        x = torch.arange(24.0, device=device).view(2, 3, 4)
        y = torch.empty(0, device=device)
        torch.add(x, 1, out=y)  # out= of another size
        x[:, 1].mul_(2)  # in place through a view
        yield "in place", x
        yield "out=", y
        yield "chosen", x[x > 20]
        yield "reduced", torch.stack([x.sum(), x.max(), x.double().var()])
        yield "sorted", x.flatten().sort(descending=True).indices
        yield "list", torch.cat(torch._foreach_mul([x, y], 3.0))
        torch._foreach_add_([x, y], [y, x])
        yield "list in place", x
        other = torch.empty(0, device=device).set_(x)
        yield "set_", other.resize_(5)
        yield "made", torch.eye(3, device=device)
        yield "moved", x.to(torch.float16).transpose(0, 2)
        yield "norm", torch.linalg.vector_norm(x)

    for (name, ours), (_, stock) in zip(script(NAME), script("cpu"), strict=True):
        assert_same(name, ours.cpu(), stock)


def test_a_number_and_a_comparison_reach_the_host():
    x = torch.full((3,), 2.0, device=f"{NAME}:1")
    assert x.sum().item() == 6 and torch.equal(x, x.clone()) and x.device.index == 1


def test_memory_is_given_back():
    before = gpu.bytes_in_use()
    x = torch.empty(1000, device=NAME)
    assert gpu.bytes_in_use() > before
    del x
    assert gpu.bytes_in_use() == before


# Orders that are left open between streams


@pytest.fixture
def streams():
    return gpu.stream(), gpu.stream()


@pytest.fixture
def x():
    tensor = torch.ones(BYTES // 4, device=NAME)
    gpu.synchronize()
    return tensor


def expect_race(*words):
    found = gpu.races()
    assert len(found) == 1, f"one race was expected, not {found}"
    for word in words:
        assert word in found[0], f"{word!r} is not in: {found[0]}"
    gpu.clear()


def test_a_write_and_a_read_on_two_streams_are_a_race(streams, x):
    with streams[0]:
        x.add_(1)
    with streams[1]:
        x.mul(2)
    expect_race("aten::mul", "aten::add", "reads", "writes")


def test_two_writes_on_two_streams_are_a_race(streams, x):
    for stream in streams:
        with stream:
            x.add_(1)
    found = gpu.races()
    assert found and all("aten::add" in text for text in found)
    gpu.clear()


def test_two_reads_are_none(streams, x):
    for stream in streams:
        with stream:
            x.mul(2)


def test_disjoint_parts_of_one_storage_are_none(streams, x):
    halves = x.chunk(2)
    for stream, half in zip(streams, halves, strict=True):
        with stream:
            half.zero_()


def test_a_waiting_stream_is_in_order(streams, x):
    a, b = streams
    with a:
        x.add_(1)
    b.wait_stream(a)
    with b:
        x.mul(2)


def test_an_event_covers_only_what_was_launched_before_it(streams, x):
    a, b = streams
    with a:
        event = a.record_event()
        x.add_(1)
    b.wait_event(event)
    with b:
        x.mul(2)
    expect_race("aten::mul", "aten::add")


def test_a_waiting_host_puts_everything_in_order(streams, x):
    a, b = streams
    with a:
        x.add_(1)
    a.synchronize()
    with b:
        x.mul(2)


def test_a_copy_to_the_host_waits_for_its_own_stream_only(streams, x):
    a, b = streams
    with a:
        x.add_(1)
    with b:
        y = torch.ones(3, device=NAME).cpu()
        assert y.sum() == 3
        x.mul(2)
    expect_race("aten::mul", "aten::add")


def test_memory_freed_while_another_stream_uses_it_is_a_race(streams):
    a, b = streams
    with a:
        x = torch.ones(BYTES, device=NAME)
    b.wait_stream(a)
    with b:
        x.mul(2)
    del x
    expect_race("freed", "aten::mul", "record_stream")


def test_recorded_memory_is_not_used_again_before_that_stream_is_done(streams):
    a, b = streams
    with a:
        x = torch.ones(BYTES, device=NAME)
        address = x.data_ptr()
    b.wait_stream(a)
    with b:
        x.mul(2)
    x.record_stream(b)
    del x
    with a:
        held = torch.empty(BYTES, device=NAME)
        assert held.data_ptr() != address
        b.synchronize()
        assert torch.empty(BYTES, device=NAME).data_ptr() == address


def test_memory_freed_on_its_own_stream_is_used_again_at_once(streams):
    with streams[0]:
        x = torch.ones(BYTES, device=NAME)
        address = x.data_ptr()
        del x
        assert torch.zeros(BYTES, device=NAME).data_ptr() == address


def test_backward_runs_on_the_streams_of_forward(streams):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(NAME)
    x = torch.randn(3, 8).to(NAME)
    streams[0].wait_stream(gpu.current())
    with streams[0]:
        loss = model(x).sum()
    loss.backward()  # the engine joins the streams at its end
    assert model.weight.grad.add(1).isfinite().all().item()


def test_an_event_is_done_when_the_host_knows_it(streams, x):
    with streams[0]:
        x.add_(1)
        event = streams[0].record_event()
    assert not event.query()
    streams[0].synchronize()
    assert event.query()


def test_a_stream_that_waits_for_a_capture_is_captured_and_has_to_be_waited_for(streams, x):
    a, b = streams
    with gpu.captured(a):
        y = x + 1
        b.wait_stream(a)
        with b:
            z = y * 2
    (race,) = gpu.races()
    assert "has not waited for" in race
    gpu.settle()
    with gpu.captured(a):
        b.wait_stream(a)
        with b:
            z.mul_(2)
        a.wait_stream(b)
    assert not gpu.races()
    gpu.synchronize()


replayed = pytest.mark.skipif(not gpu.REPLAYS, reason="no graph of this torch can be played")


@replayed
def test_a_graph_runs_in_its_replays_and_not_before():
    x, seen = torch.zeros(4, device=NAME), []

    def work():
        seen.append(nn.functional.linear(x, x.expand(4, 4)))  # views, and memory of its own
        x.add_(1)

    graph = gpu.graph_of(work)
    assert x.cpu().eq(0).all() and not seen[0].cpu().eq(0).any()  # there is nothing yet
    for i in range(4):
        graph.replay()
        assert seen[0].cpu().eq(4 * i * i).all() and x.cpu().eq(i + 1).all()


@replayed
def test_a_graph_reads_memory_that_is_free_where_its_input_is_gone():
    inputs = [torch.ones(4, device=NAME)]
    graph = gpu.graph_of(lambda: inputs[0].mul_(2))
    gpu.settle()
    inputs.clear()
    graph.replay()
    (race, *_) = gpu.races()
    assert "memory that is free" in race
    gpu.clear()


@replayed
@pytest.mark.parametrize("work", [lambda x: x.sum().item(), lambda x: x.copy_(torch.ones(4))])
def test_what_no_graph_can_have_is_refused_in_a_capture(work):
    x = torch.zeros(4, device=NAME)
    with pytest.raises(RuntimeError, match="captur"):
        gpu.graph_of(lambda: work(x))
    gpu.settle()
