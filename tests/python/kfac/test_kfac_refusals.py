# SPDX-License-Identifier: BSD-3-Clause
"""Refusals of optfuse.kfac(), by name, and that nothing has changed then."""

import math

import pytest
import torch
from common import assert_same, refused, snapshot
from kfac_cases import OFTEN, SELDOM, Ours, adamw, mlp, mlp_loss, rows, sgd
from test_kfac_training import Forked
from torch import nn

import optfuse


def model_and_optimizer(make=sgd):
    torch.manual_seed(0)
    model = mlp()
    return model, make(model.parameters())


def test_backward_mode_is_refused():
    model, optimizer = model_and_optimizer()
    optimizer = optfuse.fuse(optimizer, mode="backward")
    before = snapshot(dict(model.state_dict()))
    refused(lambda: optfuse.kfac(model, optimizer), "backward", way_out='mode="forward"')
    assert_same("weights", dict(model.state_dict()), before)
    mlp_loss(model, 0).backward()  # and the optimizer goes on
    assert not torch.equal(model[0].weight.detach(), before["0.weight"])


def test_fusing_in_backward_mode_afterwards_is_refused():
    model, optimizer = model_and_optimizer()
    kfac = optfuse.kfac(model, optimizer)
    refused(lambda: optfuse.fuse(optimizer, mode="backward"), "kfac", way_out='mode="forward"')
    kfac.remove()
    optfuse.fuse(optimizer, mode="backward")


def trained(disturb=None, make=sgd, wrapped=lambda model: model, **options):
    """Weights and factors after some steps. disturb: called at the begin of each."""
    model, optimizer = model_and_optimizer(make)
    called = wrapped(model)
    ours = Ours(called, optimizer, **SELDOM, **options)
    for i in range(6):
        optimizer.zero_grad()
        if disturb:
            disturb(model, optimizer, ours, i)
        mlp_loss(called, i).backward()
        ours.step()
    return snapshot(dict(model.state_dict())), snapshot(ours.factors("0"))


@pytest.mark.parametrize("when", ("before", "after", "unfused"))
def test_fusing_in_forward_mode_afterwards_works(when):
    def make(parameters):
        return optfuse.fuse(adamw(parameters)) if when == "before" else adamw(parameters)

    def change(model, optimizer, ours, i):
        if when != "before" and i == 2:
            optfuse.fuse(optimizer)
        if when == "unfused" and i == 4:
            optfuse.unfuse(optimizer)

    assert_same(when, trained(change, make), trained(make=adamw))


WRONG = {
    "damping": (-1.0, "much", None),
    "decay": (-0.1, 1.5, "much"),
    "kl_clip": (-1.0, 0.0, "much"),
    "factors_every": (0, -1, 1.5, "often"),
    "inverses_every": (0, -1, 1.5, "often"),
    "fusion": ("none", None, 0, -1, True, 1e6),
    "placement": ("random", None, 1),
    "split": ("half", 1),
    "missing": ("ignore", None),
    "skip": (("nothing",), ("0.weight",), ("1",), ("0", "nothing")),
    "rows": ([], [0], [-1], [1, 2], "many"),
    "network": ((1.0,), (-1.0, 1.0), (1.0, 1.0, -1.0), (1.0,) * 4, "fast"),
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_options_that_make_no_sense(name, value):
    model, optimizer = model_and_optimizer()
    refused(lambda: optfuse.kfac(model, optimizer, **{name: value}), name, way_out="optfuse")
    assert not optimizer._optimizer_step_pre_hooks


def test_names_in_skip_are_those_of_layers():
    model, optimizer = model_and_optimizer()
    refused(lambda: optfuse.kfac(model, optimizer, skip=("0", "head")), "'head'", way_out="skip")
    optfuse.kfac(model, optimizer, skip=("0",)).remove()


@pytest.mark.parametrize("name", ("damping", "factors_every", "inverses_every"))
def test_what_a_callable_returns_is_checked(name):
    model, optimizer = model_and_optimizer()
    ours = Ours(model, optimizer, **{**OFTEN, name: lambda t: -1 if t == 2 else 1})
    before = 1 if name == "factors_every" else 2  # it is asked before the passes of a step
    for i in range(before):
        mlp_loss(model, i).backward()
        ours.step()
    mlp_loss(model, before).backward()
    refused(ours.step, name, way_out="2")


def test_what_is_no_model_or_no_optimizer():
    model, optimizer = model_and_optimizer()
    refused(lambda: optfuse.kfac(list(model.parameters()), optimizer), way_out="model")
    refused(lambda: optfuse.kfac(model, [0]), way_out="optimizer")
    refused(lambda: optfuse.kfac(optimizer, model), way_out="model")


def test_a_model_without_a_layer_for_it():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    refused(lambda: optfuse.kfac(model, sgd(model.parameters())), way_out="Linear")


def test_a_second_one_beside_the_first_is_refused():
    model, optimizer = model_and_optimizer()
    first = optfuse.kfac(model, optimizer)
    refused(lambda: optfuse.kfac(model, optimizer), way_out="remove()")
    refused(lambda: optfuse.kfac(model[0], sgd(model[0].parameters())), way_out="remove()")
    first.remove()
    optfuse.kfac(model, optimizer).remove()


def test_a_layer_that_contributes_nothing_is_named():
    torch.manual_seed(0)
    model = Forked().double()
    optimizer = sgd(model.parameters())
    ours = Ours(model, optimizer, **OFTEN)
    for unseen in ("none", "product"):
        model(rows(0, 5, 6), "module").square().mean().backward()
        ours.step()
        weights = snapshot(dict(model.state_dict()))
        factors = snapshot([ours.factors(name) for name in ("first", "other", "head")])
        optimizer.zero_grad()
        model(rows(0, 5, 6), unseen).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        before = snapshot(gradients) if None not in gradients else None
        message = refused(ours.step, "'other'", way_out='missing="skip"')
        assert "'first'" not in message and "'head'" not in message
        # Nothing was committed, and nothing preconditioned.
        assert_same("weights", dict(model.state_dict()), weights)
        found = [ours.factors(name) for name in ("first", "other", "head")]
        assert_same("factors", found, factors)
        if before is not None:
            assert_same("gradients", [p.grad for p in model.parameters()], before)
        ours.discard()
        optimizer.zero_grad()


def test_a_pass_without_backward_is_named():
    """Its rows would count in A and not in G."""
    model, optimizer = model_and_optimizer()
    ours = Ours(model, optimizer, **OFTEN)
    weights = snapshot(dict(model.state_dict()))
    forgotten = mlp_loss(model, 1)
    mlp_loss(model, 0).backward()
    refused(ours.step, "backward", way_out="discard()")
    assert_same("weights", dict(model.state_dict()), weights)
    del forgotten
    ours.discard()
    optimizer.zero_grad()
    mlp_loss(model, 0).backward()
    ours.step()


class Whole(nn.Module):
    """torch.nn's own modules are not compiled by their compile()."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("how", ("call", "compile()", "a part"))
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_refused(how):
    """The code that AOT autograd makes of a layer can't be seen: at the latest the first step says
    so."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Whole(mlp())
    model.inner[2] = Whole(model.inner[2])
    optimizer = sgd(model.parameters())

    def trained():
        called = model
        if how == "call":
            called = torch.compile(model, backend="aot_eager")
        elif how == "compile()":
            model.compile(backend="aot_eager")
        else:
            model.inner[2].compile(backend="aot_eager")
        ours = Ours(called, optimizer, **OFTEN)
        mlp_loss(called, 0).backward()
        ours.step()

    before = snapshot(dict(model.state_dict()))
    refused(trained, way_out="compile")
    assert_same("weights", dict(model.state_dict()), before)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_model_compiled_afterwards_is_refused():
    torch.compiler.reset()
    model, optimizer = model_and_optimizer()
    ours = Ours(model, optimizer, **OFTEN)
    fast = torch.compile(model, backend="aot_eager")
    mlp_loss(fast, 0).backward()
    refused(ours.step, way_out="compile")
    torch.compiler.reset()


def test_lazy_layers_are_refused():
    model = nn.Sequential(nn.LazyLinear(4))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    refused(lambda: optfuse.kfac(model, optimizer), "'0'", way_out="run the model once first")


def test_steps_with_a_closure_are_refused():
    """The closure computes gradients after what comes before a step."""
    model, optimizer = model_and_optimizer()
    optfuse.kfac(model, optimizer, **OFTEN)

    def closure():
        optimizer.zero_grad()
        loss = mlp_loss(model, 0)
        loss.backward()
        return loss

    refused(lambda: optimizer.step(closure), way_out="closure")


@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize("where", ("inputs", "loss", "gradient"))
@pytest.mark.parametrize("collects", (True, False))
@pytest.mark.parametrize("kl_clip", (1e-3, None))
def test_infinities_and_nan_are_refused_in_every_step(kl_clip, collects, where, bad):
    """kl_clip would carry those of one layer into all weights. The step that is left out,
    and what its passes have contributed, change nothing."""

    def disturb(model, optimizer, ours, i):
        if i != (4 if collects else 3):
            return
        x = rows(50, 5, 6)
        x[1, 1] = bad if where == "inputs" else 1.0
        (model(x).square().mean() * (bad if where == "loss" else 1.0)).backward()
        if where == "gradient":  # as an overflow in 16 bits, or a hook
            model[2].weight.grad[1, 1] = bad
        before = snapshot([dict(model.state_dict()), ours.factors("2")])
        words = ("'2'",) if where == "gradient" else ()
        refused(ours.step, *words, way_out="leave out this step")
        after = [dict(model.state_dict()), ours.factors("2")]
        assert_same("weights and factors", after, before)
        optimizer.zero_grad()

    after = trained(disturb, kl_clip=kl_clip)
    assert_same("after a refused step", after, trained(kl_clip=kl_clip))


def test_training_goes_on_after_a_refusal():
    def disturb(model, optimizer, ours, i):
        if i == 4:
            forgotten = mlp_loss(model, 50)
            mlp_loss(model, 51).backward()
            refused(ours.step, way_out="discard()")
            del forgotten
            ours.discard()
            optimizer.zero_grad()

    assert_same("after a refused step", trained(disturb), trained())


# Sharded models


def test_fully_sharded_models_are_refused(gloo):
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model)
    refused(lambda: optfuse.kfac(model, sgd(model.parameters())), "'0'", way_out="DTensor")


def test_tensor_parallel_models_are_refused(gloo):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = mlp()
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"2": ColwiseParallel()})
    refused(lambda: optfuse.kfac(model, sgd(model.parameters())), "'2'", way_out="DTensor")


def test_a_group_of_one_process_changes_nothing(gloo):
    ours = trained(wrapped=nn.parallel.DistributedDataParallel)
    assert_same("under DistributedDataParallel", ours, trained())
