# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of linear layers that nobody computes but the update, beside stock: whoever looks
finds what stock has, whoever writes to what they are computed from changes nothing."""

import contextlib
import copy
import gc
import io
import os
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from common import adamw, assert_same, everything, one_process, python_ok, same, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from promises.counted import promises_of, total

STEPS = 3
WIDTH = 40
MODES = ("forward", "backward")


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Promises of layers of any size, at their first use."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")


def wide():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)
    )


def batch(i, rows=5):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, WIDTH, generator=generator)


def loss_of(model, i):
    return model(batch(i)).square().mean()


class Counting:
    """Stands in the place of same()'s wrap: counts what became of the gradients."""

    def __init__(self, script):
        self.script, self.optimizers = script, []

    def __call__(self, wrap):
        def counted(optimizer, **options):
            self.optimizers.append(wrap(optimizer, **options))
            return self.optimizers[-1]

        counted.fused = wrap.fused
        yield from self.script(counted)

    def total(self, what):
        fused = self.optimizers[-1]
        return total(fused, what)


def equal(script, mode, panels=None, made=None, promised=True, **options):
    """Stock and fused see the same. panels, made: whether some gradients went that way."""
    counting = Counting(script)
    same(counting, mode, prove=False, **options)
    if promised is not None:
        assert (counting.total("promised") > 0) == promised
    for what, wanted in (("panels", panels), ("made", made)):
        if wanted is not None:
            assert (counting.total(what) > 0) == wanted, promises_of(counting.optimizers[-1])


def script_of(iteration, make=adamw, model=wide, steps=STEPS):
    """Trains by iteration(model, optimizer, i), which may yield what is to be compared."""

    def script(wrap):
        it = model()
        optimizer = wrap(make(it.parameters()))
        for i in range(steps):
            found = iteration(it, optimizer, i)
            if found is not None:
                yield from found
        yield from everything(it, optimizer)

    return script


def train(model, optimizer, i, before_step=lambda: None, loss=loss_of):
    optimizer.zero_grad()
    loss(model, i).backward()
    before_step()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_training_without_a_look(mode, make):
    equal(script_of(lambda *of: train(*of), make), mode, panels=True, made=False)


class Block(nn.Module):
    """A transformer's, with the output tied to the embedding of the input."""

    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return F.linear(x, self.words.weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_a_transformer_over_a_hundred_steps(mode, make):
    def iteration(model, optimizer, i):
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if mode == "forward" and i % 20 == 7:
            yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield "loss", loss

    equal(script_of(iteration, make, Block, steps=100), mode, panels=True)


# Looks


def first(model):
    return model[0].weight


LOOKS = {
    "norm": lambda p: p.grad.norm(),
    "numpy": lambda p: torch.from_numpy(p.grad.numpy().copy()),
    "detach().numpy()": lambda p: torch.from_numpy(p.grad.detach().numpy().copy()),
    "data": lambda p: p.grad.data.clone(),
    "address": lambda p: p.grad.data_ptr() != 0 and p.grad.clone(),
    "storage": lambda p: torch.tensor(list(p.grad.untyped_storage())[:64]),
    "tolist": lambda p: torch.tensor(p.grad.tolist()),
    "copy": lambda p: copy.deepcopy(p.grad),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)),
    "dlpack": lambda p: torch.from_dlpack(p.grad).clone(),
    "a row": lambda p: p.grad[1].clone(),
    "shape": lambda p: torch.tensor([*p.grad.shape, *p.grad.stride(), p.grad.numel()]),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("when", ("before step", "after step", "after the update"))
def test_whoever_looks_finds_the_gradient(look, when):
    def iteration(model, optimizer, i):
        p = first(model)
        seen = []
        train(model, optimizer, i, lambda: when == "before step" and seen.append(LOOKS[look](p)))
        if when == "after the update":
            yield "weight", p
        if when != "before step":
            seen.append(LOOKS[look](p))
        yield "seen", seen

    equal(script_of(iteration), "forward", made=look != "shape", panels=True)


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


def test_a_gradient_that_two_parameters_have():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        model[2].weight.grad = model[0].weight.grad
        optimizer.step()

    equal(script_of(iteration), "forward")


# Ways along which a gradient comes


def ways():
    def tied(model, x):
        return F.linear(F.linear(x, first(model)).relu(), first(model)).square().mean()

    def beside_pow(model, x):
        return model(x).square().mean() + first(model).pow(2).sum() * 1e-2

    def beside_einsum(model, x):
        return model(x).square().mean() + torch.einsum("ij,kj->", x, first(model)) * 1e-2

    def beside_transposed(model, x):
        return model(x).square().mean() + (x @ first(model).T).tanh().mean()

    def embedded(model, x):
        rows = F.embedding(torch.tensor([1, 3, 1]), first(model))
        return model(rows + x[:3]).square().mean()

    def three_times(model, x):
        return sum(model(x * k).square().mean() for k in (1.0, 0.5, 0.25))

    def cast(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x).float() + model(x * 0.5).float()).square().mean()

    def half_cast(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).float()
        return (y + model(x)).square().mean()

    def checkpointed(model, x, reentrant):
        x = x.requires_grad_()
        y = checkpoint(lambda t: model[1](model[0](t)), x, use_reentrant=reentrant)
        return model[4](model[3](model[2](y))).square().mean()

    def transposed_output(model, x):
        return model(x).t().contiguous().view(-1).square().mean()

    return {
        "tied": tied,
        "pow": beside_pow,
        "einsum": beside_einsum,
        "x @ w.T": beside_transposed,
        "embedding": embedded,
        "three uses": three_times,
        "autocast": cast,
        "autocast and not": half_cast,
        "checkpoint": lambda model, x: checkpointed(model, x, False),
        "reentrant checkpoint": lambda model, x: checkpointed(model, x, True),
        "transposed": transposed_output,
        "sum": lambda model, x: model(x).sum(),
        "3-D": lambda model, x: model(x.view(1, 5, WIDTH)).square().mean(),
        "1-D": lambda model, x: model(x[0]).square().mean(),
    }


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("mode", MODES)
def test_other_uses_of_the_weight(way, mode):
    loss = ways()[way]

    def iteration(model, optimizer, i):
        train(model, optimizer, i, loss=lambda m, i: loss(m, batch(i)))

    equal(script_of(iteration), mode, promised=way != "autocast")


@pytest.mark.parametrize("what", ("grad", "inputs", "both"))
def test_autograd_hands_it_to_the_script(what):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        if what != "inputs":
            yield "gradient", torch.autograd.grad(loss_of(model, i), first(model))
        if what != "grad":
            loss_of(model, i).backward(inputs=[first(model), model[2].weight])
        else:
            loss_of(model, i).backward()
        yield "gradients", [p.grad for p in model.parameters()]
        optimizer.step()

    equal(script_of(iteration), "forward", made=True)


@pytest.mark.parametrize("times", (2, 3))
def test_several_passes(times):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        for k in range(times):
            loss_of(model, i * times + k).backward()
        optimizer.step()

    equal(script_of(iteration), "forward", made=True)


def test_a_graph_that_is_kept():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward(retain_graph=True)
        yield "first", first(model).grad
        loss.backward()
        optimizer.step()

    equal(script_of(iteration), "forward", made=True)


def test_a_graph_of_the_gradient():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        grads = torch.autograd.grad(loss_of(model, i), list(model.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        penalty.backward()
        optimizer.step()

    equal(script_of(iteration), "forward", promised=None)


def test_anomaly_mode():
    def iteration(model, optimizer, i):
        with torch.autograd.detect_anomaly(check_nan=True):
            train(model, optimizer, i)

    with pytest.warns(UserWarning, match="Anomaly"):
        equal(script_of(iteration), "forward", made=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("early", (True, False), ids=("before fuse", "after fuse"))
@pytest.mark.parametrize("kind", ("tensor", "accumulated"))
def test_hooks(mode, early, kind):
    def script(wrap):
        model, norms = wide(), []

        def add():
            if kind == "tensor":
                first(model).register_hook(lambda g: g * 0.5)
            else:
                first(model).register_post_accumulate_grad_hook(
                    lambda p: norms.append(float(p.grad.norm()))
                )

        if early:
            add()
        optimizer = wrap(adamw(model.parameters()))
        if not early and not (mode == "backward" and kind == "accumulated"):
            add()
        for i in range(STEPS):
            train(model, optimizer, i)
        yield "norms", norms
        yield from everything(model, optimizer)

    equal(script, mode)


# Writers of the factors


class InPlace(torch.autograd.Function):
    """Writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g.mul_(2)


def writers():
    def zero(x, y):
        x.zero_()

    def data(x, y):
        x.data.fill_(7)

    def array(x, y):
        x.numpy()[...] = 7

    def gone(x, y):
        x.untyped_storage().resize_(0)

    return {"zero_": zero, "data": data, "numpy": array, "resize_(0)": gone}


@pytest.mark.parametrize("writer", writers())
@pytest.mark.parametrize("mode", MODES)
def test_the_input_is_written_after_backward(writer, mode):
    def iteration(model, optimizer, i):
        x = batch(i)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        writers()[writer](x, None)
        optimizer.step()

    equal(script_of(iteration), mode, panels=True, made=False)


@pytest.mark.parametrize("mode", MODES)
def test_the_residual_stream_is_written_inside_backward(mode):
    def loss(model, i):
        x = model[0](batch(i))
        y = x + model[2](InPlace.apply(x))
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
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no")

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        y = model[2](Fails.apply(model[0](batch(i))))
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


# Between two calls


def idioms():
    def zero_early(model, optimizer, i):
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def zeros(model, optimizer, i):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, i).backward()
        optimizer.step()

    def no_step(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i != 1:
            optimizer.step()

    def clip(model, optimizer, i):
        train(model, optimizer, i, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    def our_clip(model, optimizer, i):
        train(model, optimizer, i, lambda: optfuse.clip_grad_norm_(model.parameters(), 0.1))

    def clip_value(model, optimizer, i):
        train(model, optimizer, i, lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))

    def flush(model, optimizer, i):
        train(model, optimizer, i)
        if getattr(optimizer, "_optfuse_link", None):
            optfuse.flush(optimizer)

    def flush_before(model, optimizer, i):
        def flush_now():
            if getattr(optimizer, "_optfuse_link", None):
                optfuse.flush(optimizer)

        train(model, optimizer, i, flush_now)
        yield "gradient", first(model).grad

    def copies(model, optimizer, i):
        seen = []

        def look():
            twin = copy.deepcopy(model)
            seen.append([p.grad for p in twin.parameters()])
            file = io.BytesIO()
            torch.save(first(model).grad, file)
            file.seek(0)
            seen.append(torch.load(file))

        train(model, optimizer, i, look)
        yield "copies", seen

    def closure(model, optimizer, i):
        def close():
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            return loss

        yield "loss", optimizer.step(close)

    def moved(model, optimizer, i):
        train(model, optimizer, i)
        first(model).grad = first(model).grad * 2 if i == 1 else None

    def state(model, optimizer, i):
        train(model, optimizer, i)
        optimizer.load_state_dict(optimizer.state_dict())

    def replaced(model, optimizer, i):
        train(model, optimizer, i, lambda: first(model).grad.set_(torch.ones(WIDTH, WIDTH)))

    def resized(model, optimizer, i):
        def shrink():
            first(model).grad.data.mul_(0.5)
            first(model).grad.data = first(model).grad.data * 2

        train(model, optimizer, i, shrink)

    return dict(locals())


@pytest.mark.parametrize("idiom", idioms())
def test_idioms(idiom):
    equal(script_of(idioms()[idiom]), "forward")


def test_scaled_losses():
    def script(wrap):
        model = wide()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 1:
                scaler.unscale_(optimizer)
                yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        yield from everything(model, optimizer)

    equal(script, "forward", made=True)


def test_accumulated_passes_in_backward_mode():
    def script(wrap):
        model = wide()
        optimizer = (
            wrap(adamw(model.parameters()), accumulate=2)
            if wrap.fused
            else wrap(adamw(model.parameters()))
        )
        for i in range(2 * STEPS):
            loss_of(model, i).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        yield from everything(model, optimizer)

    equal(script, "backward", made=True)


def test_two_optimizers():
    def script(wrap):
        model = wide()
        halves = list(model.parameters())
        optimizers = [wrap(adamw(halves[:3])), wrap(sgd(halves[3:]))]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, i).backward()
            for optimizer in optimizers:
                optimizer.step()
        yield from everything(model, optimizers[0])

    equal(script, "forward", panels=True)


def test_unfuse_leaves_gradients_that_can_be_read():
    torch.manual_seed(0)
    stock = wide()
    model = copy.deepcopy(stock)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for m in (stock, model):
        loss_of(m, 0).backward()
    optfuse.unfuse(optimizer)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert_same("gradient", ours.grad, theirs.grad)


def test_a_gradient_outlives_model_and_optimizer():
    torch.manual_seed(0)
    stock = wide()
    model = copy.deepcopy(stock)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for m in (stock, model):
        loss_of(m, 0).backward()
    grad, theirs = first(model).grad, first(stock).grad
    assert total(optimizer, "promised") > 0
    del model, optimizer
    gc.collect()
    assert_same("gradient", grad, theirs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_finds_gradients():
    code = """
import os, copy, torch, optfuse
from torch import nn
torch.manual_seed(0)
stock = nn.Linear(40, 40)
model = copy.deepcopy(stock)
optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
x = torch.randn(5, 40)
for m in (stock, model):
    m(x).square().sum().backward()
assert sum(layer.promised for layer in optfuse.summary(optimizer).promised) == 1
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(stock.weight.grad, model.weight.grad) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    python_ok(code, OPTFUSE_PRODUCTS="force")


# Settings that change products


def settings():
    def threads():
        torch.set_num_threads(1 if torch.get_num_threads() != 1 else 2)

    def precision():
        torch.set_float32_matmul_precision("medium")

    def denormals():
        torch.set_flush_denormal(True)

    def onednn():
        torch.backends.mkldnn.set_flags(False)

    def deterministic():
        torch.use_deterministic_algorithms(True)

    return {
        "threads": threads,
        "precision": precision,
        "denormals": denormals,
        "oneDNN": onednn,
        "deterministic": deterministic,
    }


@pytest.fixture
def restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.set_flags(True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", settings())
@pytest.mark.parametrize("when", ("between steps", "before a look", "before step"))
def test_settings_that_change(setting, when, restored):
    """Tiny numbers, so that denormals are among the products."""

    def back():
        torch.set_num_threads(1 if setting == "denormals" else 2)  # it is that of one thread
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)
        torch.backends.mkldnn.set_flags(True)
        torch.use_deterministic_algorithms(False)

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        (model(batch(i)).square().mean() * 1e-36).backward()
        if i == 1 and when != "between steps":
            # Stock has computed the gradient by now.
            grads = [p.grad for p in model.parameters()] if when == "before a look" else []
            settings()[setting]()
            seen = [g.mul(1.0) if setting != "denormals" else g.tolist() for g in grads]
            back()
            yield "seen", seen
        optimizer.step()
        if i == 1 and when == "between steps":
            settings()[setting]()

    def script(wrap):
        back()
        yield from script_of(iteration, steps=4)(wrap)

    equal(script, "forward")


# Layers that are left alone


def test_small_or_thick_layers_are_left_alone(monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "auto")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    optimizer = optfuse.fuse(adamw(model.parameters()))
    y = model(torch.randn(5, 64))
    assert promises_of(optimizer) == () and "Addmm" in y.grad_fn.name()
    thick = nn.Linear(600, 600)
    optimizer = optfuse.fuse(adamw(thick.parameters()))
    assert "Addmm" in thick(torch.randn(600, 600)).grad_fn.name()
    assert "optfuse" in thick(torch.randn(8, 600)).grad_fn.name()
    assert [layer.promised for layer in promises_of(optimizer)] == [0]


@pytest.mark.parametrize("make", (torch.optim.Adafactor, torch.optim.Muon))
def test_rules_without_kernels_have_none(make):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = optfuse.fuse(make(model.parameters(), lr=1e-3))
    assert promises_of(optimizer) == ()


def test_a_layer_whose_gradient_is_looked_at_stops(monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "auto")
    model = nn.Linear(600, 600)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.randn(4, 600)).square().mean().backward()
        model.weight.grad.norm()
        optimizer.step()
    (layer,) = promises_of(optimizer)
    assert layer.made <= 10 and layer.made + layer.whole == 400
    if layer.made:
        assert "looked at" in optfuse.explain(optimizer)


def test_off_is_the_default(monkeypatch):
    monkeypatch.delenv("OPTFUSE_PRODUCTS")
    model = nn.Linear(600, 600)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    assert promises_of(optimizer) == () and "Addmm" in model(torch.randn(4, 600)).grad_fn.name()
    optfuse.unfuse(optimizer)
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "maybe")
    with pytest.raises(optfuse.Error, match="OPTFUSE_PRODUCTS=maybe"):
        optfuse.fuse(optimizer)


def test_grad_fn_is_a_node_of_ours_and_its_saved_tensors_are_others():
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = model[0](batch(0).requires_grad_())
    assert y.grad_fn.name().startswith("optfuse dX of ")
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


def test_flush_leaves_a_gradient_a_promise():
    """It has been used up by then, or is none of flush()'s business."""
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for i in range(4):
        train(model, optimizer, i)
        optfuse.flush(optimizer if i % 2 else None)
    assert total(optimizer, "panels") == total(optimizer, "promised") == 12
    assert total(optimizer, "made") == 0


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


def test_compiled_autograd_is_refused():
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    loss = loss_of(model, 0)
    with (
        torch._dynamo.compiled_autograd._enable(lambda graph: graph),
        pytest.raises(optfuse.Error, match='products="off"'),
    ):
        loss.backward()
    optfuse.unfuse(optimizer)


def test_the_tap_goes_with_the_last_layer():
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    assert "optfuse" in model[0](batch(0)).grad_fn.name()
    optfuse.unfuse(optimizer)
    assert "Addmm" in model[0](batch(0)).grad_fn.name()
