# SPDX-License-Identifier: BSD-3-Clause
"""Copies between the played GPU and pinned memory are made when somebody waits for them: a script
that forgets a wait gets other bits, each time it runs."""

import gpu
import pytest
import torch
from common import INTEGER, adamw
from gpu import NAME
from legal import net
from torch import nn

RUNS, N = 20, 1000


@pytest.fixture
def x():
    gpu.only_played()
    tensor = torch.arange(float(N), device=NAME)
    gpu.synchronize()
    return tensor


def pinned(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, pin_memory=True)


def is_pattern(tensor):
    return bool((tensor.view(INTEGER[tensor.element_size()]).to(torch.int8) == -1).all())


@pytest.mark.parametrize("wait", ("stream", "event", "device", "another stream behind it"))
def test_a_copy_down_is_there_when_the_host_has_waited(x, wait):
    stream, other = gpu.stream(), gpu.stream()
    with stream:
        host = x.to("cpu", non_blocking=True)
        event = stream.record_event()
    other.synchronize()
    assert host.is_pinned() and is_pattern(host) and not event.query()
    other.wait_event(event)
    {"stream": stream, "event": event, "device": gpu}.get(wait, other).synchronize()
    assert torch.equal(host, torch.arange(float(N)))


def test_a_copy_up_is_there_for_work_behind_it(x):
    stream, other, y = gpu.stream(), gpu.stream(), torch.zeros_like(x)
    gpu.synchronize()
    with stream:
        y.copy_(pinned(N).add_(3), non_blocking=True)
    early = y + 0
    other.wait_stream(stream)
    with other:
        behind = y + 0
    assert gpu.races()
    gpu.settle()
    assert is_pattern(early.cpu()) and (behind == 3).all()


def test_a_source_changes_what_is_copied_unless_the_change_comes_behind_it(x):
    ahead, behind, freed, up = pinned(N), pinned(N), pinned(N), torch.zeros_like(x)
    with gpu.stream():
        ahead.copy_(x, non_blocking=True)
    behind.copy_(x, non_blocking=True)
    freed.copy_(x + 1, non_blocking=True)
    torch.full_like(x, 5.0)  # in the memory of that sum
    x.zero_()
    up.copy_(behind, non_blocking=True)
    behind.copy_(up + 2, non_blocking=True)
    assert gpu.races()
    gpu.settle()
    numbers = torch.arange(float(N))
    assert (ahead == 0).all() and torch.equal(freed - 1, numbers)
    assert torch.equal(up.cpu(), numbers) and torch.equal(behind - 2, numbers)


def test_pinned_memory_is_given_out_again_when_no_copy_needs_it(x):
    address = pinned(N).copy_(x, non_blocking=True).data_ptr()
    held = pinned(N)
    assert held.data_ptr() != address
    gpu.synchronize()
    assert pinned(N).data_ptr() == address


def test_as_on_cuda_some_copies_are_made_at_once(x):
    narrow = torch.float16
    for target, source, late in (
        (pinned(N, dtype=narrow), x, True),
        (pinned(10, 100), x.view(100, 10).t(), True),
        (pinned(N), x[3], True),
        (torch.zeros(N), x, False),
        (x.to(narrow), pinned(N), False),
        (x, torch.ones(N), False),
    ):
        expected = source.cpu().to(target.dtype, copy=True).expand(target.shape)
        target.copy_(source, non_blocking=True)
        assert is_pattern(target) if late else torch.equal(target.cpu(), expected)
        gpu.synchronize()
        assert torch.equal(target.cpu(), expected)


def trained(seed, late=True, forgotten=None):
    """The bits of bfloat16 weights whose masters are on the CPU. late: copies are made on a stream
    of their own, beside the GPU's work. forgotten: there is no wait before it."""
    torch.manual_seed(seed)
    model, copies = net().to(torch.bfloat16), gpu.stream() if late else gpu.current()
    weights = [w.detach() for w in model.parameters()]
    masters = [nn.Parameter(w.to("cpu", torch.float32)) for w in weights]
    down, up = ([pinned(w.shape, dtype=w.dtype) for w in weights] for _ in range(2))
    if forgotten == "a slot is filled again":
        up = [max(up, key=torch.numel).view(-1)[: w.numel()].view_as(w) for w in weights]
    optimizer = adamw(masters)
    for i in range(3):
        if forgotten != "a weight is used":
            gpu.current().wait_stream(copies)
        model.zero_grad()
        x = torch.full((5, 6), 0.1 * (i + 1), device=NAME, dtype=torch.bfloat16)
        model(x).square().sum().backward()
        copies.wait_stream(gpu.current())
        with copies:
            for slot, w in zip(down, model.parameters(), strict=True):
                slot.copy_(w.grad, non_blocking=late)
        if late and forgotten != "a gradient is read":
            copies.synchronize()
        for m, slot in zip(masters, down, strict=True):
            m.grad = slot.float()
        optimizer.step()
        copies.synchronize()
        for m, slot, w in zip(masters, up, weights, strict=True):
            slot.copy_(m.detach())
            with copies:
                w.copy_(slot, non_blocking=late)
    gpu.synchronize()
    return torch.cat([w.cpu().view(torch.int16).flatten() for w in weights])


@pytest.mark.parametrize(
    "wait", (None, "a gradient is read", "a weight is used", "a slot is filled again")
)
def test_a_loop_that_forgets_a_wait_is_found_by_its_bits_in_each_run(x, wait):
    found = 0
    for seed in range(RUNS):
        found += not torch.equal(trained(seed, late=False), trained(seed, forgotten=wait))
        gpu.settle()
    assert found == (RUNS if wait else 0), f"{found} of {RUNS} runs have other bits"
