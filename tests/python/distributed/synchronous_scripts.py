# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios of pipelines without delays: every rank calls these functions. What a pipeline computes
is compared with plain training in one process, which adds up the gradients of as many
micro-batches by backward()."""

import functools
import os
from unittest import mock

import torch
import torch.distributed as dist
from common import refused
from pipeline_scripts import COSTS, FREE, MODELS, batches, loss_fn, resumes, same_layers
from ranks import scenario_of
from torch import nn

import optfuse
from optfuse.pipeline import Pipeline, plan
from optfuse_layers.pipeline.forwarding import Forwarding
from optfuse_layers.pipeline.plan import FORWARDING, SYNCHRONOUS

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)

MICRO = 4  # micro-batches a step
GROUPS = 50 if "3" in os.environ.get("OPTFUSE_TEST_WORLDS", "") else 4  # tests/run --full: 50
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
WRAPS = {
    "stock": lambda optimizer: optimizer,
    "forward": optfuse.fuse,
    "backward": lambda optimizer: optfuse.fuse(optimizer, mode="backward"),
}


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.all = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.all(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def transformer():
    torch.manual_seed(3)
    blocks = [Attention(16) for _ in range(4)]
    return nn.Sequential(nn.Embedding(32, 16), *blocks, nn.Flatten(), nn.Linear(16 * 6, 10))


def tokens(shape, first, count):
    xs, ys = batches((shape[0], 1), first, count)
    draw = torch.Generator().manual_seed(first)
    return [torch.randint(32, shape, generator=draw) for _ in xs], ys


NETS = {**MODELS, "transformer": (transformer, (4, 6))}
TIMES = {
    **COSTS,
    "transformer": [(0.1, 0.1, 0.1, 0.1), *[(1, 1, 1, 0.1)] * 4, (0.1,) * 4, (1,) * 4],
}


def planned(name, strategy, processes=None, **options):
    build, shape = NETS[name]
    example = tokens(shape, 0, 1)[0][0] if name == "transformer" else torch.zeros(shape)
    processes = processes or dist.get_world_size()
    options = {"network": FREE, "costs": TIMES[name], "micro_batches": MICRO} | options
    return plan(build(), example, processes, strategy, **options)


def data(name, first, count):
    make = tokens if name == "transformer" else batches
    return make(NETS[name][1], first, count)


def pipeline_of(name, made, make, wrap="stock"):
    module = NETS[name][0]()
    return module, Pipeline(made, module, loss_fn, WRAPS[wrap](make(module.parameters())))


def one_process(module, optimizer, xs, ys):
    losses = []
    for i in range(0, len(xs), MICRO):
        optimizer.zero_grad()
        for x, y in zip(xs[i : i + MICRO], ys[i : i + MICRO], strict=True):
            loss = loss_fn(module(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def compare(name, made, make, wrap="stock", groups=(2, GROUPS - 2)):
    module, pipeline = pipeline_of(name, made, make, wrap)
    plain = NETS[name][0]()
    optimizer = make(plain.parameters())
    first = 0
    for count in groups:
        xs, ys = data(name, first, count * MICRO)
        assert pipeline.run(xs, ys) == one_process(plain, optimizer, xs, ys)
        same_layers(made, module, plain)
        first += count * MICRO
    return module, pipeline, plain


@scenario(
    *SYNCHRONOUS,
    **{
        f"{net} {make} {wrap}": {"net": net, "make": make, "wrap": wrap}
        for net in NETS
        for make in OPTIMIZERS
        for wrap in WRAPS
    },
)
def trained(strategy, net, make, wrap):
    compare(net, planned(net, strategy), OPTIMIZERS[make], wrap)


def as_if_late(self, task, may_run=Forwarding._may_run):
    """Messages come when no dW is left to run."""
    return self._next_late() is None and may_run(self, task)


def as_if_early(self, task):
    return self._may_begin(task)


@scenario(*FORWARDING, **{f"{most} in flight": {"most": most} for most in (0, 2)})
def messages_change_the_order_and_no_bit(strategy, most):
    made, orders = planned("mlp", strategy, in_flight=most), []
    for may_run in (as_if_late, as_if_early, Forwarding._may_run):
        played = []

        def noted(self, task, played=played, play=Forwarding._play):
            played.append(task)
            play(self, task)
            assert not most or len(self._open) <= most, f"{len(self._open)} batches are open"

        with (
            mock.patch.object(Forwarding, "_may_run", may_run),
            mock.patch.object(Forwarding, "_play", noted),
        ):
            compare("mlp", made, OPTIMIZERS["adamw"], "backward", (1, 1))
        orders.append(played)
    assert most or any(said(orders[0] != orders[1]))


def said(mine):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


@scenario("fast_forward")
def gradients_added_in_another_order_are_seen(strategy):
    """A fault that the scenarios above would find: the last dW of a layer first."""

    def last(self):
        return max(self._ready(), key=self._late.__getitem__, default=None)

    made = planned("mlp", strategy, in_flight=0)
    module, pipeline = pipeline_of("mlp", made, OPTIMIZERS["sgd"])
    plain = NETS["mlp"][0]()
    xs, ys = data("mlp", 0, MICRO)
    one_process(plain, OPTIMIZERS["sgd"](plain.parameters()), xs, ys)
    with (
        mock.patch.object(Forwarding, "_next_late", last),
        mock.patch.object(Forwarding, "_run_late_until", lambda self, task: None),
    ):
        pipeline.run(xs, ys)
    try:
        same_layers(made, module, plain)
    except AssertionError:
        assert any(said(True))
    else:
        assert any(said(False))


@scenario(*SYNCHRONOUS, **{wrap: {"wrap": wrap} for wrap in WRAPS})
def resumed(strategy, wrap):
    made = planned("conv", strategy)
    build = functools.partial(pipeline_of, "conv", made, OPTIMIZERS["adamw"], wrap)
    resumes(made, build, functools.partial(data, "conv", count=2 * MICRO))


@scenario(
    *SYNCHRONOUS,
    **{
        f"{net} adamw {wrap}": {"net": net, "wrap": wrap}
        for net in ("transformer", "conv")
        for wrap in WRAPS
    },
)
def the_last_group_may_be_incomplete(strategy, net, wrap):
    """The next run begins with a new group."""
    made, make = planned(net, strategy), OPTIMIZERS["adamw"]
    module, pipeline = pipeline_of(net, made, make, wrap)
    plain = NETS[net][0]()
    optimizer = make(plain.parameters())
    for first, count in ((0, 2 * MICRO + 1), (20, MICRO - 1), (30, MICRO), (40, MICRO + 2)):
        xs, ys = data(net, first, count)
        assert pipeline.run(xs, ys) == one_process(plain, optimizer, xs, ys)
        same_layers(made, module, plain)


@scenario(*FORWARDING)
def one_long_run_is_two(strategy):
    compare("mlp", planned("mlp", strategy), OPTIMIZERS["sgd"], groups=(1, 3, 1))


@scenario(*SYNCHRONOUS, **{wrap: {"wrap": wrap} for wrap in ("forward", "backward")})
def losses_are_weighted_by_rows(strategy, wrap):
    """The last micro-batch is smaller. All bits are those of one process that weights likewise."""
    module, plain = NETS["mlp"][0](), NETS["mlp"][0]()
    made = planned("mlp", strategy)
    optimizer = WRAPS[wrap](OPTIMIZERS["adamw"](module.parameters()))
    pipeline = Pipeline(made, module, loss_fn, optimizer, losses="mean")
    stock = OPTIMIZERS["adamw"](plain.parameters())
    for first, count in ((0, MICRO), (MICRO, MICRO - 1)):
        xs, ys = data("mlp", first, count)
        xs[-1], ys[-1] = xs[-1][:3], ys[-1][:3]
        rows = sum(map(len, xs))
        stock.zero_grad()
        wanted = []
        for x, y in zip(xs, ys, strict=True):
            loss = loss_fn(plain(x), y)
            (loss * (len(x) / rows)).backward()
            wanted.append(float(loss.detach()))
        stock.step()
        assert pipeline.run(xs, ys) == wanted
        same_layers(made, module, plain)


class Head(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x.mean(1), self.weight)


def tied(copies=False):
    torch.manual_seed(5)
    embedding, blocks = nn.Embedding(10, 16), [Attention(16) for _ in range(3)]
    weight = embedding.weight
    head = Head(nn.Parameter(weight.detach().clone()) if copies else weight)
    return nn.Sequential(embedding, *blocks, head)


def words(first, count):
    xs, ys = tokens((4, 6), first, count)
    return [x % 10 for x in xs], ys


def tied_pipeline(strategy, make, wrap, shared, model):
    costs = [(1, 1, 1, 0.1)] * len(model)
    made = plan(
        model, words(0, 1)[0][0], dist.get_world_size(), strategy, network=FREE, costs=costs,
        micro_batches=MICRO,
    )  # fmt: skip
    optimizer = WRAPS[wrap](make(model.parameters()))
    return made, Pipeline(made, model, loss_fn, optimizer, shared=shared)


@scenario(*SYNCHRONOUS, **{w: {"wrap": w} for w in WRAPS})
def an_embedding_tied_to_the_head_has_the_bits_of_one_process(strategy, wrap):
    make, model, plain = OPTIMIZERS["adamw"], tied(), tied()
    made, pipeline = tied_pipeline(strategy, make, wrap, "each", model)
    optimizer = make(plain.parameters())
    for first, count in ((0, 2 * MICRO), (2 * MICRO, MICRO + 1)):
        xs, ys = words(first, count)
        assert pipeline.run(xs, ys) == one_process(plain, optimizer, xs, ys)
        same_layers(made, model, plain)


@scenario(*SYNCHRONOUS, **{w: {"wrap": w} for w in WRAPS})
def an_embedding_tied_to_the_head_is_added_as_the_stages_do(strategy, wrap):
    """The reference has two weights, whose gradients it adds up apart, and then both."""
    make, model, plain = OPTIMIZERS["sgd"], tied(), tied(copies=True)
    made, pipeline = tied_pipeline(strategy, make, wrap, "sums", model)
    optimizer = make(plain.parameters())
    for first, count in ((0, MICRO), (MICRO, MICRO - 1), (2 * MICRO, MICRO)):
        xs, ys = words(first, count)
        optimizer.zero_grad()
        losses = []
        for x, y in zip(xs, ys, strict=True):
            loss = loss_fn(plain(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
        total = plain[0].weight.grad + plain[-1].weight.grad
        plain[0].weight.grad, plain[-1].weight.grad = total, total.clone()
        optimizer.step()
        assert pipeline.run(xs, ys) == losses
        same_layers(made, model, plain)


def other_numbers(model):
    with torch.no_grad():
        model[0].weight.add_(1)


def other_sharing(model):
    model[-1].weight = nn.Parameter(model[-1].weight.detach().clone())


@scenario(
    "fast_forward",
    numbers={"change": other_numbers, "why": "has other numbers on process 1 than on process 0"},
    sharing={"change": other_sharing, "why": "share other weights"},
)
def shared_weights_that_differ_between_processes_are_refused(strategy, change, why):
    model = tied()
    if dist.get_rank():
        change(model)
    make = OPTIMIZERS["sgd"]
    refused(lambda: tied_pipeline(strategy, make, "stock", "sums", model), way_out=why)


@scenario("fast_forward")
def sums_of_stages_are_told_from_those_of_one_process(strategy):
    """A fault that the scenarios above would find."""
    make, model, plain = OPTIMIZERS["sgd"], tied(), tied()
    _, pipeline = tied_pipeline(strategy, make, "stock", "sums", model)
    xs, ys = words(0, MICRO)
    one_process(plain, make(plain.parameters()), xs, ys)
    pipeline.run(xs, ys)
    differs = model[0].weight.view(torch.int32) != plain[0].weight.view(torch.int32)
    assert any(said(bool(differs.any())))


@scenario("modulo")
def layers_are_dealt_in_chunks(strategy):
    for chunk in (2, 3):
        made = planned("conv", strategy, chunk=chunk)
        assert [p.forward for p in made.places] == [
            n // chunk % dist.get_world_size() for n in range(len(made.layers))
        ]
        compare("conv", made, OPTIMIZERS["adamw"], "forward", (1, 1))
