# SPDX-License-Identifier: BSD-3-Clause
"""Who writes to the matrices that a promised gradient is computed from changes nothing, and tensors
die as in stock."""

import gc
import threading
import weakref

import pytest
import torch
from common import adamw, everything, python_ok
from torch import nn

from promises.scripted import MODES, STEPS, WIDTH, batch, equal, loss_of, script_of, train, wide


class InBackward(torch.autograd.Function):
    """The identity; work(gradient) is the gradient that it returns."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return ctx.work(g), None


WRITERS = {
    "zero_": lambda x: x.zero_(),
    "data": lambda x: x.data.fill_(7),
    "numpy": lambda x: x.numpy().fill(7),
    "resize_(0)": lambda x: x.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("mode", MODES)
def test_the_input_is_written_after_backward(writer, mode):
    def iteration(model, optimizer, i):
        x = batch(i)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        WRITERS[writer](x)
        optimizer.step()

    equal(script_of(iteration), mode, panels=True, made=False)


@pytest.mark.parametrize("mode", MODES)
def test_the_residual_stream_is_written_inside_backward(mode):
    def loss(model, i):
        x = model[0](batch(i))
        y = x + model[2](InBackward.apply(x, lambda g: g.mul_(2)))
        y.register_hook(lambda g: g.mul_(3))
        x.register_hook(lambda g: g.mul_(0.5))
        return model[4](y).square().mean()

    def iteration(model, optimizer, i):
        train(model, optimizer, i, loss=loss)

    equal(script_of(iteration), mode, panels=True)


def test_a_leaf_in_the_residual_stream_is_clipped():
    leaves = []

    def loss(model, i):
        leaf = torch.zeros(5, WIDTH, requires_grad=True)
        leaves[:] = [leaf]
        return model[4](model[2](model[0](batch(i)) + leaf)).square().mean()

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss(model, i).backward()
        nn.utils.clip_grad_norm_(leaves, 1e-4)
        yield "leaf", leaves[0].grad
        optimizer.step()

    equal(script_of(iteration), "forward", panels=True)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_die_as_in_stock(mode):
    def script(wrap):
        model = wide()
        optimizer = wrap(adamw(model.parameters()))
        died = []
        for i in range(STEPS):
            optimizer.zero_grad()
            x = batch(i) * 1.0
            weakref.finalize(x, died.append, i)
            hidden = model[0](x)
            alive = weakref.ref(hidden)
            loss = model[4](model[2](hidden)).square().mean()
            del x, hidden
            loss.backward()
            del loss
            gc.collect()
            yield "alive", (alive() is None, list(died))
            optimizer.step()
        yield from everything(model, optimizer)

    equal(script, mode, panels=True)


def test_backward_that_fails_in_the_middle():
    def fail(g):
        raise ValueError("no")

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        y = model[2](InBackward.apply(model[0](batch(i)), fail))
        with pytest.raises(ValueError, match="no"):
            model[4](y).square().mean().backward()
        if i == 1:
            yield "gradient", model[2].weight.grad
        optimizer.step()

    equal(script_of(iteration), "forward", panels=True)


def test_two_threads_in_backward():
    def script(wrap):
        models = [wide(), wide()]
        optimizers = [wrap(adamw(m.parameters())) for m in models]
        for i in range(STEPS):
            x = batch(i)

            def run(k, x=x, i=i):
                optimizers[k].zero_grad()
                models[k](x).square().mean().backward()

            threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            x.zero_()
            for optimizer in optimizers:
                optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            yield from everything(model, optimizer)

    equal(script, "forward", panels=True)


def test_optimizers_come_and_go_while_another_thread_calls_linear():
    """PyTorch's dispatcher does not let kernels go while somebody calls their operator."""
    code = """
import threading, time, torch, optfuse
from torch import nn
x, w, stopped = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True), threading.Event()
def call():
    while not stopped.is_set():
        torch.nn.functional.linear(x, w)
def come_and_go():
    optfuse.unfuse(optfuse.fuse(torch.optim.SGD(nn.Linear(16, 16).parameters(), fused=True)))
come_and_go()
threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
end = time.monotonic() + 5
while time.monotonic() < end:
    come_and_go()
stopped.set()
"""
    python_ok(code, OPTFUSE_PRODUCTS="force")


def test_backward_in_inference_mode():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        with torch.inference_mode():
            loss.backward()
        yield "gradients", [p.grad for p in model.parameters()]
        optimizer.step()

    equal(script_of(iteration), "forward")


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensors_that_are_offloaded(mode):
    def iteration(model, optimizer, i):
        with torch.autograd.graph.save_on_cpu():
            train(model, optimizer, i)

    equal(script_of(iteration), mode, panels=True)
