# SPDX-License-Identifier: BSD-3-Clause
"""What PyTorch promises of each optimizer beside its numbers, for every class
that fuses: the themes of its own test/test_optim.py. A fused optimizer and its
stock twin are led through the same and compared by bits."""

import copy
import io
import pickle

import pytest
import torch
from common import Fused, Stock, assert_same, everything, loss_of, run, same, snapshot, train
from optim_classes import CLASSES, FUSED, accepts, build, matrices, model_for, set_gradients
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import optfuse

STEPS = 5
#: With a learning rate that is a float32 tensor, the for-loop of these computes
#: the step size in float32, which with a number is done in double.
LR_IN_FLOAT32 = ("ASGD", "Adamax", "NAdam", "RAdam")
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def trained(cls, wrap, steps=3, **options):
    """A model and its optimizer after some steps, with no gradients left."""
    model = model_for(cls)
    optimizer = wrap(build(cls, model.parameters(), **options))
    for i in range(steps):
        train(model, optimizer, i)
    optimizer.zero_grad()
    return model, optimizer


def go_on(model, optimizer, begin=3):
    for i in range(begin, begin + STEPS):
        train(model, optimizer, i)
    return everything(model, optimizer)


# State


@every_class
@both_modes
def test_state_dict_goes_from_fused_to_stock_and_back(cls, mode):
    def script(wrap):
        model, optimizer = trained(cls, wrap)
        second = copy.deepcopy(model)
        stock = build(cls, second.parameters())
        stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        yield from go_on(second, stock)
        third = copy.deepcopy(second)
        fused = wrap(build(cls, third.parameters()))
        third.zero_grad()
        fused.load_state_dict(copy.deepcopy(stock.state_dict()))
        yield from go_on(third, fused, 20)
        yield from go_on(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_state_loaded_by_an_optimizer_with_parameters_in_another_order(cls, mode):
    def script(wrap):
        model, optimizer = trained(cls, wrap)
        saved = copy.deepcopy(optimizer.state_dict())
        n = len(saved["param_groups"][0]["params"])
        saved["state"] = {n - 1 - i: state for i, state in saved["state"].items()}
        twin = copy.deepcopy(model)
        other = wrap(build(cls, reversed(list(twin.parameters()))))
        other.load_state_dict(saved)
        yield from go_on(twin, other)

    same(script, mode)


@every_class
@both_modes
def test_state_dict_by_torch_save_with_weights_only(cls, mode):
    def script(wrap):
        model, optimizer = trained(cls, wrap)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        twin = copy.deepcopy(model)
        other = wrap(build(cls, twin.parameters()))
        other.load_state_dict(torch.load(buffer, weights_only=True))
        yield from go_on(twin, other)

    same(script, mode)


@every_class
@both_modes
def test_state_dict_with_the_names_of_parameters(cls, mode):
    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.named_parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
        yield from everything(model, optimizer)
        yield "names", optimizer.param_groups[0]["param_names"]

    same(script, mode)


@every_class
@both_modes
def test_an_older_state_dict_without_the_newer_options(cls, mode):
    newer = ("foreach", "fused", "maximize", "capturable", "differentiable")

    def script(wrap):
        model, optimizer = trained(cls, wrap)
        saved = copy.deepcopy(optimizer.state_dict())
        for option in newer:
            saved["param_groups"][0].pop(option, None)
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:  # stock's default may be another implementation
            group.update({k: v for k, v in build(cls, matrices()).defaults.items() if k in newer})
        yield from go_on(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_a_loaded_step_that_is_a_number(cls, mode):
    def script(wrap):
        model, optimizer = trained(cls, wrap)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            if "step" in state:
                state["step"] = state["step"].item()
        optimizer.load_state_dict(saved)
        yield from go_on(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_state_begins_when_stock_s_begins(cls, mode):
    """For most classes at a parameter's first gradient; for some at once."""

    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        yield "before", [optimizer.state.get(p, {}) for p in model.parameters()]
        yield "length", len(optimizer.state)
        optimizer.step()
        yield "without gradients", [optimizer.state.get(p, {}) for p in model.parameters()]
        train(model, optimizer, 0)
        yield "after", [optimizer.state.get(p, {}) for p in model.parameters()]
        yield "order", [list(optimizer.state.get(p, {})) for p in model.parameters()]
        train(model, optimizer, 1)
        wrap.pending()

    same(script, mode)


@every_class
@both_modes
def test_steps_are_counted_where_there_was_a_gradient(cls, mode):
    def script(wrap):
        params = matrices()
        optimizer = wrap(build(cls, params))
        for i in range(6):
            optimizer.zero_grad()
            used = [p for k, p in enumerate(params) if i % (k + 1) == 0]
            sum((p * p).sum() for p in used).backward()
            optimizer.step()
        yield "steps", [optimizer.state[p].get("step") for p in params]
        yield "state", optimizer.state_dict()
        yield "parameters", params

    same(script, mode)


@every_class
@both_modes
def test_float64_as_the_default_dtype(cls, mode):
    def script(wrap):
        torch.set_default_dtype(torch.float64)
        try:
            params = matrices(torch.float64)
            optimizer = wrap(build(cls, params))
            for _ in range(STEPS):
                optimizer.zero_grad()
                sum((p * p).sum() for p in params).backward()
                optimizer.step()
            yield "parameters", params
            yield "state", optimizer.state_dict()
        finally:
            torch.set_default_dtype(torch.float32)

    same(script, mode)


# Copies


@every_class
@both_modes
def test_deepcopy(cls, mode):
    def script(wrap):
        model, optimizer = trained(cls, wrap)
        twin, twins = copy.deepcopy((model, optimizer))
        yield "public attributes", sorted(k for k in vars(twins) if not k.startswith("_"))
        yield from go_on(model, optimizer)
        yield from go_on(twin, twins, 50)

    same(script, mode)


@every_class
@both_modes
def test_pickle(cls, mode):
    def script(wrap):
        model, optimizer = trained(cls, wrap)
        twin, twins = pickle.loads(pickle.dumps((model, optimizer)))
        assert type(twins) is cls, f"it came back as {type(twins)}"
        yield from go_on(model, optimizer)
        yield from go_on(twin, wrap(twins), 50)

    same(script, mode)


# Groups and options


@every_class
@both_modes
def test_groups_with_options_of_their_own(cls, mode):
    def script(wrap):
        params = matrices()
        groups = [
            {"params": params[:1], "lr": 0.1},
            {"params": params[1:2], "weight_decay": 0.3} if accepts(cls, "weight_decay")
            else {"params": params[1:2]},
            {"params": params[2:]},
        ]  # fmt: skip
        optimizer = wrap(build(cls, groups))
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * p).sum() for p in params).backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    same(script, mode)


@every_class
@both_modes
def test_a_group_added_later(cls, mode):
    def script(wrap):
        params = matrices()
        optimizer = wrap(build(cls, params[:2]))
        for i in range(STEPS):
            if i == 2:
                optimizer.add_param_group({"params": params[2:], "lr": 0.2})
            for p in params:
                p.grad = None
            sum((p * p).sum() for p in params[: 2 if i < 2 else 3]).backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    same(script, mode)


def changed(value):
    """Another value that the option may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 0.5 if value else 0.1
    if isinstance(value, tuple) and all(isinstance(v, float) for v in value):
        return tuple(v * 0.5 for v in value)
    return value


@every_class
@both_modes
def test_every_option_changed_in_the_group(cls, mode):
    """One after the other, while updates with the old value are pending."""
    fixed = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
    fixed += ("centered", "amsgrad", "momentum")  # they need other state from the start
    fixed += ("nesterov",) if cls.__name__ == "SGD" else ()

    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        (group,) = optimizer.param_groups
        for i, option in enumerate(key for key in list(group) if key not in fixed):
            train(model, optimizer, i)
            if i > 0:
                wrap.pending()
            group[option] = changed(group[option])
            if option == "etas":
                group[option] = (0.4, 1.3)
        yield from go_on(model, optimizer, 30)

    same(script, mode)


@every_class
@both_modes
def test_lr_as_a_tensor_on_the_cpu(cls, mode):
    """Where stock computes with it in float32 before it becomes a number, the
    reference gets the number."""

    def script(wrap):
        lr = torch.tensor(0.02)
        model = model_for(cls)
        as_tensor = wrap.fused or cls.__name__ not in LR_IN_FLOAT32
        optimizer = wrap(build(cls, model.parameters(), lr=lr if as_tensor else lr.item()))
        for i in range(STEPS):
            train(model, optimizer, i)
            if i > 0:  # a class's own step() makes the state at once
                wrap.pending()
            lr.mul_(0.7)
            if not as_tensor:
                optimizer.param_groups[0]["lr"] = lr.item()
        yield "lr", torch.as_tensor(optimizer.param_groups[0]["lr"])
        yield "parameters", dict(model.state_dict())
        yield "state", optimizer.state_dict()["state"]

    same(script, mode)


@every_class
def test_maximize_is_the_same_as_negated_gradients(cls):
    if not accepts(cls, "maximize"):
        assert cls.__name__ == "Muon", f"{cls.__name__} has no maximize"
        return
    results = []
    for maximize in (False, True):
        params = matrices()
        optimizer = optfuse.fuse(build(cls, params, maximize=maximize))
        for i in range(STEPS):
            set_gradients(params, i, -1.0 if maximize else 1.0)
            optimizer.step()
        results.append(snapshot([p.detach() for p in params]))
    assert_same("parameters", *results)


@every_class
def test_bad_options_are_refused_in_stock_s_words(cls):
    def why_not(kind):
        with pytest.raises(ValueError) as error:
            kind(matrices(), lr=-1.0)
        return str(error.value)

    fused = optfuse.fuse(build(cls, matrices()))
    assert why_not(type(fused)) == why_not(cls)


@every_class
@both_modes
def test_another_optimizer_made_of_its_class(cls, mode):
    """type(optimizer)(...) makes an optimizer that steps, fused or not."""

    def script(wrap):
        _, optimizer = trained(cls, wrap)
        model = model_for(cls)
        defaults = {k: v for k, v in optimizer.defaults.items() if accepts(cls, k)}
        another = type(optimizer)(model.parameters(), **defaults)
        yield "class", type(another) is cls
        yield from go_on(model, another)

    same(script, mode)


# Steps


@every_class
@both_modes
def test_hooks_of_this_and_of_all_optimizers(cls, mode):
    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        seen = []

        def saw(what):
            return lambda it, args, kwargs: seen.append((what, it is optimizer, args[1:], kwargs))

        handles = [
            optimizer.register_step_pre_hook(saw("pre")),
            optimizer.register_step_post_hook(saw("post")),
            register_optimizer_step_pre_hook(saw("pre, of all")),
            register_optimizer_step_post_hook(saw("post, of all")),
        ]
        for i in range(3):
            train(model, optimizer, i)
        for handle in handles:
            handle.remove()
        train(model, optimizer, 3)
        yield "calls", seen
        yield from everything(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_a_closure(cls, mode):
    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        for i in range(STEPS):

            def closure(i=i):
                optimizer.zero_grad()
                loss = loss_of(model, i)
                loss.backward()
                return loss

            yield "loss", optimizer.step(closure)
        yield from everything(model, optimizer)

    same(script, mode)


@every_class
@both_modes
@pytest.mark.parametrize("set_to_none", (True, False))
def test_zero_grad(cls, mode, set_to_none):
    """With zeros kept, what has momentum moves on."""

    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i, set_to_none)
        optimizer.zero_grad(set_to_none)
        yield "gradients", [p.grad for p in model.parameters()]
        optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_parameters_without_a_gradient_stay(cls, mode):
    def script(wrap):
        params = matrices()
        optimizer = wrap(build(cls, params))
        for _ in range(STEPS):
            optimizer.zero_grad()
            (params[0] * params[2].sum()).sum().backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    same(script, mode)


@every_class
def test_the_gradient_is_left_as_it_was(cls):
    """Options that change it, such as weight decay, change a copy."""
    options = {k: v for k, v in {"weight_decay": 0.1, "maximize": True}.items() if accepts(cls, k)}
    params = matrices()
    optimizer = optfuse.fuse(build(cls, params, **options))
    for i in range(STEPS):
        set_gradients(params, i)
        before = snapshot([p.grad for p in params])
        optimizer.step()
        optfuse.flush()
        assert_same("gradients", [p.grad for p in params], before)


# Tensors


@every_class
@both_modes
def test_parameters_of_no_elements(cls, mode):
    def script(wrap):
        params = [*matrices(), nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(2, 0))]
        optimizer = wrap(build(cls, params))
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * p).sum() for p in params).backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    if cls.__name__ not in ("Adafactor", "Muon"):
        same(script, mode)
        return
    for wrap, error in (
        (Stock(), ZeroDivisionError),
        (Fused(mode), (ZeroDivisionError, optfuse.Error)),
    ):
        with pytest.raises(error):  # neither can stock
            run(script, wrap)


@every_class
@both_modes
def test_parameters_in_strange_layouts(cls, mode):
    """Transposed, with holes, expanded from a larger one."""

    def script(wrap):
        base = torch.randn(6, 10, 2)
        params = [
            nn.Parameter(base[..., 0]),
            nn.Parameter(torch.randn(5, 3).t()),
            nn.Parameter(torch.randn(9, 4)[::2]),
        ]
        stock = params
        if not wrap.fused and cls.__name__ in FUSED:
            # Stock's fused kernels mix up what has holes (docs/numerics.md): the
            # reference gets a dense one, with its dimensions in the same order.
            stock = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer = wrap(build(cls, stock))
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * p).sum() for p in stock).backward()
            optimizer.step()
        yield "parameters", [p.detach().contiguous() for p in stock]

    same(script, mode, prove=False)


@every_class
@both_modes
def test_parameters_of_several_dtypes(cls, mode):
    def script(wrap):
        params = [p for d in (torch.float32, torch.float64) for p in matrices(d)]
        if cls.__name__ != "SGD":  # 16 bits: stock's is broken
            params += matrices(torch.bfloat16)
        # By default Adafactor takes the epsilon of the first one's dtype for all.
        options = {"eps": (1e-20, 1e-3)} if cls.__name__ == "Adafactor" else {}
        optimizer = wrap(build(cls, params, **options))
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * p).sum().double() for p in params).backward()
            optimizer.step()
        yield "parameters", params
        yield "state", optimizer.state_dict()

    same(script, mode)


@every_class
@both_modes
def test_complex_parameters_are_refused(cls, mode):
    params = [nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))]
    optimizer = build(cls, params, **({"fused": False} if accepts(cls, "fused") else {}))
    with pytest.raises(optfuse.Error, match="parameter 0 of group 0 .* it is complex"):
        optfuse.fuse(optimizer, mode=mode)
    assert type(optimizer) is cls


@every_class
@both_modes
def test_sparse_gradients_are_refused_with_the_parameter_named(cls, mode):
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optfuse.fuse(build(cls, table.parameters()), mode=mode)
    before = snapshot(table.weight.detach())
    with pytest.raises(optfuse.Error, match=r"parameter 0 of group 0 .*sparse"):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert_same("the weight", table.weight.detach(), before)
