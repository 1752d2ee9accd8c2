# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines of one process, and what they refuse. Those of several processes:
tests/python/distributed/test_scenarios.py and test_pipeline_lost.py."""

import copy
import gc
import weakref
from itertools import product

import pytest
import torch
from common import assert_same
from torch import nn

import optfuse
from optfuse.pipeline import Pipeline, plan
from optfuse_layers.pipeline.plan import SYNCHRONOUS
from optfuse_layers.pipeline.refusals import check_shared

FREE = (0.0, 0.0)
loss_fn = nn.functional.cross_entropy


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4))


def plan_of(model, strategy="1f1b", processes=1, **options):
    return plan(
        model, torch.zeros(4, 16), processes, strategy, network=FREE, costs="analytic", **options
    )


def batches(count):
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(4, 16, generator=generator) for _ in range(count)]
    return xs, [torch.randint(4, (4,), generator=generator) for _ in range(count)]


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)


WRAPS = {
    "stock": lambda o: o,
    "forward": optfuse.fuse,
    "backward": lambda o: optfuse.fuse(o, mode="backward"),
}


CASES = [(s, w) for s in ("1f1b", "layerpipe") for w in ("stock", "forward")]


@pytest.mark.parametrize(("strategy", "wrap"), [*CASES, *product(SYNCHRONOUS, WRAPS)])
def test_without_delays_it_is_plain_training(strategy, wrap):
    model, plain = mlp(), mlp()
    size = 2 if strategy in SYNCHRONOUS else 1
    options = {"micro_batches": 2} if strategy in SYNCHRONOUS else {}
    made = plan_of(model, strategy, **options)
    assert not any(made.delays)
    pipeline = Pipeline(made, model, loss_fn, WRAPS[wrap](sgd(model)))
    stock = sgd(plain)
    xs, ys = batches(13)  # the last group is incomplete
    losses = pipeline.run(xs, ys)
    for i in range(0, 13, size):
        stock.zero_grad()
        for x, y in zip(xs[i : i + size], ys[i : i + size], strict=True):
            loss = loss_fn(plain(x), y)
            loss.backward()
            assert losses.pop(0) == float(loss.detach())
        stock.step()
    assert_same("weights", list(model.parameters()), list(plain.parameters()))
    assert pipeline.stash_bytes == 0


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_layers_of_one_process_share_a_weight(strategy, wrap):
    model = three(None)
    plain = copy.deepcopy(model)
    made = plan_of(model, strategy, micro_batches=2)
    pipeline = Pipeline(made, model, loss_fn, WRAPS[wrap](sgd(model)), shared="each")
    stock = sgd(plain)
    xs, ys = batches(6)
    losses = pipeline.run(xs, ys)
    for i in range(0, 6, 2):
        stock.zero_grad()
        for x, y in zip(xs[i : i + 2], ys[i : i + 2], strict=True):
            loss = loss_fn(plain(x), y)
            loss.backward()
            assert losses.pop(0) == float(loss.detach())
        stock.step()
    assert_same("weights", list(model.parameters()), list(plain.parameters()))


class Sometimes(nn.Module):
    """Leaves its layer out where a test says so."""

    uses: list[bool] = []

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        is_used = x.device.type == "meta" or not self.uses or self.uses.pop(0)
        return self.layer(x) if is_used else x * 1.0


def sometimes(shared, uses):
    """A pipeline of layers that share a weight, which the second uses in these micro-batches."""
    model = three(None)
    model[1] = Sometimes(model[0])
    made = plan_of(model, "gpipe", micro_batches=2)
    Sometimes.uses = [*uses]
    return model, Pipeline(made, model, loss_fn, sgd(model), shared=shared)


@pytest.mark.parametrize("uses", ([True, False], [False, True], [False, False]))
def test_a_shared_weight_that_a_micro_batch_leaves_out_is_refused(uses):
    model, pipeline = sometimes("each", uses)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(optfuse.Error, match='layer 1, which shares it .* pass shared="sums"'):
        pipeline.run(*batches(2))
    assert_same("weights", [p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize("uses", ([True, False], [False, True]))
def test_sums_of_a_shared_weight_leave_out_what_is_unused(uses):
    model, pipeline = sometimes("sums", uses)
    plain = three(nn.Linear(16, 16))
    plain.load_state_dict(model.state_dict())
    xs, ys = batches(2)
    pipeline.run(xs, ys)
    for x, y, is_used in zip(xs, ys, uses, strict=True):
        first = plain[0](x)
        loss_fn(plain[2](plain[1](first) if is_used else first * 1.0), y).backward()
    both = zip(plain[0].parameters(), plain[1].parameters(), strict=True)
    shared = [a.grad + b.grad for a, b in both]
    for p, grad in zip(plain[0].parameters(), shared, strict=True):
        p.grad = grad
    sgd(nn.ModuleList([plain[0], plain[2]])).step()
    assert_same("shared", [*model[0].parameters()], [*plain[0].parameters()])
    assert_same("last", [*model[2].parameters()], [*plain[2].parameters()])


def test_a_shared_weight_that_a_layer_never_uses_is_refused():
    _, pipeline = sometimes("sums", [False, False])
    with pytest.raises(optfuse.Error, match="no gradient for any micro-batch"):
        pipeline.run(*batches(2))


class Inside(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def three(second):
    first = nn.Linear(16, 16)
    return nn.Sequential(first, Inside(second or first), nn.Linear(16, 4))


def tied():
    """With the plan of one that isn't: plan() refuses those itself."""
    made, model = plan_of(three(nn.Linear(16, 16))), three(None)
    return made, model, sgd(model)


def tied_thrice():
    model = nn.Sequential(*three(None)[:2], three(None)[1])
    model[2].layer = model[0]
    return plan_of(model, "gpipe", micro_batches=1), model, sgd(model)


def delayed(model):
    return optfuse.fuse(sgd(model), optfuse.Forward(delay={model: 1}))


def clipped(model):
    return optfuse.fuse(sgd(model), optfuse.Forward(max_grad_norm=0.1))


def preconditioned(model):
    optimizer = sgd(model)
    optimizer.kept = optfuse.kfac(model, optimizer)
    return optimizer


def other_width():
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 32), nn.Linear(32, 4))


REFUSED = {
    "4 layers and the module 2": lambda m: (plan_of(m), m[:2], sgd(m)),
    "layer 0 .* trained elements": lambda m: (plan_of(m), other_width(), sgd(m)),
    "is also of layer 0": lambda m: tied(),
    "shares a parameter of two layers in plans without delays": lambda m: tied_thrice(),
    "torch.distributed is not initialized": lambda m: (plan_of(m, processes=2), m, sgd(m)),
    "is not in this SGD": lambda m: (plan_of(m), m, sgd(m[:2])),
    "LBFGS": lambda m: (plan_of(m), m, torch.optim.LBFGS(m.parameters())),
    "backward mode": lambda m: (plan_of(m), m, optfuse.fuse(sgd(m), mode="backward")),
    "max_grad_norm clips by the norm": lambda m: (plan_of(m), m, clipped(m)),
    "without a delay": lambda m: (plan_of(m), m, delayed(m)),
    "KFAC.remove": lambda m: (plan_of(m), m, preconditioned(m)),
    "must be an nn.Sequential": lambda m: (plan_of(m), m[0], sgd(m)),
    "must be a plan": lambda m: (3, m, sgd(m)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    model = mlp()
    made, module, optimizer = REFUSED[why](model)
    with pytest.raises(optfuse.Error, match=why):
        Pipeline(made, module, loss_fn, optimizer)


def test_two_weights_that_two_processes_share_are_not_exchanged_one_by_one():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    made = plan_of(model, "1f1b_flush", 2, micro_batches=2)
    model[3].weight, model[2].weight = model[0].weight, model[1].weight
    check_shared(made, model, "sums", None)
    with pytest.raises(optfuse.Error, match='two of them share 2; use shared="sums"'):
        check_shared(made, model, "each", None)


@pytest.mark.parametrize("strategy", ("modulo", "fast_forward"))
def test_by_modulo_a_shared_weight_and_layers_without_parameters_would_wait(strategy):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16))
    options = {"chunk": 1} if strategy == "modulo" else {}
    made = plan_of(model, strategy, 2, micro_batches=2, **options)
    model[3].weight = model[0].weight
    if strategy == "modulo":
        with pytest.raises(optfuse.Error, match="would wait for each other"):
            check_shared(made, model, "sums", None)
    else:
        check_shared(made, model, "sums", None)


def test_losses_weighted_by_rows_have_the_mean_of_all_rows():
    model, plain = mlp(), mlp()
    made = plan_of(model, "fast_forward", micro_batches=3)
    pipeline = Pipeline(made, model, loss_fn, sgd(model), losses="mean")
    xs, ys = batches(3)
    xs[2], ys[2] = xs[2][:1], ys[2][:1]
    pipeline.run(xs, ys)
    stock = sgd(plain)
    loss_fn(plain(torch.cat(xs)), torch.cat(ys)).backward()
    stock.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    with pytest.raises(optfuse.Error, match="losses="):
        Pipeline(made, model, loss_fn, sgd(model), losses="most")


def test_backward_mode_updates_in_the_backward_pass_of_each_layer(monkeypatch):
    model = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 4))
    made = plan_of(model, "fast_forward", micro_batches=2)
    optimizer = optfuse.fuse(sgd(model), mode="backward")
    pipeline = Pipeline(made, model, loss_fn, optimizer)
    gradients = []

    def step(*args, step=optimizer.step):
        gradients.append(model[2].weight.grad)  # large enough to be updated at once
        return step(*args)

    monkeypatch.setattr(optimizer, "step", step)
    pipeline.run(*batches(6))
    assert len(gradients) == 3 and all(torch.ops.optfuse.are_consumed(gradients))


def test_forward_mode_leaves_updates_to_the_next_forward_pass():
    model = mlp()
    optimizer = optfuse.fuse(sgd(model))
    made = plan_of(model, "fast_forward", micro_batches=2)
    Pipeline(made, model, loss_fn, optimizer).run(*batches(4))
    assert optfuse.summary(optimizer).pending == 6


def test_refused_at_run():
    model = mlp()
    xs, ys = batches(4)
    pipeline = Pipeline(plan_of(model, "gpipe", micro_batches=2), model, loss_fn, sgd(model))
    for inputs, targets, why in (
        (None, ys, "inputs=None on process 0"),
        (xs, None, "targets=None on process 0"),
        (xs, ys[:3], "give as many of each"),
        ([], [], "got 0 batches"),
        ([*xs[:3], "x"], ys, "as the input of batch 3"),
        ([*xs[:3], xs[3][:, 1:]], ys, r"layer 0 \(Linear\) makes of \(4, 15\)"),
    ):
        with pytest.raises(optfuse.Error, match=why):
            pipeline.run(inputs, targets)
    assert len(pipeline.run(xs, ys)) == 4  # nothing was lost


def test_autocast_is_refused():
    model = mlp()
    xs, ys = batches(2)
    pipeline = Pipeline(plan_of(model), model, loss_fn, sgd(model))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(optfuse.Error, match="layer 0 .*without autocast"),
    ):
        pipeline.run(xs, ys)


def test_a_loss_that_fails_is_told_again():
    model = mlp()
    xs, ys = batches(4)
    seen = []

    def loss(y, t):
        seen.append(weakref.ref(y))
        return y

    pipeline = Pipeline(plan_of(model), model, loss, sgd(model))
    with pytest.raises(optfuse.Error, match="tensor with one element") as found:
        pipeline.run(xs, ys)
    del found
    gc.collect()
    assert not any(reference() is not None for reference in seen)
    with pytest.raises(optfuse.Error, match="has failed .* load a checkpoint"):
        pipeline.run(xs, ys)


def test_another_plans_state_is_refused():
    model = mlp()
    saved = Pipeline(plan_of(model), model, loss_fn, sgd(model)).state_dict()
    other = Pipeline(plan_of(model, "gpipe"), model, loss_fn, sgd(model))
    with pytest.raises(optfuse.Error, match="is of another plan"):
        other.load_state_dict(saved)
