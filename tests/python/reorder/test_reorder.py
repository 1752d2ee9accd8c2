# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.reorder(): the order in which a backward pass runs, what it keeps in memory, and
what is refused."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
from common import adamw, assert_same, python_ok, refused, sgd, snapshot
from reorder_scripts import mlp, order_of_backward, x_of
from torch import nn
from torch.nn.utils import prune

import optfuse


def stock_order(layers):
    return [f"{task} of {layer}" for layer in reversed(layers) for task in ("dX", "dW")]


def with_held(layers, held):
    """dX and dW in stock's order but for `held`, which come last, in this order."""
    return [t for t in stock_order(layers) if t not in {f"dW of {n}" for n in held}] + [
        f"dW of {name}" for name in held
    ]


LAYERS = ["0", "2", "4", "6", "8"]  # of mlp()
ORDERS = {
    "stock": ({"schedule": "stock"}, []),
    "last": ({"schedule": "last"}, LAYERS[::-1]),
    "reverse_first": ({"schedule": "reverse_first", "k": 3}, LAYERS[:3]),
    "none of them": ({"schedule": "reverse_first", "k": 0}, []),
    "all of them": ({"schedule": "reverse_first", "k": 5}, LAYERS),
    # 5 rows of float32: x and dY of "8" have 5 * (8 + 3) * 4 bytes, of others 5 * (8 + 8) * 4.
    "budget": ({"schedule": "budget", "memory": 220 + 2 * 320}, ["8", "6", "4"]),
    "a smaller budget": ({"schedule": "budget", "memory": 220 + 319}, ["8"]),
    "names": ({"schedule": ["6", "2"]}, ["2", "6"]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_backward_runs_in_the_order_of_the_schedule(name):
    choice, held = ORDERS[name]
    model = mlp()
    with optfuse.reorder(model, **choice) as reordering:
        for i in range(2):
            found = order_of_backward(model, x_of(i).requires_grad_() * 1)
            assert found == with_held(LAYERS, held)
        assert [r.layer for r in sorted(reordering.plan.rows, key=lambda r: r.turn or 0)
                if r.turn is not None] == sorted(held, key=held.index)  # fmt: skip
        assert reordering.held_bytes[0] == 0


def test_updates_of_backward_fusion_follow_their_dw():
    torch.manual_seed(0)
    model = mlp(width=160)
    optimizer = optfuse.fuse(sgd(model.parameters()), mode="backward", bucket_bytes=1)
    with optfuse.reorder(model, "reverse_first", k=2):
        for i in range(2):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            seen = []
            look = functools.partial(look_at, model, before, seen)
            hook = model[0].weight.register_hook(look)
            model(x_of(i, width=160)).square().mean().backward()
            hook.remove()
            optimizer.step()
            optimizer.zero_grad()
            assert seen[0] >= {"6.weight", "4.weight"} and not seen[0] & {"0.weight", "2.weight"}
            assert changed(model, before) == set(before)


def look_at(model, before, seen, gradient):
    seen.append(changed(model, before))


def changed(model, before):
    return {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}


def test_the_plan_is_known_after_the_forward_pass():
    model = mlp()
    with optfuse.reorder(model, "last") as reordering:
        refused(lambda: reordering.plan, "forward pass", way_out="run one with gradients first")
        with torch.no_grad():
            model(x_of(0))
        refused(lambda: reordering.extra_bytes, way_out="run one with gradients first")
        loss = model(x_of(0)).sum()
        plan = reordering.plan
        assert [row.layer for row in plan.rows] == LAYERS
        assert [row.turn for row in plan.rows] == [4, 3, 2, 1, 0]
        assert plan.rows[0].extra_bytes == 2 * 5 * 8 * 4
        assert plan.extra_bytes == reordering.extra_bytes > 0
        text = str(plan)
        assert "turn 4 after the last dX" in text and f"{plan.extra_bytes:,}" in text
        loss.backward()
        again = optfuse.reorder(mlp(), **plan.choice)  # a choice can be saved and given back
        again.remove()


def test_another_batch_gets_another_plan():
    model = mlp()
    with optfuse.reorder(model, "budget", memory=5 * 16 * 4) as reordering:
        model(x_of(0)).sum().backward()
        assert sum(row.turn is not None for row in reordering.plan.rows) == 1
        model(x_of(0, n=1)).sum().backward()
        assert sum(row.turn is not None for row in reordering.plan.rows) == 5
        assert reordering.held_bytes[1] <= 5 * 16 * 4


def test_the_budget_is_never_exceeded():
    model = mlp(layers=12)
    generator = torch.Generator().manual_seed(0)
    for memory in (0, 300, 1000, 4000):
        with optfuse.reorder(model, "budget", memory=memory) as reordering:
            for i in range(10):
                n = int(torch.randint(1, 9, (), generator=generator, device="cpu"))
                model(x_of(i, n)).sum().backward()
            assert reordering.held_bytes[1] <= memory
            assert reordering.held_bytes[0] == 0


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("in the middle of backward")

    model = mlp()
    with optfuse.reorder(model, "last") as reordering:
        hidden = Raising.apply(model[:4](x_of(0)))
        loss = model[4:](hidden).sum()
        with contextlib.suppress(ValueError):  # pytest.raises() would keep the graph
            loss.backward()
        assert reordering.held_bytes[0] > 0
        del hidden, loss
        # The engine drops what it has not run at the end of the next pass, as in stock.
        assert order_of_backward(model, x_of(1)) == with_held(LAYERS, LAYERS[::-1])
        assert reordering.held_bytes[0] == 0


def test_after_remove_everything_is_stocks():
    model = mlp()
    stock = type(model(x_of(0)).grad_fn)
    reordering = optfuse.reorder(model, "last")
    loss = model(x_of(0)).sum()
    assert type(loss.grad_fn.next_functions[0][0]) is not stock
    reordering.remove()
    reordering.remove()
    assert type(model(x_of(0)).grad_fn) is stock
    loss.backward()  # a graph that exists goes on, in stock's order
    assert all(p.grad is not None for p in model.parameters())
    refused(lambda: reordering.plan, way_out="has been removed")


def test_a_reordering_lasts_as_long_as_its_model():
    model = mlp()
    reordering = weakref.ref(optfuse.reorder(model, "last"))
    gc.collect()
    assert reordering() is not None
    assert order_of_backward(model, x_of(0)) == with_held(LAYERS, LAYERS[::-1])
    del model
    gc.collect()
    assert reordering() is None


def test_layers_with_parameters_in_other_layers_never_wait():
    model = nn.ModuleDict({"words": nn.Embedding(8, 8), "head": nn.Linear(8, 8), "b": mlp()})
    model["head"].weight = model["words"].weight
    model["b"][2].bias = model["b"][0].bias
    with optfuse.reorder(model, "last") as reordering:
        model["head"](model["b"][:4](model["words"](torch.arange(4)))).sum().backward()
        rows = {row.layer: row for row in reordering.plan.rows}
        assert {name for name, row in rows.items() if row.turn is not None} == set()
        assert rows["head"].note == "its weight is used by another kind of layer, too"
        assert rows["b.0"].note == "its bias is used by another layer, too"


def made_anew(way, layer):
    """A layer whose weight something makes anew for each look, or for each forward pass."""
    if way == "spectral_norm":
        return nn.utils.parametrizations.spectral_norm(layer)
    if way == "weight_norm":
        return nn.utils.parametrizations.weight_norm(layer)
    if way == "pruned":
        return prune.l1_unstructured(layer, "weight", 0.5)
    return nn.utils.spectral_norm(layer)


@pytest.mark.parametrize("way", ["spectral_norm", "weight_norm", "pruned", "hooks"])
@pytest.mark.parametrize("planner", ["reorder", "kfac", "delay", "delay of it"])
def test_weights_that_something_makes_are_not_looked_at(planner, way):
    """A look would run a parametrization, which may move its buffers on."""

    def buffers_and_loss(planner):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), made_anew(way, nn.Linear(8, 8)), nn.Linear(8, 4))
        optimizer = sgd(model.parameters())
        kept = []
        if planner == "reorder":
            kept.append(optfuse.reorder(model, "last"))
        elif planner == "kfac":
            kept.append(optfuse.kfac(model, optimizer))
        elif planner is not None:
            delay = {model[int(planner == "delay of it")]: 1}
            optfuse.fuse(optimizer, optfuse.Forward(delay=delay))
        found = snapshot(dict(model.state_dict()))
        return found, model(x_of(0)).square().mean().detach()

    assert_same("buffers and loss", buffers_and_loss(planner), buffers_and_loss(None))


def test_two_models_have_schedules_of_their_own():
    first, second = mlp(), mlp()
    with optfuse.reorder(first, "last"), optfuse.reorder(second, "stock"):
        assert order_of_backward(first, x_of(0)) == with_held(LAYERS, LAYERS[::-1])
        assert order_of_backward(second, x_of(0)) == stock_order(LAYERS)
        for model in (first, second):  # both are checked in one step, and leave off
            adamw(model.parameters()).step()


# Refusals


def test_a_gradient_that_is_changed_while_dw_waits_is_refused():
    model = mlp()
    kept = []
    with optfuse.reorder(model, "last"):
        hidden = model[:4](x_of(0))
        y = model[4:](hidden)
        y.register_hook(kept.append)
        hidden.register_hook(lambda g: kept.append(kept[0].mul_(2)))
        said = refused(y.square().sum().backward, "layer '8'", "its dW", way_out="change a copy")
        assert 'skip=["8"]' in said


def test_arguments_that_do_not_fit():
    model = mlp()

    def call(*args, **options):
        return lambda: optfuse.reorder(model, *args, **options)

    refused(call("reverse_first"), way_out="needs k=")
    refused(call("last", k=2), way_out="does not have k=")
    refused(call("budget"), way_out="needs memory=")
    refused(call("reverse_first", k=6), "k=6", way_out="has 5 layers")
    refused(call(["0", "1"]), "'1'", way_out="its layers are 0, 2, 4, 6, 8")
    refused(lambda: optfuse.reorder(nn.Tanh()), way_out="no Linear or Conv2d")
    with optfuse.reorder(model, skip=["4"]):
        refused(call(), "layer '0'", way_out="remove()")
        assert order_of_backward(model, x_of(0)).count("dX of 4") == 0
    optfuse.reorder(model).remove()


def test_a_weight_that_was_exchanged_is_noticed_at_the_first_step():
    model = mlp()
    with optfuse.reorder(model, "last"):
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer = adamw(model.parameters())
        model(x_of(0)).sum().backward()
        refused(optimizer.step, "'2'", way_out="call reorder() last")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ("stock", "forward"))
def test_compiled_layers_are_noticed_at_the_first_step(mode):
    model = mlp()
    optimizer = adamw(model.parameters())
    if mode != "stock":
        optimizer = optfuse.fuse(optimizer, mode=mode)
    before = [p.detach().clone() for p in model.parameters()]
    with optfuse.reorder(model, "last"):
        torch.compile(model, backend="aot_eager")(x_of(0)).sum().backward()
        refused(optimizer.step, "torch.compile", way_out="call remove()")
    assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    optimizer.step()


def test_layers_that_are_not_seen_are_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.unseen = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.seen(x) @ self.unseen.weight

    model = Own()
    optimizer = adamw(model.parameters())
    with optfuse.reorder(model, "last") as reordering:
        model(x_of(0)).sum().backward()
        assert reordering.plan.unused == ("unseen",)
        with pytest.warns(UserWarning, match="the order of unseen is stock's"):
            optimizer.step()


def test_who_does_not_use_it_pays_nothing():
    """The operators have kernels of ours only while layers are known."""
    code = """
import torch, optfuse
from torch import nn
def has(name):
    return "tap.cpp" in torch._C._dispatch_dump(f"aten::{name}")
names = ("linear", "conv2d")
assert not any(map(has, names))
model = nn.Linear(2, 2)
reordering = optfuse.reorder(model)
assert all(map(has, names))
reordering.remove()
assert not any(map(has, names))
"""
    python_ok(code)


#: Users of the kernels that see layers: how each begins and ends.
SEEING = {
    "reorder": ("kept = optfuse.reorder(model, 'last')", "kept.remove()"),
    "kfac": ("kept = optfuse.kfac(model, optimizer)", "kept.remove()"),
    "delay": (
        "optfuse.fuse(optimizer, optfuse.Forward(delay=optfuse.Delay({model: 1}, 'latest')))",
        "optfuse.unfuse(optimizer)",
    ),
}


@pytest.mark.parametrize("who", SEEING)
def test_what_is_compiled_after_the_end_has_stocks_gradients(who):
    """PyTorch's tracing remembers which keys of an operator have kernels."""
    begin, end = SEEING[who]
    code = f"""
import torch, optfuse
from torch import nn
def gradients(model):
    torch.compiler.reset()
    torch.compile(model, backend="aot_eager")(torch.ones(3, 8)).sum().backward()
    found = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return found
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{begin}
during = gradients(model)
{end}
after = gradients(model)
assert all(map(torch.equal, during, after))
"""
    python_ok(code)
