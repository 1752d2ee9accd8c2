# SPDX-License-Identifier: BSD-3-Clause
"""reorder(side_stream=True): weight gradients on a stream of their own. The scripts know nothing
of that stream: what is in order in stock's backward pass is in order with it, and has its bits."""

import gc

import gpu
import pytest
import torch
from common import Fused, Stock, adamw, everything, sgd
from gpu import NAME, captured
from legal import compare, kept, loss_of, net, play
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from optfuse._process import drain_all

CHOICES = {
    "stock": {},
    "last": {"schedule": "last"},
    "reverse_first": {"schedule": "reverse_first", "k": 2},
}
MODES = (None, "forward", "backward")
OF_THE_POOL = 32  # streams, which it gives in turn


class Arranged:
    """Gives what a script trains another order of backward."""

    def __init__(self, **choice):
        self.choice, self.made, self.models = choice, [], []

    def __call__(self, model):
        self.models.append(model)  # a Reordering ends with its model
        self.made.append(optfuse.reorder(model, **self.choice))

    def end(self):
        rows = [row for reordering in self.made for row in reordering.plan.rows]
        for reordering in self.made:
            reordering.remove()
        return rows


def same(script, mode=None, beside=True, fuse=None, **choice):
    """script(wrap, arrange): no races in stock, none on the side stream, and equal bits. beside:
    whether any dW is to run there."""
    stock, found = play(lambda wrap: script(wrap, lambda model: None), Stock())
    assert not found, "the script is wrong, stock races:\n" + "\n".join(found)
    ours, found, rows = on_side_stream(script, mode, fuse, **choice)
    assert not found, "only the side stream races:\n" + "\n".join(found)
    assert any(row.on_side_stream for row in rows) == beside, rows
    assert stock, "the script yielded nothing"
    compare(ours, stock)


def on_side_stream(script, mode=None, fuse=None, side_stream=True, **choice):
    arrange = Arranged(side_stream=side_stream, **choice)
    wrap = Fused(mode, **fuse or {}) if mode else Stock()
    ours, found = play(lambda wrap: script(wrap, arrange), wrap)
    return ours, found, arrange.end()


def check_guard(name, script, monkeypatch, mode=None, plays=1, **choice):
    """The negative control: with the guard off, the script must race."""
    gpu.only_played()
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", name)
    found = []
    for _ in range(plays):
        found += on_side_stream(script, mode, **choice)[1]
    assert found, f"no race is seen without {name!r}: the script proves nothing"
    return found


# Training


def conv_net():
    parts = (nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*parts).to(NAME)


class Tied(nn.Module):
    """The weight of one layer is used three times."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.head(x)


class Cast(nn.Module):
    """As autocast does it: a copy of each parameter in a lower precision."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = x.to(torch.bfloat16)
        for layer in (self.first, self.second):
            weight, bias = (p.to(torch.bfloat16) for p in (layer.weight, layer.bias))
            x = nn.functional.linear(x, weight, bias)
        return x.float()


def of_images(model, i):
    x = torch.full((2, 1, 8, 8), 0.1 * i, device=NAME) + torch.arange(8, device=NAME)
    return model(x).square().mean()


MODELS = {
    "mlp": (net, loss_of),
    "convolutions": (conv_net, of_images),
    "tied": (lambda: Tied().to(NAME), loss_of),
    "cast": (lambda: Cast().to(NAME), loss_of),
}


def training(build=net, loss=loss_of, make=adamw, steps=4):
    def script(wrap, arrange):
        model = build()
        arrange(model)
        optimizer = wrap(make(model.parameters()))
        for i in range(steps):
            optimizer.zero_grad()
            value = loss(model, i)
            value.backward()
            optimizer.step()
            yield "loss", value
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("model", MODELS)
def test_training_has_stocks_bits_and_no_races(model, choice, mode):
    same(training(*MODELS[model]), mode, **CHOICES[choice])


@pytest.mark.parametrize("make", (sgd, adamw))
def test_updates_beside_backward_have_a_side_stream_too(make):
    same(training(make=make), "backward", fuse={"side_stream": True}, schedule="last")


def test_every_dw_and_its_update_are_on_the_side_stream_and_dx_is_not():
    model = net()
    optimizer = optfuse.fuse(sgd(model.parameters()), mode="backward", bucket_bytes=0)
    with optfuse.reorder(model, side_stream=True) as reordering:
        for i in range(2):
            loss = loss_of(model, i)
            seen = gpu.launches(loss.backward)
            optimizer.step()
            optimizer.zero_grad()
        assert all(row.on_side_stream for row in reordering.plan.rows)
        assert "after its dX, on the side stream" in str(reordering.plan)
    main = "the default stream of device 0"
    products = [stream != main for name, stream in seen if name == "aten::mm"]
    assert products == [False, True, False, True, True], "dX and dW in turn, no dX of the first"
    updates = {stream for name, stream in seen if name.startswith("of_cuda_")}
    assert len(updates) == 1 and main not in updates


def test_a_region_is_a_list_of_layers():
    model = net()
    with optfuse.reorder(model, "last", side_stream=["2"]) as reordering:
        loss_of(model, 0).backward()
        assert [row.on_side_stream for row in reordering.plan.rows] == [False, True, False]
        assert reordering.plan.choice == {"schedule": "last", "side_stream": ["2"]}
    with pytest.raises(optfuse.Error, match="'3' in side_stream=, which is no layer"):
        optfuse.reorder(model, side_stream=["3"])
    same(training(), "backward", side_stream=["2"])


def test_layers_on_the_cpu_stay_as_they_are():
    model = net("cpu")
    with optfuse.reorder(model, side_stream=True) as reordering:
        loss_of(model, 0).backward()
        assert not any(row.on_side_stream for row in reordering.plan.rows)
        assert "no side stream: on the CPU" in str(reordering.plan)


def accumulators(model):
    """The nodes that DistributedDataParallel holds: each keeps the stream that it was made on."""
    return [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]


def test_a_gradient_that_somebody_has_tied_to_a_stream_stays_there():
    def script(wrap, arrange):
        model = net()
        held = accumulators(model)
        arrange(model)
        loss_of(model, 0).backward()
        yield "gradients", [p.grad for p in model.parameters()]
        del held

    same(script, beside=False)
    model = net()
    held = accumulators(model)
    with optfuse.reorder(model, side_stream=True) as reordering:
        loss_of(model, 0).backward()
        assert "its gradient is added up on another one" in str(reordering.plan)
        del held
        loss_of(model, 0).backward()
        assert all(row.on_side_stream for row in reordering.plan.rows)


# Scripts that act on gradients and streams


def gradients_by_hand(wrap, arrange):
    model = net()
    arrange(model)
    for i in range(3):
        gradients = torch.autograd.grad(loss_of(model, i), list(model.parameters()))
        yield "gradients", [g * 2 for g in gradients]
        del gradients  # its memory is the next one's


def gradients_dropped_after_use(wrap, arrange):
    model = net()
    arrange(model)
    for i in range(3):
        loss_of(model, i).backward()
        yield "gradients", [p.grad * 2 for p in model.parameters()]
        model.zero_grad()


def gradients_added_up(wrap, arrange):
    model = net()
    loss_of(model, 9).backward()  # memory of this stream
    arrange(model)
    for i in range(3):
        loss_of(model, i).backward()
        yield "gradients", [p.grad * 2 for p in model.parameters()]
        model.zero_grad(set_to_none=i == 1)


def backward_called_on_another_stream(wrap, arrange):
    """Gradients are the forward pass's stream's, whoever calls backward()."""
    model, a = net(), gpu.stream()
    a.wait_stream(gpu.current())
    arrange(model)
    for i in range(3):
        with a:
            loss = loss_of(model, i)
        gpu.current().wait_stream(a)
        loss.backward()
        with a:
            yield "gradients", [p.grad * 2 for p in model.parameters()]
            model.zero_grad()
        del loss
    gpu.current().wait_stream(a)


def inputs_dropped_after_backward(wrap, arrange):
    """Activations' memory is free as soon as dW has been launched, and used at once."""
    model = net()
    arrange(model)
    for i in range(3):
        loss_of(model, i).backward()
        rubbish = [torch.full((8, n), float(i), device=NAME) for n in (6, 8, 400, 8, 6)]
        yield "rubbish", rubbish
        yield "gradients", [p.grad * 2 for p in model.parameters()]


def state_read_and_dropped(wrap, arrange):
    """State that backward makes is the stream's that trains."""
    model = net()
    arrange(model)
    optimizer = wrap(adamw(model.parameters()))
    for i in range(2):
        loss_of(model, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield "state", [v * 2 for p in model.parameters() for v in optimizer.state[p].values()]
    kept.clear()
    if wrap.fused:
        wrap.optimizers.clear()
    del optimizer
    gc.collect()


def computed_once_more(wrap, arrange):
    """The layer is the first in backward that asks for what checkpointing left out; it has no
    dX, but what else is computed again is for other nodes, of the layer's stream."""
    model = nn.Linear(6, 3).to(NAME)
    holder = nn.Sequential(model)
    arrange(holder)
    x = torch.full((4, 6), 0.5, device=NAME)
    v = torch.full((4, 3), 0.25, device=NAME, requires_grad=True)

    def both(x, v):
        return (v * 2).tanh(), model(x * 2)

    for _ in range(3):
        first, second = checkpoint(both, x, v, use_reentrant=False)
        (first.sum() + second.sum()).backward()
        yield "gradients", [p.grad * 1 for p in (*model.parameters(), v)]


SCRIPTS = (
    gradients_by_hand,
    gradients_dropped_after_use,
    gradients_added_up,
    backward_called_on_another_stream,
    inputs_dropped_after_backward,
    computed_once_more,
)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_in_order_in_stock_is_in_order_beside_it(script, choice):
    if script is computed_once_more and choice == "reverse_first":
        choice = "last"  # it has one layer
    same(script, **CHOICES[choice])


@pytest.mark.parametrize("mode", MODES)
def test_state_that_backward_makes_is_the_stream_s_that_trains(mode):
    same(state_read_and_dropped, mode)


def test_a_graph_kept_for_a_second_backward_pass():
    def script(wrap, arrange):
        model = net()
        arrange(model)
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        yield "once", [p.grad for p in model.parameters()]
        loss.backward()
        yield "twice", [p.grad for p in model.parameters()]

    same(script, schedule="last")


def test_a_gradient_of_gradients():
    def script(wrap, arrange):
        model = net()
        arrange(model)
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss_of(model, 0), parameters, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        yield "gradients", [p.grad * 2 for p in parameters]

    same(script)


@pytest.mark.parametrize("captures", (1, OF_THE_POOL))
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_an_iteration_under_capture(mode, captures):
    """The side stream joins the capture by autograd's events, and is joined before it ends. Of as
    many streams as the pool has, one is the side stream itself."""

    def script(wrap, arrange):
        model = net()
        arrange(model)
        optimizer = wrap(adamw(model.parameters(), capturable=True))
        for i in range(2):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            optimizer.step()
        for _ in range(captures):
            optimizer.zero_grad()
            drain_all()  # as torch.cuda.CUDAGraph.capture_begin does
            gpu.synchronize()
            graph = gpu.stream()
            graph.wait_stream(gpu.current())
            with captured(graph):
                loss_of(model, 2).backward()
                gradients = [] if mode == "backward" else [p.grad * 2 for p in model.parameters()]
                yield "gradients", gradients
                optimizer.step()
                yield "weights", [p * 1 for p in model.parameters()]
            gpu.current().wait_stream(graph)

    same(script, mode)


# Negative controls


def test_without_telling_the_allocator_what_dw_reads_its_memory_is_used_too_soon(monkeypatch):
    found = check_guard("dw_lend", inputs_dropped_after_backward, monkeypatch)
    assert any("record_stream is missing" in race for race in found)


@pytest.mark.parametrize("script", (gradients_by_hand, gradients_dropped_after_use))
def test_without_telling_it_whose_gradients_are_theirs_is(script, monkeypatch):
    found = check_guard("dw_return", script, monkeypatch)
    assert any("record_stream is missing" in race for race in found)


def test_without_our_join_the_layers_stream_races(monkeypatch):
    # A stream may be the side stream itself, of a pool that gives its streams in turn: not twice.
    check_guard("dw_join", backward_called_on_another_stream, monkeypatch, plays=2)


def test_without_our_care_state_belongs_to_the_side_stream(monkeypatch):
    check_guard("dw_state", state_read_and_dropped, monkeypatch, "backward")


def test_what_is_computed_once_more_would_race_on_the_side_stream(monkeypatch):
    check_guard("dw_unpack", computed_once_more, monkeypatch)
