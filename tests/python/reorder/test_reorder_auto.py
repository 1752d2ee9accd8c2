# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.reorder(schedule="auto"): decided at the end of the first forward pass with gradients,
before any backward pass. Where stock's order is best nothing is left behind."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from common import Stock, adamw, assert_same, python_ok, refused
from reorder_scripts import (
    MODES,
    Unfused,
    hooks_of_all,
    order_of_backward,
    random,
    same_reordered,
    x_of,
)
from test_reorder import with_held
from test_reorder_training import training
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from optfuse_layers.reorder import auto_schedule

SLOW = (0.0, 1e-6)  # a megabyte takes a second
FREE = (0.0, 0.0)


PAYS = auto_schedule.Times(k=4, iteration=1.0, compute=0.8, exposed=0.2, stock=1.2)


class Lifted(nn.Module):
    """The first layer has nearly all parameters, the others compute."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(256, 4096)
        self.body = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)))

    def forward(self, x):
        return self.body(self.lift(x).view(-1, 16, 16, 16))


LAYERS = ["lift", *(f"body.{i}" for i in range(6))]


@pytest.fixture
def pays(monkeypatch):
    """The simulator finds k=4, whatever else the machine does."""
    monkeypatch.setattr(auto_schedule, "best_k", lambda *_: PAYS)


def is_watched(model):
    return any((model._compiled_call_impl, model._forward_hooks, model._forward_pre_hooks))


def loss_of(model, i):
    return model(random(i, 16, 256)).square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_an_order_that_pays_is_taken_before_the_first_backward_pass(mode, pays):
    same_reordered(training(Lifted, loss_of), {"schedule": "auto", "network": SLOW}, mode)
    model = Lifted()
    with optfuse.reorder(model, "auto", network=SLOW) as reordering:
        for i in range(2):
            x = random(i, 16, 256).requires_grad_() * 1
            assert order_of_backward(model, x) == with_held(LAYERS, LAYERS[:4])
        assert reordering.times is PAYS and not is_watched(model)
        assert "k=4: simulated, 1e+03 ms an iteration, 1.20 times" in str(reordering.times)


def test_the_choice_can_be_given_to_another_run(pays):
    model = Lifted()
    with optfuse.reorder(model, "auto", network=SLOW) as reordering:
        loss_of(model, 0)
        choice = reordering.plan.choice
    with optfuse.reorder(Lifted(), **choice) as another:
        assert choice == {"schedule": "reverse_first", "k": 4} and another.times is None


def test_the_simulator_finds_an_order_for_a_wide_first_layer():
    """Its message takes as long as all there is to compute. Other programs may disturb a rehearsal,
    so there are some tries."""

    def simulated(network):
        with optfuse.reorder(model, "auto", network=network) as reordering:
            loss_of(model, 0)
        return reordering.times

    model = Lifted()
    for _ in range(10):
        seconds = simulated(FREE).compute
        times = simulated((0.0, seconds / model.lift.weight.nbytes))
        if times.k > 0:
            assert times.stock > 1.03 * times.iteration
            return
    raise AssertionError(f"{times}, with a message of {seconds} s")


def test_where_stocks_order_is_best_nothing_is_left_behind():
    code = """
import torch, optfuse
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
def has(name):
    return "tap.cpp" in torch._C._dispatch_dump(f"aten::{name}")
names = ("linear", "conv2d")
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
stock = type(model(torch.ones(1, 8)).grad_fn)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reordering = optfuse.reorder(model, "auto", network=(0, 0))
assert all(map(has, names)) and model._compiled_call_impl and _global_optimizer_pre_hooks
loss = model(torch.ones(1, 8)).sum()
assert not any(map(has, names))
assert not model._compiled_call_impl and not _global_optimizer_pre_hooks
loss.backward()
optimizer.step()
assert type(model(torch.ones(1, 8)).grad_fn) is stock
assert reordering.held_bytes == (0, 0)
assert reordering.plan.choice == {"schedule": "stock"} and reordering.extra_bytes == 0
assert reordering.times.k == 0 and reordering.times.iteration == reordering.times.stock
assert str(reordering.times).startswith("stock's order is best here")
reordering.remove()
"""
    python_ok(code)


def test_each_of_two_reorderings_of_a_model_decides():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = [optfuse.reorder(model, "auto", network=FREE, skip=[name]) for name in ("2", "0")]
    for i in range(2):
        model(x_of(i)).sum().backward()
        optimizer.step()
    for reordering, layer in zip(both, ("0", "2"), strict=True):
        assert reordering.times is not None
        assert [row.layer for row in reordering.plan.rows] == [layer]
    assert not is_watched(model)


def test_either_of_two_undecided_reorderings_can_be_removed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    first, second = (optfuse.reorder(model, "auto", network=FREE, skip=[n]) for n in ("2", "0"))
    first.remove()
    model(x_of(0)).sum().backward()
    assert first.times is None and second.times is not None
    second.remove()
    assert not is_watched(model)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_is_traced_before_the_decision():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    stock = model(x_of(0))
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        traced = torch.jit.trace(model, x_of(0))
        assert reordering.times is None and torch.equal(traced(x_of(0)), stock)
        model(x_of(0))
        assert reordering.times is not None
        torch.jit.trace(model, x_of(0))


def net():
    """A model of a new class, which TorchScript compiles anew; code that it has made before would
    have been called before."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.second(self.first(x).tanh())

    torch.manual_seed(0)
    return Net()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("calls", [0, 3])
def test_a_model_that_is_scripted_before_the_decision(calls):
    """After some calls TorchScript computes layers in code of its own."""

    def trained(arrange):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        arrange(model)
        scripted = torch.jit.script(model)
        with torch.no_grad():
            for _ in range(calls):
                scripted(x_of(0))
        for i in range(4):
            optimizer.zero_grad()
            scripted(x_of(i)).sum().backward()
            optimizer.step()
        return list(model.parameters())

    made = []
    stock = trained(lambda model: None)
    with pytest.warns(UserWarning, match="have run outside of one"):
        ours = trained(lambda model: made.append(optfuse.reorder(model, "auto", network=FREE)))
    assert_same("weights", ours, stock)
    assert made[0].plan.choice == {"schedule": "stock"} and made[0].times is None


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("simulated", ["pays", "does not pay"])
def test_a_model_that_is_scripted_after_the_decision(simulated, request):
    if simulated == "pays":
        request.getfixturevalue("pays")
    model = net()
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        model(x_of(0))
        assert (reordering.times is PAYS) == (simulated == "pays")
        assert torch.equal(torch.jit.script(model)(x_of(1)), model(x_of(1)))


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_is_exported_before_the_decision(strict):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    names = [
        str(node) for node in torch.export.export(model, (x_of(0),), strict=strict).graph.nodes
    ]
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        found = torch.export.export(model, (x_of(0),), strict=strict)
        assert [str(node) for node in found.graph.nodes] == names
        assert reordering.times is None
        assert torch.equal(found.module()(x_of(1)), model(x_of(1)))
        assert reordering.times is not None


class Checkpointed(nn.Module):
    """Square layers: what is saved of one is easily taken for what is saved of another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def nodes(self):
        """Those of a layer, as it is computed from now on: once more in backward."""
        found = []
        layer = self.blocks[0][0]
        layer.register_forward_hook(lambda *args: found.append(args[2].grad_fn.name()))
        return found


def whole_checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("call", [nn.Module.__call__, whole_checkpointed])
def test_a_checkpoint_may_compute_again_after_the_choice(call):
    """Its recomputation has stock's nodes, and gives what it saves to those of its forward pass."""

    def script(wrap, arrange):
        torch.manual_seed(0)
        model = Checkpointed()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        if wrap.fused:
            made.append(optfuse.reorder(model, "auto", network=FREE))
        grads, nodes = [], model.nodes()
        for i in range(3):
            call(model, random(i, 8, 8)).square().sum().backward()
            grads += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            met.append(set(nodes))
            nodes.clear()
        yield from grads

    made, met = [], []
    stock = list(script(Stock(), None))
    ours = list(script(Unfused(), None))
    assert [r.plan.choice for r in made] == [{"schedule": "stock"}]
    assert all(map(torch.equal, stock, ours))
    (stocks, *_), (reordered, *rest) = met[:3], met[3:]
    assert reordered == {"optfuse dX of blocks.0.0", *stocks} and rest == [stocks, stocks]


@pytest.mark.parametrize("order", ["k=4", "stock's"])
def test_two_forward_passes_with_checkpoints_before_a_backward_pass(order, request):
    """The choice comes between them: backward computes the first one's blocks again by the nodes of
    the second."""
    if order == "k=4":
        request.getfixturevalue("pays")

    def gradients(arrange):
        torch.manual_seed(0)
        model = Checkpointed()
        kept, nodes, grads = arrange(model), model.nodes(), []
        for i in range(3):
            first, second = (model(random(2 * i + n, 8, 8)) for n in range(2))
            (first.square().sum() + second.sum()).backward()
            grads += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return kept, nodes, grads

    _, stocks, stock = gradients(lambda model: None)
    kept, nodes, ours = gradients(lambda model: optfuse.reorder(model, "auto", network=FREE))
    assert_same("gradients", ours, stock)
    is_ours = [name.startswith("optfuse dX") for name in nodes]
    assert len(is_ours) == len(stocks) == 3 * 4, "two passes, each computed once more"
    assert is_ours == [True] * 12 if order == "k=4" else [True] + [False] * 11
    kept.remove()


def replica_of(model, scale):
    """As nn.DataParallel makes one on each GPU, here with other weights."""
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        replica._modules[name] = replica_of(child, scale)
    for name, weight in model._parameters.items():
        setattr(replica, name, weight * scale)
    return replica


def test_a_replica_of_an_undecided_model_computes_with_its_own_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    stock = [replica_of(model, scale)(x_of(0)) for scale in (1.0, 0.5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        ours = [replica_of(model, scale)(x_of(0)) for scale in (1.0, 0.5)]
        assert_same("outputs", ours, stock)
        assert reordering.times is None, "a replica's weights are not the layers'"
        sum(y.sum() for y in ours).backward()
        with pytest.warns(UserWarning, match=r"nn\.DataParallel\). Their order is now stock's"):
            optimizer.step()
        assert reordering.plan.choice == {"schedule": "stock"} and not is_watched(model)


def test_replicas_of_a_reordered_model_are_noticed_at_the_first_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with optfuse.reorder(model, "last"):
        replica_of(model, 0.5)(x_of(0)).sum().backward()
        refused(optimizer.step, "nn.DataParallel with copies of the weights", way_out="remove()")


class Copied(nn.Linear):
    """Its copies have all of its attributes."""

    doubles = False

    def __getstate__(self):
        return self.__dict__.copy()

    def forward(self, x):
        return super().forward(x) * (2 if self.doubles else 1)


def test_a_copy_of_an_undecided_model_is_called_itself():
    model = Copied(8, 8)
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        other = copy.copy(model)
        other.doubles = True
        y = other(x_of(0))
        assert reordering.times is None and torch.equal(y, 2 * model(x_of(0)))
        assert reordering.times is not None


@pytest.mark.parametrize("mode", MODES)
def test_training_that_is_left_to_stock_has_its_bits(mode):
    made = []

    def arranged(wrap, arrange):
        def build():
            model = Lifted()
            if wrap.fused:
                made.append((optfuse.reorder(model, "auto", network=FREE), model))
            return model

        return training(build, loss_of)(wrap, lambda model: None)

    same_reordered(arranged, {"schedule": "stock"}, mode)
    assert [r.plan.choice for r, _ in made] == [{"schedule": "stock"}]


def test_a_forward_pass_without_gradients_decides_nothing():
    model = Lifted()
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        with torch.no_grad():
            loss_of(model, 0)
        assert reordering.times is None
        loss_of(model, 0)
        assert reordering.times is not None


def test_a_model_that_is_saved_or_copied_before_the_decision():
    model = Lifted()
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        saved = pickle.dumps(model)
        assert b"optfuse" not in saved
        for other in (copy.deepcopy(model), pickle.loads(saved)):
            assert not is_watched(other)
            loss_of(other, 0).backward()
            assert reordering.times is None
        loss_of(model, 0)
        assert reordering.times is not None


def test_what_is_computed_once_more_changes_nothing():
    """Neither random numbers nor buffers nor the output."""

    def outputs(arrange):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 8)
        )
        kept = arrange(model)
        y = model(random(0, 3, 1, 8, 8))
        return kept, [y.detach(), *model.buffers(), torch.get_rng_state()]

    _, stock = outputs(lambda model: None)
    reordering, ours = outputs(lambda model: optfuse.reorder(model, "auto", network=SLOW))
    assert reordering.times is not None
    assert all(map(torch.equal, stock, ours))


def test_layers_of_a_reentrant_checkpoint_leave_nothing_to_choose():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = adamw(model.parameters())
    with optfuse.reorder(model, "auto", network=SLOW) as reordering:
        wrapped = model.forward
        model.forward = lambda x: checkpoint(wrapped, x, use_reentrant=True)
        for i in range(3):
            model(x_of(i).requires_grad_()).sum().backward()
            optimizer.step()
        assert reordering.plan.choice == {"schedule": "stock"}
        assert not hooks_of_all()


def by_modules(model):
    return lambda x: functools.reduce(lambda y, module: module(y), model, x)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_ahead(model):
    """Its layers are not even seen."""
    return torch.compile(model, backend="aot_eager")


CALLS = [lambda model: model.forward, by_modules, compiled, compiled_ahead, torch.jit.script]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("called", CALLS)
@pytest.mark.parametrize("mode", [None, "backward"])
def test_a_model_that_is_never_called_is_left_to_stock_with_a_word(called, mode):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mode:
        optfuse.fuse(optimizer, mode)
    with optfuse.reorder(model, "auto", network=FREE) as reordering:
        forward = called(model)
        forward(x_of(0)).sum().backward()
        with pytest.warns(UserWarning, match="have run outside of one"):
            optimizer.step()
        assert reordering.plan.choice == {"schedule": "stock"} and reordering.times is None
        assert not is_watched(model)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            forward(x_of(1)).sum().backward()
            optimizer.step()


def test_one_process_has_no_network_to_measure():
    refused(lambda: optfuse.reorder(Lifted(), "auto"), way_out="give network=")


def test_the_gradient_of_an_embedding_comes_before_every_dw_that_waits():
    """In the first backward pass, too: nodes that were made before any layer ran have higher
    numbers than a dW that waits."""
    code = """
import torch, optfuse
from torch import nn
model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
reordering = optfuse.reorder(model, "last")
seen = []
for name, p in model.named_parameters():
    p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
model(torch.arange(3)).sum().backward()
assert seen == ["0.weight", "3.bias", "3.weight", "1.bias", "1.weight"], seen
"""
    python_ok(code)


def test_parameters_in_front_of_the_layers_count():
    model = nn.Sequential(nn.Embedding(100, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    before = functools.partial(auto_schedule.bytes_before, model, [model[2].weight])
    assert before() == 4 * (100 * 8 + 2 * 8)
    model[0].weight.requires_grad_(False)
    assert before() == 4 * 2 * 8
    sparse = nn.Sequential(nn.Embedding(100, 8, sparse=True), nn.Linear(8, 8))
    assert auto_schedule.bytes_before(sparse, [sparse[1].weight]) == 0


def test_layers_promise_their_gradients_once_stocks_order_is_best(monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")

    def promised(arrange):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 512))
        optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1))
        kept = arrange(model)
        for i in range(4):
            model(random(i, 4, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optfuse.flush()
        del kept
        return sum(layer.promised for layer in optfuse.summary(optimizer).promised)

    before = promised(lambda model: None)
    assert before == 8
    assert promised(lambda model: optfuse.reorder(model, "last")) == 0
    # In the pass that decides the layers are reordered still.
    assert promised(lambda model: optfuse.reorder(model, "auto", network=FREE)) == before - 2
