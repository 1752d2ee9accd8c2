# SPDX-License-Identifier: BSD-3-Clause
"""Whoever looks at a gradient that nobody has computed finds the numbers that stock has. More that
can be seen of such a layer."""

import contextlib

import pytest
import torch
from common import adamw, assert_same, one_process

import optfuse
from promises.scripted import MODES, WIDTH, batch, equal, first, loss_of, script_of, train, wide


@pytest.mark.parametrize("look", ("storage", "shape"))
def test_whoever_looks_at_the_storage_or_the_shape_finds_stocks(look):
    def seen(grad):
        return list(grad.untyped_storage())[:64] if look == "storage" else list(grad.stride())

    def iteration(model, optimizer, i):
        train(model, optimizer, i)
        yield "seen", seen(first(model).grad)

    equal(script_of(iteration), "forward", made=look == "storage", panels=True)


@pytest.mark.parametrize("order", ("alias first", "gradient first"))
def test_an_alias_is_the_same_memory(order):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        p = first(model)
        alias = p.grad.data
        for tensor in (alias, p.grad) if order == "alias first" else (p.grad, alias):
            tensor.mul_(2)
        yield "both", [alias, p.grad]
        optimizer.step()

    equal(script_of(iteration), "forward", made=True)


def test_grad_fn_and_its_saved_tensors_are_stocks():
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = model[0](batch(0).requires_grad_())
    assert y.grad_fn.name() == "AddmmBackward0"
    assert [tuple(t.shape) for t in packed] == [(5, WIDTH), (WIDTH, WIDTH)]
    optfuse.unfuse(optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ("record_shapes", "with_stack", "profile_memory"))
def test_a_profiler_that_looks_at_tensors(mode, what):
    def iteration(model, optimizer, i):
        def watched(when):
            return torch.profiler.profile(**{what: True}) if when else contextlib.nullcontext()

        with watched(i == 1):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            with watched(i == 2):
                optimizer.step()

    equal(script_of(iteration, steps=5), mode, panels=True)


def test_compiled_code_reads_a_gradient():
    torch._dynamo.reset()
    scaled = torch.compile(lambda g: g * 2, backend="aot_eager")

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        yield "scaled", [scaled(p.grad) for p in model.parameters()]
        optimizer.step()

    equal(script_of(iteration), "forward", made=True)


def test_raw_memory_of_a_promise_is_sealed():
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    loss_of(model, 0).backward()
    grad = first(model).grad
    with one_process():
        with pytest.raises(RuntimeError, match="invalid"):
            torch.distributed.scatter(torch.empty_like(first(model)), [grad])
        grad.norm()
        received = torch.empty_like(grad)
        torch.distributed.scatter(received, [grad])
    assert_same("received", received, grad)
    optfuse.unfuse(optimizer)
