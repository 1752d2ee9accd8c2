# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile and TorchScript beside fused optimizers: compiled code reads
raw memory, and must read what stock would have there."""

import io

import pytest
import torch
from common import (
    HAS_PYTHON_H,
    Fused,
    Stock,
    adamw,
    assert_same,
    batch,
    everything,
    net,
    python,
    python_ok,
    run,
    same,
    sgd,
    train,
)
from scripts import trained
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

STEPS = 5
slow = pytest.mark.slow
with_inductor = pytest.mark.skipif(
    not HAS_PYTHON_H, reason="inductor needs Python's headers: install python3-dev"
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Compiles:
    """Counts the graphs that dynamo makes."""

    def __init__(self):
        self.n = 0

    def __call__(self, graph, examples):
        from torch._inductor.compile_fx import compile_fx

        self.n += 1
        return compile_fx(graph, examples)


def trained_compiled(compiled, counter, make=adamw):
    def start(wrap):
        model = net()
        model.fast = [compiled(model, counter)]
        return model, wrap(make(model.parameters()))

    def loss(model, i):
        x, y = batch(i)
        return nn.functional.mse_loss(model.fast[0](x), y)

    def between(model, optimizer, i):
        if i == STEPS - 1:
            with torch.no_grad():
                yield "evaluation", model.fast[0](batch(99)[0])

    return trained(start=start, loss=loss, between=between, steps=STEPS)


def compiled_function(model, backend):
    weights = list(model.parameters())

    @torch.compile(backend=backend)
    def forward(x):
        for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            x = torch.tanh(nn.functional.linear(x, w, b))
        return nn.functional.linear(x, weights[-2], weights[-1])

    return forward


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compiled_block(model, backend):
    """One layer is compiled, the others run as they are."""
    return nn.Sequential(*model[:2], torch.compile(model[2], backend=backend), *model[3:])


WAYS = {
    "module": lambda model, backend: torch.compile(model, backend=backend),
    "function": compiled_function,
    "in place": compiled_in_place,
    "one block": compiled_block,
}


@slow
@with_inductor
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_compiled_models_train_as_with_stock(way, mode):
    stock, ours = Compiles(), Compiles()
    wrap = Fused(mode)
    expected = run(trained_compiled(WAYS[way], stock), Stock())
    torch.compiler.reset()
    got = run(trained_compiled(WAYS[way], ours), wrap)
    for a, b in zip(got, expected, strict=True):
        assert_same(b[0], a, b)
    assert ours.n == stock.n, f"{ours.n} graphs were compiled, with stock {stock.n}"
    wrap.prove()


@slow
def test_step_inside_a_compiled_function():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))

        @torch.compile(backend="aot_eager")
        def iteration(x, y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for i in range(STEPS):
            yield "loss", iteration(*batch(i))
        yield from everything(model, optimizer)

    same(script, prove=False)


WHOLE = """
import torch
from common import Fused, Stock, adamw, assert_same, batch, everything, net, run
from torch import nn

def rmsprop(parameters):
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, foreach=False)

def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.01, foreach=False)

def script_of(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        if not wrap.fused:  # traced, it would have other roundings
            optimizer.step = torch._dynamo.disable(optimizer.step)

        @torch.compile(backend=BACKEND)
        def iteration(x, y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for i in range(3):
            yield "loss", iteration(*batch(i))
        yield from everything(model, optimizer)

    return script

torch.set_num_threads(1)
for make in (adamw, rmsprop, adafactor):
    stock = run(script_of(make), Stock())
    torch.compiler.reset()
    wrap = Fused(MODE)
    ours = run(script_of(make), wrap)
    torch.compiler.reset()
    for a, b in zip(ours, stock, strict=True):
        assert_same(f"{make.__name__}, {b[0]}", a, b)
    if MODE == "backward":
        wrap.prove()
"""
BACKENDS = (
    *(pytest.param("eager", marks=slow), "aot_eager"),
    pytest.param("inductor", marks=(slow, with_inductor)),
)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_iteration_is_compiled(backend, mode):
    """The library's questions to Python in the middle of backward are not traced: that has
    crashed the process."""
    code = WHOLE.replace("BACKEND", repr(backend)).replace("MODE", repr(mode))
    done = python(code, timeout=500)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    assert "recompile" not in done.stderr, done.stderr


FAKE = """
import torch, optfuse
from common import adamw, assert_same, everything, loss_of, net, same
from torch._subclasses.fake_tensor import FakeTensorMode

def script(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if wrap.fused:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                optimizer.step()
        except optfuse.Error as error:
            assert "traced" in str(error), error
        else:
            raise AssertionError("fake state was taken")
    optimizer.step()
    yield from everything(model, optimizer)

same(script, MODE, prove=False)
"""


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_fake_optimizer_state_is_refused(mode):
    python_ok(FAKE.replace("MODE", repr(mode), 1))


KINDS = {
    "trace": lambda model: torch.jit.trace(model, batch(99)[0], check_trace=False),
    "script": torch.jit.script,
    "freeze": lambda model: torch.jit.freeze(torch.jit.script(model.eval())),
    "freeze of a trace": lambda model: torch.jit.freeze(
        torch.jit.trace(model.eval(), batch(99)[0], check_trace=False)
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
class TestTorchScript:
    """Made before training, or while updates are pending; used all along."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("when", ("before training", "while pending"))
    def test_functions_made_from_the_model(self, kind, when):
        def start(wrap):
            model = net()
            model.made = [KINDS[kind](model)] if when == "before training" else []
            model.prove = wrap.pending
            return model, wrap(adamw(model.parameters()))

        def between(model, optimizer, i):
            if i == 1 and not model.made:
                model.prove()
                model.made = [KINDS[kind](model)]
            with torch.no_grad():
                yield "output", [made(batch(50 + i)[0]) for made in model.made]

        script = trained(start=start, iteration=train, between=between, steps=STEPS)
        same(script, prove=when == "while pending")

    @pytest.mark.parametrize("kind", ("trace", "script"))
    def test_saved_while_pending(self, kind):
        def start(wrap):
            model = net()
            model.made = [KINDS[kind](model)]
            return model, wrap(sgd(model.parameters()))

        def between(model, optimizer, i):
            buffer = io.BytesIO()
            torch.jit.save(model.made[0], buffer)
            buffer.seek(0)
            with torch.no_grad():
                yield "loaded", torch.jit.load(buffer)(batch(7)[0])

        same(trained(start=start, iteration=train, between=between), prove=False)

    def test_a_scripted_model_trains(self):
        same(trained(model=lambda: torch.jit.script(net())))


def exported(strict):
    def made(model):
        program = torch.export.export(model, batch(7)[:1], strict=strict)
        return program.module()(batch(7)[0])

    return made


def fake_shapes(model):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shapes = [tuple(mode.from_tensor(p).shape) for p in model.parameters()]
        return [*shapes, tuple((model[0].weight + 1).shape)]


MADE = {
    "export": exported(strict=False),
    "strict export": exported(strict=True),
    "fx": lambda model: torch.fx.symbolic_trace(model)(batch(7)[0]),
    "make_fx": lambda model: make_fx(lambda x: model(x))(batch(7)[0])(batch(8)[0]),
    "functionalize": lambda model: torch.func.functionalize(lambda x: model(x))(batch(7)[0]),
    "fake tensors": fake_shapes,
}


@pytest.mark.parametrize("what", MADE)
def test_what_is_made_of_a_model_while_pending(what):
    same(trained(between=lambda model, optimizer, i: MADE[what](model), steps=2))
