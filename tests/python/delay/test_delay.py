# SPDX-License-Identifier: BSD-3-Clause
"""Forward(delay=...): updates that arrive late, beside an explicit loop over events."""

import copy
import math
import weakref

import pytest
import torch
from common import assert_same
from delay_reference import Reference
from torch import nn

import optfuse

STEPS = 12
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, foreach=False),
}


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10)
    )


def conv_net():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2),
        nn.GroupNorm(4, 24),
        nn.Flatten(),
        nn.Linear(24 * 9, 10),
    )


MODELS = {"mlp": (mlp, (16, 20)), "conv": (conv_net, (6, 3, 8, 8))}
DELAYS = {"mlp": (5, 0, 2, 3, 1), "conv": (4, 0, 3, 2, 0, 0)}


def batch(shape, i):
    torch.manual_seed(1000 + i)
    return torch.randn(shape), torch.randint(10, (shape[0],))


loss_fn = nn.functional.cross_entropy


def values(tensors):
    return [t.detach().clone() for t in tensors]


def check(mine, theirs):
    assert_same("weights", values(mine), values(theirs))


def train(model, optimizer, shape, steps, before_step=lambda params: None):
    for i in steps:
        x, target = batch(shape, i)
        optimizer.zero_grad()
        loss_fn(model(x), target).backward()
        before_step(list(model.parameters()))
        optimizer.step()


def late(optimizer, steps, weights="stash", **options):
    return optfuse.fuse(optimizer, optfuse.Forward(delay=optfuse.Delay(steps, weights)), **options)


def fused(name, delays, make, weights="stash"):
    build, shape = MODELS[name]
    model = build()
    delay = dict(zip(model, delays, strict=True))
    return model, late(make(model.parameters()), delay, weights), shape


@pytest.mark.parametrize("weights", ["stash", "latest", "average"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_mixed_delays(name, optimizer, weights):
    make = OPTIMIZERS[optimizer]
    model, opt, shape = fused(name, DELAYS[name], make, weights=weights)
    reference = Reference(MODELS[name][0](), DELAYS[name], make, weights)
    for i in range(STEPS):
        train(model, opt, shape, [i])
        reference.step(*batch(shape, i), loss_fn)
        check(model.parameters(), reference.shown())
    optfuse.drain(opt)
    check(model.parameters(), reference.drained())
    optfuse.drain(opt)  # again: nothing is left
    check(model.parameters(), reference.drained())


def test_modes_differ():
    """Each mode computes something else, so the comparisons above tell them apart."""
    found = []
    for weights in ("stash", "latest", "average"):
        model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["adamw"], weights=weights)
        train(model, opt, shape, range(STEPS))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[1], found[2])


def test_a_step_too_early_or_too_late_is_seen():
    """A fault that the comparisons above would find."""
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["adamw"])
    train(model, opt, shape, range(STEPS))
    for i, off in ((0, 1), (0, -1), (4, 1), (4, -1)):
        delays = list(DELAYS["mlp"])
        delays[i] += off
        other, late, _ = fused("mlp", delays, OPTIMIZERS["adamw"])
        train(other, late, shape, range(STEPS))
        with pytest.raises(AssertionError):
            check(model.parameters(), other.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_delay_is_plain_training(optimizer):
    make = OPTIMIZERS[optimizer]
    model, opt, shape = fused("mlp", (0, 0, 0, 0, 0), make)
    plain = mlp()
    stock = make(plain.parameters())
    train(model, opt, shape, range(STEPS))
    train(plain, stock, shape, range(STEPS))
    check(model.parameters(), plain.parameters())
    assert optfuse.summary(opt).delayed == 0
    # Left pending, as without a delay, but for what is recorded.
    assert (optfuse.summary(opt).at_use > 0) == (optimizer != "adafactor")


def test_largest_stable_rate():
    """lr times curvature of a quadratic: 2 sin(pi / (2 (2D + 1))), within 1 %. One parameter for
    each delay and rate, in a group of its own."""
    known = {0: 2.0, 1: 1.0, 2: 0.618, 4: 0.347, 8: 0.185}
    formula = {delay: 2 * math.sin(math.pi / (2 * (2 * delay + 1))) for delay in known}
    assert formula == pytest.approx(known, rel=0.01)
    cells = [(delay, part) for delay in known for part in (0.9, 0.99, 1.01, 1.1)]
    weights = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in cells]
    groups = [
        {"params": [w], "lr": part * formula[delay]}
        for w, (delay, part) in zip(weights, cells, strict=True)
    ]
    delays = {w: delay for w, (delay, _) in zip(weights, cells, strict=True)}
    opt = late(torch.optim.SGD(groups, lr=0.1), delays)
    for _ in range(1500):
        opt.zero_grad()
        (0.5 * torch.cat(weights).square().sum()).backward()
        opt.step()
    for w, (delay, part) in zip(weights, cells, strict=True):
        assert (abs(w.item()) < 1) == (part < 1), f"D = {delay}, {part} of the limit: {w.item()}"


@pytest.mark.parametrize("weights", ["stash", "latest", "average"])
def test_resume(weights):
    make = OPTIMIZERS["adamw"]
    model, opt, shape = fused("mlp", DELAYS["mlp"], make, weights=weights)
    train(model, opt, shape, range(4))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, shape, range(4, STEPS))
    again, other, _ = fused("mlp", DELAYS["mlp"], make, weights=weights)
    train(again, other, shape, range(50, 57))  # what it has by then is replaced
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    train(again, other, shape, range(4, STEPS))
    check(again.parameters(), model.parameters())
    optfuse.drain(opt)
    optfuse.drain(other)
    check(again.parameters(), model.parameters())


def test_stock_ignores_the_queue():
    make = OPTIMIZERS["adamw"]
    model, opt, shape = fused("mlp", DELAYS["mlp"], make)
    train(model, opt, shape, range(4))
    stock = make(mlp().parameters())
    stock.load_state_dict(opt.state_dict())
    assert set(stock.state_dict()) == {"state", "param_groups"}
    optfuse.drain(opt)
    opt.load_state_dict(stock.state_dict())  # a checkpoint without a queue
    train(model, opt, shape, range(4, 8))


def test_a_queue_of_other_delays_is_refused():
    make = OPTIMIZERS["sgd"]
    model, opt, shape = fused("mlp", DELAYS["mlp"], make)
    train(model, opt, shape, range(4))
    saved = opt.state_dict()
    other_model, other, _ = fused("mlp", (1, 0, 1, 1, 1), make)
    before = values(other_model.parameters())
    with pytest.raises(optfuse.Error, match="other delays.*Nothing was loaded"):
        other.load_state_dict(saved)
    _, latest, _ = fused("mlp", DELAYS["mlp"], make, weights="latest")
    with pytest.raises(optfuse.Error, match="other weights=.*Nothing was loaded"):
        latest.load_state_dict(saved)
    check(other_model.parameters(), before)


def test_clipping_acts_on_the_newest_gradient():
    make = OPTIMIZERS["momentum"]

    def clip(params):
        torch.nn.utils.clip_grad_norm_(params, 0.1, foreach=False)

    reference = Reference(mlp(), DELAYS["mlp"], make)
    model, opt, shape = fused("mlp", DELAYS["mlp"], make)
    for i in range(STEPS):
        train(model, opt, shape, [i], clip)
        reference.step(*batch(shape, i), loss_fn, clip)
    check(model.parameters(), reference.shown())


def test_loss_scaling_skips_a_batch():
    """A step that GradScaler skips is no update, and delays none."""
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["adamw"])
    reference = Reference(mlp(), DELAYS["mlp"], OPTIMIZERS["adamw"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for i in range(STEPS):
        x, target = batch(shape, i)
        opt.zero_grad()
        scaler.scale(loss_fn(model(x), target)).backward()
        if i == 5:
            model[0].weight.grad[0, 0] = math.inf
        else:
            reference.step(x, target, loss_fn)
        scaler.step(opt)
        scaler.update()
    check(model.parameters(), reference.shown())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_stay_the_users(set_to_none):
    """step() keeps nothing of .grad: zeroing it in place, or adding to it, changes no update."""
    make = OPTIMIZERS["sgd"]
    model, opt, shape = fused("mlp", DELAYS["mlp"], make)
    reference = Reference(mlp(), DELAYS["mlp"], make)
    for i in range(STEPS):
        x, target = batch(shape, i)
        opt.zero_grad(set_to_none=set_to_none)
        loss_fn(model(x), target).backward()
        opt.step()
        for p in model.parameters():
            p.grad.add_(1.0)
        reference.step(x, target, loss_fn)
        check(model.parameters(), reference.shown())


def test_schedules_count_when_the_update_is_made():
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["adamw"])
    reference = Reference(mlp(), DELAYS["mlp"], OPTIMIZERS["adamw"])
    for i in range(STEPS):
        for each in (opt, *filter(None, reference.optimizers)):
            each.param_groups[0]["lr"] = 0.01 / (1 + i)
        train(model, opt, shape, [i])
        reference.step(*batch(shape, i), loss_fn)
    check(model.parameters(), reference.shown())


def test_bytes_that_wait():
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["adamw"])
    announced = sum(
        delay * sum(p.nbytes for p in layer.parameters())
        for layer, delay in zip(model, DELAYS["mlp"], strict=True)
    )
    assert optfuse.summary(opt).delay_bytes == announced
    assert "arrive late" in str(optfuse.summary(opt))
    train(model, opt, shape, range(STEPS))
    entries = opt.state_dict()["optfuse_delay"]["parameters"].values()
    assert sum(v.nbytes for entry in entries for v in entry["versions"]) == announced


def test_a_write_that_would_be_lost_is_refused():
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["sgd"])
    train(model, opt, shape, range(3))
    with torch.no_grad():
        model[2].weight.zero_()
    before = values(model.parameters())
    with pytest.raises(optfuse.Error, match=r"parameter 2 .*was changed outside of step"):
        train(model, opt, shape, [3])
    check(model.parameters(), before)
    optfuse.drain(opt)
    with torch.no_grad():
        model[2].weight.zero_()
    train(model, opt, shape, [3])
    assert not model[2].weight.any()  # seen by the next batches, and updated behind them
    optfuse.drain(opt)
    assert model[2].weight.any()


def test_failed_step_changes_nothing():
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["adamw"])
    train(model, opt, shape, range(7))
    before = values(model.parameters())
    saved = copy.deepcopy(opt.state_dict())
    x, target = batch(shape, 7)
    opt.zero_grad()
    loss_fn(model(x), target).backward()
    exp_avg = opt.state[model[0].weight]["exp_avg"]
    opt.state[model[0].weight]["exp_avg"] = exp_avg[:1]
    with pytest.raises(optfuse.Error):
        opt.step()
    opt.state[model[0].weight]["exp_avg"] = exp_avg
    check(model.parameters(), before)
    versions = [e["versions"] for e in opt.state_dict()["optfuse_delay"]["parameters"].values()]
    kept = [e["versions"] for e in saved["optfuse_delay"]["parameters"].values()]
    assert all(
        torch.equal(a, b)
        for mine, theirs in zip(versions, kept, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    opt.step()


def test_memory_that_others_know_keeps_its_place():
    """Parameters in one flat buffer, and one whose address is known, are exchanged by value."""
    make = OPTIMIZERS["adamw"]
    model = mlp()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    addresses = [p.data_ptr() for p in model.parameters()]
    opt = late(make(model.parameters()), dict(zip(model, DELAYS["mlp"], strict=True)))
    other = mlp()
    known = other[0].weight
    address = known.data_ptr()
    delay = dict(zip(other, DELAYS["mlp"], strict=True))
    second = late(make(other.parameters()), delay, eager=[known])
    reference = Reference(mlp(), DELAYS["mlp"], make)
    for i in range(STEPS):
        train(model, opt, MODELS["mlp"][1], [i])
        train(other, second, MODELS["mlp"][1], [i])
        reference.step(*batch(MODELS["mlp"][1], i), loss_fn)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert known.data_ptr() == address
    assert torch.equal(flat, torch.cat([p.detach().flatten() for p in model.parameters()]))
    check(model.parameters(), reference.shown())
    check(other.parameters(), reference.shown())


def test_a_graph_that_outlives_step_raises_as_in_stock():
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["sgd"])
    train(model, opt, shape, range(6))
    x, target = batch(shape, 6)
    kept = loss_fn(model(x), target)
    train(model, opt, shape, [6])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_second_derivatives_of_other_weights_are_refused():
    model, opt, shape = fused("mlp", DELAYS["mlp"], OPTIMIZERS["sgd"], weights="latest")
    train(model, opt, shape, range(6))
    x, target = batch(shape, 6)
    with pytest.raises(optfuse.Error, match="create_graph=True"):
        loss_fn(model(x.requires_grad_()), target).backward(create_graph=True)


@pytest.mark.parametrize("weights", ["stash", "latest", "average"])
def test_autocast(weights):
    """The weight that dX reads has the type that autocast gives the weight."""
    model, opt, shape = fused("mlp", (2, 0, 2, 2, 2), OPTIMIZERS["adamw"], weights=weights)
    for i in range(6):
        x, target = batch(shape, i)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(x), target)
        loss.backward()
        opt.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("weights", ["stash", "latest", "average"])
def test_copies_and_ends(weights):
    make = OPTIMIZERS["adamw"]
    model, opt, shape = fused("mlp", DELAYS["mlp"], make, weights=weights)
    train(model, opt, shape, range(4))
    twin_model, twin = copy.deepcopy((model, opt))
    train(model, opt, shape, range(4, STEPS))
    train(twin_model, twin, shape, range(4, STEPS))
    check(model.parameters(), twin_model.parameters())
    optfuse.unfuse(twin)  # drains
    optfuse.drain(opt)
    check(model.parameters(), twin_model.parameters())
    assert type(twin) is torch.optim.AdamW
    gone = weakref.ref(opt)
    del opt
    assert gone() is None
    train(model, make(model.parameters()), shape, range(2))  # dX reads the weights again


@pytest.mark.parametrize("weights", ["stash", "latest", "average"])
def test_in_another_order_of_backward(weights):
    """reorder() and Forward(delay=) both have tasks of their own stand behind a layer."""
    found = []
    for schedule in ("stock", "last"):
        model, opt, shape = fused("conv", DELAYS["conv"], OPTIMIZERS["adamw"], weights=weights)
        with optfuse.reorder(model, schedule):
            train(model, opt, shape, range(STEPS))
        found.append(values(model.parameters()))
    check(*found)


def test_pickling_would_lose_the_queue():
    _, opt, _ = fused("mlp", DELAYS["mlp"], OPTIMIZERS["sgd"])
    with pytest.raises(optfuse.Error, match="can't be pickled"):
        copy.copy(opt)


def test_delay_by_parameter_and_nested_modules():
    model = nn.Sequential(nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 8)), nn.Linear(8, 10))
    delay = {model: 3, model[0]: 2, model[0][1].bias: 0}
    opt = late(torch.optim.SGD(model.parameters(), lr=0.1), delay)
    entries = opt.state_dict()["optfuse_delay"]["parameters"]
    assert {n: e["delay"] for n, e in entries.items()} == {0: 2, 1: 2, 2: 2, 4: 3, 5: 3}


def overlapping(shared=None):
    """Two blocks with one embedding. shared: its own delay."""
    first, second = nn.Embedding(8, 4), nn.Linear(4, 8)
    second.weight = first.weight
    model = nn.ModuleDict({"in": nn.Sequential(first), "out": nn.Sequential(second)})
    delay = {model["in"]: 1, model["out"]: 2}
    if shared is not None:
        delay[first.weight] = shared
    return late(torch.optim.SGD(model.parameters(), lr=0.1), delay)


def test_overlapping_modules_with_the_parameter_named():
    entries = overlapping(shared=3).state_dict()["optfuse_delay"]["parameters"]
    assert {n: e["delay"] for n, e in entries.items()} == {0: 3, 1: 2}


@pytest.mark.parametrize("tanh", [0, 1])
def test_modules_without_parameters_beside_others(tanh):
    """A plan has a delay for each layer, whether it has weights or not."""
    model = mlp()
    delay = {module: 1 if isinstance(module, nn.Linear) else tanh for module in model}
    late(torch.optim.SGD(model.parameters(), lr=0.1), delay)


def refusals():
    model = mlp()
    tied = nn.Parameter(torch.ones(4))
    alias = nn.Parameter(tied.detach())
    sgd = torch.optim.SGD
    return {
        "does not have": lambda: late(sgd(model.parameters(), lr=0.1), {tied: 1}),
        "share memory": lambda: late(sgd([tied, alias], lr=0.1), {tied: 1, alias: 1}),
        "names a Tanh without parameters": (
            lambda: late(sgd(model.parameters(), lr=0.1), {model[1]: 1, model[0]: 0})
        ),
        r"1 of a Sequential and 2 of a Sequential, which share a .* \(8, 4\); name": overlapping,
        "from 0 to 1,000,000": lambda: late(sgd(model.parameters(), lr=0.1), {model: 10**30}),
    }


@pytest.mark.parametrize("why", refusals())
def test_refused(why):
    with pytest.raises(optfuse.Error, match=why):
        refusals()[why]()


def test_two_optimizers_on_one_weight():
    model = mlp()
    first = late(torch.optim.SGD(model.parameters(), lr=0.1), {model: 1}, "latest")
    with pytest.raises(optfuse.Error, match="delayed by another optimizer"):
        late(torch.optim.SGD(model.parameters(), lr=0.1), {model: 1}, "latest")
    train(model, first, (16, 20), range(3))


def test_disabled(monkeypatch):
    monkeypatch.setenv("OPTFUSE_DISABLE", "1")
    model = mlp()
    with pytest.raises(optfuse.Error, match="nothing would delay"):
        late(torch.optim.SGD(model.parameters(), lr=0.1), {model: 1})
    opt = late(torch.optim.SGD(model.parameters(), lr=0.1), {model: 0})
    optfuse.drain(opt)
