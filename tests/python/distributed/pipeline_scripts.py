# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios of optfuse.pipeline.Pipeline: every rank calls these functions. What a pipeline
computes is compared with an explicit loop over events in one process."""

import copy
import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from common import assert_same
from delay_reference import Reference
from ranks import scenario_of
from torch import nn

import optfuse
from optfuse.pipeline import Pipeline, plan
from optfuse_layers.pipeline import planner
from optfuse_layers.pipeline.flow import behind
from optfuse_layers.pipeline.plan import STRATEGIES, SYNCHRONOUS, Place, of_plan

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)

BATCHES = 12  # a run
FREE = (0.0, 0.0)  # network
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
loss_fn = nn.functional.cross_entropy


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x):
        return x + self.body(x)


def mlp():
    torch.manual_seed(1)
    wide, narrow = nn.Linear(64, 96, bias=False), nn.Linear(96, 64)
    first, last = nn.Linear(32, 64), nn.Linear(64, 10)
    return nn.Sequential(
        first, nn.Tanh(), wide, nn.LayerNorm(96), narrow, nn.ReLU(inplace=True), last
    )


def conv_net():
    torch.manual_seed(2)
    first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, Residual(32), nn.Flatten(), nn.Linear(512, 10))


MODELS = {"mlp": (mlp, (8, 32)), "conv": (conv_net, (4, 3, 8, 8))}
# Seconds of F, dX, dW and update, of which the middle layer has most: what is divided is it.
COSTS = {
    "mlp": [(2, 2, 2, 0.1), (0.1,) * 4, (3, 3, 3, 0.1), (0.1,) * 4, (1, 1, 1, 0.1), (0.1,) * 4,
            (0.3, 0.3, 0.3, 0.1)],
    "conv": [(2, 2, 2, 0.1), (0.1,) * 4, (4, 4, 4, 0.1), (1, 1, 1, 0.1), (0.1,) * 4,
             (0.5, 0.5, 0.5, 0.1)],
}  # fmt: skip


def batches(shape, first, count):
    found = []
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 + i)
        x = torch.randn(shape, generator=generator)
        found.append((x, torch.randint(10, shape[:1], generator=generator)))
    return [x for x, _ in found], [y for _, y in found]


def planned(name, strategy, processes=None):
    build, shape = MODELS[name]
    processes = processes or dist.get_world_size()
    options = {"micro_batches": 4} if strategy in SYNCHRONOUS else {}
    return plan(
        build(), torch.zeros(shape), processes, strategy, network=FREE, costs=COSTS[name], **options
    )


def pipeline_of(name, made, make, **options):
    module = MODELS[name][0]()
    wrap = optfuse.fuse if options.pop("fused", False) else lambda optimizer: optimizer
    optimizer = wrap(make(module.parameters()))
    return module, Pipeline(made, module, loss_fn, optimizer, **options)


def reference_of(name, made, make, weights="stash"):
    late = behind(made)
    return Reference(
        MODELS[name][0](),
        made.delays,
        make,
        weights,
        [made.micro_batches * place.replicas for place in made.places],
        [late.get((n, 0), 0) for n in range(len(made.layers))],
        {n: (p.split, late[n, 1]) for n, p in enumerate(made.places) if p.split is not None},
    )


def mine(made, module):
    """The layers whose weights this process has, all batches considered."""
    rank = dist.get_rank()
    for n, place in enumerate(made.places):
        if place.forward <= rank < place.forward + place.replicas:
            yield n, module[n]


def check(made, module, reference):
    for n, layer in mine(made, module):
        wanted = dict(reference.newest[n])
        if made.places[n].replicas == 1:  # a replica's batch norm counts its own batches
            wanted |= dict(reference.layers[n].named_buffers())
        found = {name: layer.state_dict()[name] for name in wanted}
        assert_same(f"layer {n}", found, values(wanted))


def values(tensors):
    return {name: tensor.detach() for name, tensor in tensors.items()}


def same_layers(made, module, other):
    for n, layer in mine(made, module):
        assert_same(f"layer {n}", dict(layer.state_dict()), dict(other[n].state_dict()))


def resumes(made, build, drawn, drains=(False,), forgets=True):
    """A state goes on as what it was taken of. build(): a module and its pipeline. drawn(first):
    the batches of a run. forgets: whether what it is loaded into has trained before."""
    module, pipeline = build()
    for is_drained in drains:
        pipeline.run(*drawn(0))
        if is_drained:
            pipeline.drain()
        saved = copy.deepcopy(pipeline.state_dict())
        wanted = pipeline.run(*drawn(50))
        other, again = build()
        if forgets:
            again.run(*drawn(90))
        again.load_state_dict(saved)
        assert again.run(*drawn(50)) == wanted
        same_layers(made, module, other)


def compare(name, made, make, runs=(BATCHES, BATCHES), **options):
    shape = MODELS[name][1]
    module, pipeline = pipeline_of(name, made, make, **options)
    reference = reference_of(name, made, make, options.get("weights", "stash"))
    first = 0
    for count in runs:
        xs, ys = batches(shape, first, count)
        losses = pipeline.run(xs, ys)
        wanted = [float(reference.step(x, y, loss_fn)) for x, y in zip(xs, ys, strict=True)]
        assert losses == wanted, f"losses {losses}, not {wanted}"
        reference.end_groups()
        check(made, module, reference)
        first += count
    return module, pipeline, reference


@scenario(*STRATEGIES, **{f"{m} {o}": {"model": m, "make": o} for m in MODELS for o in OPTIMIZERS})
def trained(strategy, model, make):
    compare(model, planned(model, strategy), OPTIMIZERS[make])


@scenario("latest", "average", **{m: {"model": m} for m in MODELS})
def other_weights(weights, model):
    compare(model, planned(model, "1f1b"), OPTIMIZERS["adamw"], weights=weights)
    compare(model, planned(model, "intra"), OPTIMIZERS["sgd"], weights=weights)
    compare(
        model, planned(model, "layerpipe"), OPTIMIZERS["momentum"], (12, 5, 12), weights=weights
    )


@scenario("1f1b", "layerpipe")
def fused(strategy):
    compare("mlp", planned("mlp", strategy), OPTIMIZERS["adamw"], fused=True)


@scenario("layerpipe")
def a_part_of_dx_is_elsewhere(strategy):
    """The scenarios above cover divided layers and late updates."""
    if dist.get_world_size() != 2:
        return
    for model in MODELS:
        made = planned(model, strategy)
        places = made.places
        assert any(place.split is not None for place in places), str(made)
        assert any(place.weight_gradient != place.forward for place in places), str(made)
        assert max(made.delays) > 1


@scenario("1f1b", "layerpipe", "pipedream_replicated")
def delays_are_those_of_one_process(strategy):
    """Forward(delay=) in one process, by the same plan."""
    made = planned("mlp", strategy)
    if any(place.replicas > 1 for place in made.places):
        return  # groups of batches: see Reference
    build, shape = MODELS["mlp"]
    make = OPTIMIZERS["adamw"]
    alone = build()
    delay = dict(zip(alone, made.delays, strict=True))
    opt = optfuse.fuse(make(alone.parameters()), optfuse.Forward(delay=delay))
    xs, ys = batches(shape, 0, BATCHES)
    for x, y in zip(xs, ys, strict=True):
        opt.zero_grad()
        loss_fn(alone(x), y).backward()
        opt.step()
    optfuse.drain(opt)
    module, pipeline = pipeline_of("mlp", made, make)
    pipeline.run(xs, ys)
    same_layers(made, module, alone)


@scenario("1f1b", "layerpipe", "pipedream_replicated", "gpipe")
def drained(strategy):
    """After drain() training begins anew, with all updates."""
    make = OPTIMIZERS["sgd"]
    made = planned("mlp", strategy)
    module, pipeline, reference = compare("mlp", made, make)
    pipeline.drain()
    again = reference_of("mlp", made, make)
    for mine, theirs in zip(again.newest, reference.newest, strict=True):
        for name, p in mine.items():
            p.detach().copy_(theirs[name])
    again.versions = [[again._copy(i)] for i in range(len(again.layers))]
    xs, ys = batches(MODELS["mlp"][1], 100, BATCHES)
    losses = pipeline.run(xs, ys)
    assert losses == [float(again.step(x, y, loss_fn)) for x, y in zip(xs, ys, strict=True)]
    check(made, module, again)


@scenario("1f1b")
def a_process_without_weights_is_drained_too(strategy):
    if dist.get_world_size() != 2:
        return
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 10), nn.Tanh(), nn.Tanh())
    costs = [(1, 1, 1, 0.1), (1.5, 1.5, 0, 0), (1.5, 1.5, 0, 0)]
    made = plan(model, torch.zeros(8, 32), 2, strategy, network=FREE, costs=costs)
    assert made.places[1].forward == 0 and made.places[2].forward == 1
    pipeline = Pipeline(made, model, loss_fn, OPTIMIZERS["sgd"](model.parameters()))
    for _ in range(2):
        assert len(pipeline.run(*batches((8, 32), 0, 4))) == 4
        pipeline.drain()


@scenario("stash", "latest", "average", **{s: {"strategy": s} for s in ("1f1b", "layerpipe")})
def resumed(weights, strategy):
    made = planned("conv", strategy)
    build = functools.partial(pipeline_of, "conv", made, OPTIMIZERS["adamw"], weights=weights)
    drawn = functools.partial(batches, MODELS["conv"][1], count=BATCHES)
    resumes(made, build, drawn, drains=(False, True))


@scenario("1f1b", "layerpipe")
def one_long_run_is_two(strategy):
    make = OPTIMIZERS["momentum"]
    made = planned("mlp", strategy)
    compare("mlp", made, make, runs=(2 * BATCHES,))
    compare("mlp", made, make, runs=(1, 2, BATCHES, 3))


@scenario("stash", "latest", "average", **{m: {"model": m} for m in MODELS})
def a_group_of_replicas_may_be_incomplete(weights, model):
    """A replica without a batch in it makes the update all the same."""
    made = replicated(model)
    assert max(made.delays) == (dist.get_world_size() > 2)
    runs = (BATCHES + 1, 1, BATCHES - 1, BATCHES)
    _, pipeline, _ = compare(model, made, OPTIMIZERS["momentum"], runs[:1], weights=weights)
    for of in pipeline._weights.values():  # nothing is kept for a batch that has not come
        assert len(of._held) <= of.delay
        assert all(len(part.held) <= part.behind for part in of._parts)
    compare(model, made, OPTIMIZERS["momentum"], runs, weights=weights)
    compare(model, made, OPTIMIZERS["adamw"], runs[:2], weights=weights, fused=True)


def replicated(model):
    """All processes on the first stage but the last one, which has the rest."""
    world = dist.get_world_size()
    made = planned(model, "pipedream_replicated")
    first = world - 1 if world > 2 else 2
    cut = 3 if world > 2 else len(made.places)
    places = [
        Place(on, on, on, replicas=r)
        for on, r in [(0, first)] * cut + [(first, 1)] * (len(made.places) - cut)
    ]
    of = replace(made, places=tuple(places))
    return replace(of, delays=tuple(planner.delays(of_plan(of))))


@scenario("pipedream_replicated")
def a_state_saved_behind_an_incomplete_group_is_resumed(strategy):
    made = replicated("mlp")
    build = functools.partial(pipeline_of, "mlp", made, OPTIMIZERS["adamw"])
    drawn = functools.partial(batches, MODELS["mlp"][1], count=BATCHES + 1)
    resumes(made, build, drawn, forgets=False)


@scenario("1f1b", "layerpipe", "intra")
def versions_take_what_is_announced(strategy):
    make = OPTIMIZERS["adamw"]
    made = planned("conv", strategy)
    module, pipeline = pipeline_of("conv", made, make)
    announced = pipeline.stash_bytes
    assert announced == sum(
        made.delays[n] * sum(p.nbytes for p in layer.parameters())
        for n, layer in mine(made, module)
    )
    pipeline.run(*batches(MODELS["conv"][1], 0, BATCHES))
    kept = {
        tensor.untyped_storage()._cdata: tensor.nbytes
        for weights in pipeline._weights.values()
        for version in weights._held.values()
        for tensor in version.values()
    }
    assert sum(kept.values()) == announced
    pipeline.drain()
    assert not any(weights._held for weights in pipeline._weights.values())
    _, average = pipeline_of("conv", made, make, weights="average")
    if max(made.delays) > 1 and announced:
        assert average.stash_bytes < announced


@scenario("1f1b", "layerpipe")
def a_delay_too_long_or_too_short_is_seen(strategy):
    """A fault that the scenarios above would find."""
    make = OPTIMIZERS["sgd"]
    made = planned("mlp", strategy)
    module, pipeline = pipeline_of("mlp", made, make)
    xs, ys = batches(MODELS["mlp"][1], 0, BATCHES)
    losses = pipeline.run(xs, ys)
    for off in (1, -1):
        reference = reference_of("mlp", made, make)
        reference.delays[0] += off
        assert losses != [float(reference.step(x, y, loss_fn)) for x, y in zip(xs, ys, strict=True)]
