# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios of optfuse.kfac() under DistributedDataParallel: every rank calls these functions."""

import contextlib
import functools

import torch
import torch.distributed as dist
from common import differing, refused, snapshot
from kfac_cases import SELDOM, Ours, Second, adamw, assert_close, sgd, through_a_file
from kfac_pair import (
    FUSIONS,
    LAYERS,
    MODES,
    Net,
    Pair,
    loss_of,
    same_on_all_ranks,
    share_of,
)
from ranks import STEPS, scenario_of

import optfuse

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)

# The same training, whatever is chosen

PLACEMENTS = ("balanced", "round_robin", "everywhere")
CHOICES = {
    f"{fusion} {placement}": {"options": {"fusion": fusion, "placement": placement}}
    for fusion in FUSIONS
    for placement in PLACEMENTS
}
NETWORKS = {"slow": (5e-3, 1.4e-9), "fast": (1e-9, 1e-6), "costly": (1e-9, 1e-6, 1e-4)}
for name, network in NETWORKS.items():
    for fusion in ("paper", "planned"):
        CHOICES[f"{fusion} {name} network"] = {"options": {"fusion": fusion, "network": network}}


@scenario("stock", **CHOICES)
def chosen(mode, options):
    Pair(mode, **SELDOM, **options).run()


OPTIONS = {
    "defaults": {},
    "sgd": {**SELDOM},
    "adamw": {**SELDOM, "make": adamw},
    "pi": {**SELDOM, "split": "pi"},
    "no clip": {**SELDOM, "kl_clip": None},
    "skip": {**SELDOM, "skip": ("twin.0",)},
    "by step": {
        **SELDOM,
        "damping": lambda t: 0.1 / (1 + t),
        "factors_every": lambda t: 1 + t // 6,
    },
    "views": {**SELDOM, "ddp": {"gradient_as_bucket_view": True}},
    "static": {**SELDOM, "ddp": {"static_graph": True}},
    "unused": {**SELDOM, "ddp": {"find_unused_parameters": True}},
}


@scenario(*MODES, **{name: {"options": options} for name, options in OPTIONS.items()})
def trained(mode, options):
    pair = Pair(mode, **options)
    if options.get("ddp", {}).get("gradient_as_bucket_view"):
        pair.wrap.prove = lambda: None  # such gradients are not deferred
    pair.run(layers=[name for name in LAYERS if name not in options.get("skip", ())])


@scenario("stock")
def a_group_of_its_own(mode):
    """The one that is given, and not the default one, is used."""
    group = dist.new_group()
    Pair(mode, ddp={"process_group": group}, **SELDOM).run()
    Pair(mode, process_group=group, **SELDOM).run()


@scenario("stock")
def every_rank_on_its_own(mode):
    """A model without DistributedDataParallel, with a group of one process for each rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    torch.manual_seed(0)
    models = [Net().double(), Net().double()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [sgd(model.parameters()) for model in models]
    ours = Ours(models[0], optimizers[0], process_group=groups[rank], **SELDOM)
    reference = Second(models[1], optimizers[1], **SELDOM)
    for i in range(STEPS + rank):  # not even as many steps
        for model, optimizer, one in zip(models, optimizers, (ours, reference), strict=True):
            optimizer.zero_grad()
            loss_of(model, share_of(i, rank, 4 + rank)).backward()
            one.step()
    for name in LAYERS:
        assert_close(name, ours.factors(name), reference.factors(name))
    assert_close("parameters", list(models[0].parameters()), list(models[1].parameters()))


@scenario("stock")
def ranks_that_know_different_numbers_of_groups(mode):
    """kfac() makes one of its own, which all of them must call by one name."""
    of_the_last = dist.new_group([dist.get_world_size() - 1])
    Pair(mode, **SELDOM).run()
    del of_the_last


@scenario("stock")
def some_ranks_that_know_different_numbers_of_groups_are_refused(_):
    """With three processes or more each would wait for the others by a name of its own."""
    some = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    if dist.get_rank() > 1 or dist.get_world_size() == 2:
        return
    model = Net()
    refused(
        lambda: optfuse.kfac(model, sgd(model.parameters()), process_group=some),
        "the processes of process_group know",
        way_out="as many groups as the others",
    )


# Accumulation


@scenario(*MODES, views={"views": True}, copies={"views": False})
def no_sync(mode, views):
    """Three passes a step, of which the last one reduces the gradients."""
    pair = Pair(mode, ddp={"gradient_as_bucket_view": views}, **SELDOM)
    if views:
        pair.wrap.prove = lambda: None  # such gradients are not deferred
    for i in range(STEPS):
        pair.zero_grad()
        for part in range(3):
            with pair.model.no_sync() if part < 2 else contextlib.nullcontext():
                pair.ours_alone(share_of(3 * i + part, pair.rank), 1 / 3)
        pair.ours.step()
        for part in range(3):
            pair.all_alone(3 * i + part, weight=1 / 3)
        pair.reference.step()
    pair.check()


@scenario("stock")
def micro_batches_of_unequal_sizes(mode):
    """The sizes differ between the passes, their sums do not differ between the ranks."""
    pair = Pair(mode, **SELDOM)
    sizes = [[5, 1], [2, 4], [3, 3], [1, 5]]
    for i in range(STEPS):
        pair.zero_grad()
        for part, n in enumerate(sizes[pair.rank]):
            with pair.model.no_sync() if part == 0 else contextlib.nullcontext():
                pair.ours_alone(share_of(2 * i + part, pair.rank, n), n / 6)
        pair.ours.step()
        for rank in range(pair.world):
            for part, n in enumerate(sizes[rank]):
                x = share_of(2 * i + part, rank, n)
                (loss_of(pair.alone, x) * (n / 6 / pair.world)).backward()
        pair.reference.step()
    pair.check()


# Unequal batches


@scenario(*MODES)
def rows_say_how_unequal_batches_are(mode):
    """Factors are those of the joint batch. The gradient is DistributedDataParallel's: the mean
    of the means."""
    sizes = [5, 9, 2, 7][: dist.get_world_size()]
    pair = Pair(mode, rows=sizes, **SELDOM)
    total = sum(sizes)
    for i in range(STEPS):
        pair.zero_grad()
        pair.ours_alone(share_of(i, pair.rank, sizes[pair.rank]))
        pair.ours.step()
        shares = [share_of(i, rank, n) for rank, n in enumerate(sizes)]
        for x in shares:
            (loss_of(pair.alone, x) / pair.world).backward()
        gradients = [p.grad.clone() for p in pair.alone.parameters()]
        pair.reference.discard()
        pair.other.zero_grad()
        for x in shares:
            (loss_of(pair.alone, x) * (len(x) / total)).backward()
        for p, gradient in zip(pair.alone.parameters(), gradients, strict=True):
            p.grad.copy_(gradient)
        pair.reference.step()
    pair.check()


@scenario("stock")
def equal_rows_change_nothing(mode):
    Pair(mode, rows=[6] * dist.get_world_size(), **SELDOM).run()


@scenario(*MODES, first={"when": 0}, later={"when": 4})
def unequal_batches_are_refused(mode, when):
    """On every rank, before anything has changed; and training can go on."""
    pair = Pair(mode, **SELDOM)
    for i in range(when):
        pair.step(i)
    pair.zero_grad()
    weights = snapshot(dict(pair.model.module.state_dict()))
    n = 5 if pair.rank == pair.world - 1 else 6
    pair.ours_alone(share_of(when, pair.rank, n))
    refused(pair.ours.step, way_out="rows=")
    for name, p in pair.model.module.state_dict().items():
        assert torch.equal(p, weights[name]), f"{name} was updated"
    pair.ours.discard()
    pair.run(when)


@scenario("stock")
def rows_that_are_wrong_are_refused(mode):
    """On every rank, though only one of them has other rows than it said."""
    world = dist.get_world_size()
    pair = Pair(mode, rows=[6] * (world - 1) + [5], **SELDOM)
    pair.ours_alone(share_of(0, pair.rank))
    refused(pair.ours.step, way_out="rows")
    refused(lambda: Pair(mode, rows=[6] * (world + 1)), way_out="rows")


# Beside what else happens


@scenario("stock")
def passes_of_one_rank_alone(mode):
    """One rank looks at something between two steps: evaluates, or discards a pass."""
    pair = Pair(mode, **SELDOM)
    for i in range(STEPS):
        if i % dist.get_world_size() == pair.rank:
            with torch.no_grad():
                loss_of(pair.model.module, share_of(100 + i, pair.rank, 11))
        if i % 3 == 1:
            with pair.model.no_sync():
                loss_of(pair.model, share_of(200 + i, pair.rank, 3)).backward()
            pair.ours.discard()
        pair.step(i)
    pair.check()


@scenario(*MODES)
def beside_reorder(mode):
    torch.manual_seed(0)
    pair = Pair(mode, **SELDOM)
    with optfuse.reorder(pair.model, "last"):
        pair.run()


# GradScaler


@scenario(*MODES)
def a_skipped_step_on_all_ranks(mode):
    """One rank's loss is infinite, then every rank's gradients are."""
    pair = Pair(mode, **SELDOM)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for i in range(STEPS):
        bad = i in (0, 3, 4)
        pair.zero_grad()
        loss = loss_of(pair.model, share_of(i, pair.rank))
        broken = bad and pair.rank == pair.world - 1
        scaler.scale(loss * float("inf") if broken else loss).backward()
        before = scaler.get_scale()
        scaler.step(pair.optimizer)
        scaler.update()
        assert (scaler.get_scale() < before) == bad
        if not bad:
            pair.all_alone(i)
            pair.reference.step()
    pair.check()


# Resuming


@scenario(*MODES, **{placement: {"placement": placement} for placement in PLACEMENTS})
def resumed_by_as_many_processes(mode, placement):
    """Bit-equal to training on, from a step whose inverses are older than the factors. DDP orders
    its buckets anew after its first iteration, so that stock's gradients would not be, with more
    than two processes; it does not with unused parameters."""
    options = {"factors_every": 2, "inverses_every": 5, "decay": 0.5, "placement": placement}
    options |= {"fusion": "planned", "ddp": {"find_unused_parameters": True}}
    first = Pair(mode, adamw, **options)
    for i in range(7):
        first.step(i)
    parts = (first.model.module, first.optimizer, first.ours.kfac)
    state = through_a_file([part.state_dict() for part in parts])
    for i in range(7, STEPS):
        first.step(i)
    second = Pair(mode, adamw, **options)
    for part, found in zip(
        (second.model.module, second.optimizer, second.ours.kfac), state, strict=True
    ):
        part.load_state_dict(found)
    for i in range(7, STEPS):
        second.zero_grad()
        loss_of(second.model, share_of(i, second.rank)).backward()
        second.ours.step()
    for p, q in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert not differing(p, q).any()
    for name in LAYERS:
        for a, b in zip(second.ours.factors(name), first.ours.factors(name), strict=True):
            assert not differing(a, b).any(), name
    first.check()


def alone(pair, options, groups):
    """A model of one process with ours, whose group has no other rank."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = pair.wrap(sgd(model.parameters()))
    return model, optimizer, Ours(model, optimizer, process_group=groups[pair.rank], **options)


@scenario(*MODES, to_many={"grows": True}, to_one={"grows": False})
def resumed_by_another_number_of_processes(mode, grows):
    """Five steps by one process on the joint batch, and the rest by all, or the other way."""
    options = {"factors_every": 2, "inverses_every": 3, "decay": 0.5}
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    pair = Pair(mode, **options)
    single = alone(pair, options, groups)
    many = (pair.model.module, pair.optimizer, pair.ours)

    def one_step(i):
        model, optimizer, ours = single
        optimizer.zero_grad()
        x = torch.cat([share_of(i, rank) for rank in range(pair.world)])
        loss_of(model, x).backward()
        ours.step()

    def many_step(i):
        pair.optimizer.zero_grad()
        pair.ours_alone(share_of(i, pair.rank))
        pair.ours.step()

    before, after = (one_step, many_step) if grows else (many_step, one_step)
    source, target = (single, many) if grows else (many, single)
    for i in range(5):
        before(i)
    state = through_a_file(
        [*(part.state_dict() for part in source[:2]), source[2].kfac.state_dict()]
    )
    for part, found in zip((*target[:2], target[2].kfac), state, strict=True):
        part.load_state_dict(found)
    for i in range(5, STEPS):
        after(i)
    for i in range(STEPS):
        pair.other.zero_grad()
        x = torch.cat([share_of(i, rank) for rank in range(pair.world)])
        loss_of(pair.alone, x).backward()
        pair.reference.step()
    model, _, ours = target
    for name in LAYERS:
        assert_close(name, ours.factors(name), pair.reference.factors(name))
    assert_close("parameters", list(model.parameters()), list(pair.alone.parameters()))
    same_on_all_ranks(list(model.parameters()))


# Refusals, and the end


@scenario("stock")
def sharded_models_are_refused(mode):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = Net().double()
    fully_shard(model)
    refused(lambda: optfuse.kfac(model, sgd(model.parameters())), way_out="DTensor")
    model, mesh = Net().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"hidden": ColwiseParallel()})
    refused(lambda: optfuse.kfac(model, sgd(model.parameters())), "'hidden'", way_out="DTensor")


@scenario("stock")
def a_layer_that_is_missing_everywhere(mode):
    """Every rank says so, and none waits for the others."""
    pair = Pair(mode, ddp={"find_unused_parameters": True}, **{**SELDOM, "factors_every": 1})
    loss_of(pair.model, share_of(0, pair.rank), head=False).backward()
    refused(pair.ours.step, "'head'", way_out='missing="skip"')


@scenario(*MODES)
def removed_in_the_middle(mode):
    """From then on all ranks train as without K-FAC, and a new one may begin."""
    pair = Pair(mode, **SELDOM)
    for i in range(3):
        pair.step(i)
    pair.ours.kfac.remove()
    for i in range(3, 6):
        pair.zero_grad()
        pair.ours_alone(share_of(i, pair.rank))
        pair.optimizer.step()
        pair.all_alone(i)
        pair.other.step()
        pair.reference.discard()
    pair.ours = Ours(pair.model, pair.optimizer, **SELDOM)
    pair.reference = Second(pair.alone, pair.other, **SELDOM)
    pair.run(6)
