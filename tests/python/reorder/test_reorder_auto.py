# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.reorder(schedule="auto"): decided at the end of the first forward pass with gradients,
before any backward pass. Where stock's order is best nothing is left behind."""

import copy
import pickle

import pytest
import torch
from common import adamw, python_ok, refused
from reorder_scripts import MODES, order_of_backward, random, same_reordered, x_of
from test_reorder_training import training
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import optfuse

SLOW = (0.0, 1e-6)  # a megabyte takes a second
FREE = (0.0, 0.0)


class Lifted(nn.Module):
    """The first layer has nearly all parameters, the others compute."""

    def __init__(self, words=0):
        super().__init__()
        self.words = nn.Embedding(words, 256) if words else nn.Identity()
        self.lift = nn.Linear(256, 1 if words else 4096)
        self.body = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)))

    def forward(self, x):
        return self.body(self.lift(self.words(x)).expand(len(x), 4096).view(-1, 16, 16, 16))


LAYERS = ["lift", *(f"body.{i}" for i in range(6))]


def loss_of(model, i):
    return model(random(i, 16, 256)).square().mean()


def network_for(model):
    """By which the first message takes as long as all there is to compute: an order gains most."""
    probe = optfuse.reorder(model, "auto", network=SLOW)
    loss_of(model, 0)
    seconds = probe.times.compute
    probe.remove()
    return (0.0, seconds / (256 * 4096 * 4))


@pytest.mark.parametrize("mode", MODES)
def test_an_order_that_pays_is_taken_before_the_first_backward_pass(mode):
    network = network_for(Lifted())
    script = training(Lifted, loss_of)
    same_reordered(script, {"schedule": "auto", "network": network}, mode)
    model = Lifted()
    with optfuse.reorder(model, "auto", network=network) as reordering:
        found = order_of_backward(model, random(0, 16, 256), lambda y: y.square().mean())
        k = reordering.plan.choice["k"]
        assert k > 1 and found[-k:] == [f"dW of {name}" for name in LAYERS[:k]]
        assert reordering.times.stock > 1.03 * reordering.times.iteration
        assert f"k={k}: simulated" in str(reordering.times)
        again = order_of_backward(model, random(1, 16, 256), lambda y: y.square().mean())
        assert again == found


def test_the_choice_can_be_given_to_another_run():
    model = Lifted()
    with optfuse.reorder(model, "auto", network=network_for(Lifted())) as reordering:
        loss_of(model, 0)
        choice = reordering.plan.choice
    with optfuse.reorder(Lifted(), **choice) as another:
        assert choice["schedule"] == "reverse_first" and another.times is None


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
assert all(map(has, names)) and model._forward_hooks and _global_optimizer_pre_hooks
loss = model(torch.ones(1, 8)).sum()
assert not any(map(has, names)) and not model._forward_hooks and not _global_optimizer_pre_hooks
loss.backward()
optimizer.step()
assert type(model(torch.ones(1, 8)).grad_fn) is stock
assert reordering.plan.choice == {"schedule": "stock"} and reordering.extra_bytes == 0
assert reordering.times.k == 0 and reordering.times.iteration == reordering.times.stock
assert str(reordering.times).startswith("stock's order is best here")
reordering.remove()
"""
    python_ok(code)


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
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
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
        for i in range(2):
            model(x_of(i).requires_grad_()).sum().backward()
            optimizer.step()
        assert reordering.plan.choice == {"schedule": "stock"}
        assert not _global_optimizer_pre_hooks


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_noticed_at_the_first_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = adamw(model.parameters())
    with optfuse.reorder(model, "auto", network=FREE):
        torch.compile(model, backend="aot_eager")(x_of(0)).sum().backward()
        refused(optimizer.step, "torch.compile", way_out="call remove()")


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


def test_an_embedding_in_front_makes_an_order_pay():
    """Its gradient is sent while the convolutions' are computed; without it there is none."""
    torch.manual_seed(0)
    model = Lifted(words=20_000)
    x = torch.arange(64)
    probe = optfuse.reorder(model, "auto", network=SLOW)
    model(x)
    network = (0.0, probe.times.compute / (20_000 * 256 * 4))
    probe.remove()
    with optfuse.reorder(model, "auto", network=network) as reordering:
        model(x)
        assert reordering.times.stock > 1.1 * reordering.times.iteration
    model.words.weight.requires_grad_(False)
    with optfuse.reorder(model, "auto", network=network) as reordering:
        model(x)
        assert reordering.times.stock < 1.1 * reordering.times.iteration


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
