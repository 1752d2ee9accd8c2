# SPDX-License-Identifier: BSD-3-Clause
"""Forward mode is transparent: whatever is changed between step() and the next
forward, pending updates come first, as in stock."""

import pytest
import torch
from common import Fused, Stock, adamw, batch, everything, loss_of, net, same, sgd, train
from scripts import trained
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 5


def each_parameter(change):
    @torch.no_grad()
    def change_all(model, optimizer, i):
        for p in model.parameters():
            change(p)

    return change_all


def set_data(p):
    p.data = p.data * 0.5


def write_numpy(p):
    p.detach().numpy()[...] *= 0.5


def write_storage(p):
    p.untyped_storage()[0] = 7


def set_normal(p):
    torch.manual_seed(1)
    p.normal_()


WRITES = {
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "add_": lambda p: p.add_(0.01),
    "mul_ of data": lambda p: p.data.mul_(0.9),
    "copy_ into data": lambda p: p.data.copy_(p.detach() * 0.5),
    "copy_ of a constant": lambda p: p.copy_(torch.ones_like(p)),
    "copy_ from the host": lambda p: p.copy_(torch.full(p.shape, 0.1, device="cpu")),
    "zero_": lambda p: p.zero_(),
    "fill_ one element": lambda p: p.view(-1)[:1].fill_(3.0),
    "item assignment": lambda p: p.__setitem__(0, 0.25),
    "nn.init": lambda p: nn.init.constant_(p, 0.1),
    "normal_": set_normal,
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "out=": lambda p: torch.mul(p, 0.5, out=p),
    "data =": set_data,
    "set_": lambda p: p.set_(p.detach() * 0.5),
    "numpy": write_numpy,
    "storage": write_storage,
    "lerp_": lambda p: p.lerp_(torch.zeros_like(p), 0.3),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_written_while_pending(write):
    same(trained(between=each_parameter(WRITES[write])))


def test_weights_renormalized_by_embedding_lookup():
    """embedding's max_norm writes into the weight during forward."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss = model(torch.tensor([[1, 2, i]])).square().sum()
        loss.backward()
        optimizer.step()
        yield "loss", loss

    same(
        trained(
            model=lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 3)),
            iteration=iteration,
        )
    )


def other_gradient(p):
    p.grad = torch.ones_like(p)


GRADIENT_WRITES = {
    "zero_": lambda p: p.grad.zero_(),
    "mul_": lambda p: p.grad.mul_(100.0),
    "data.fill_": lambda p: p.grad.data.fill_(100.0),
    "numpy": lambda p: p.grad.numpy().fill(100.0),
    "set to None": lambda p: setattr(p, "grad", None),
    "replaced": other_gradient,
    "data =": lambda p: setattr(p.grad, "data", torch.ones_like(p)),
    "foreach": lambda p: torch._foreach_zero_([p.grad]),
    "resized": lambda p: p.grad.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("write", GRADIENT_WRITES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_gradients_written_while_pending(write, make):
    same(trained(make, between=each_parameter(GRADIENT_WRITES[write])))


def replace_state(p, optimizer):
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.1)


def other_step(p, optimizer):
    optimizer.state[p]["step"].fill_(1.0)


STATE_WRITES = {
    "zero_": lambda p, opt: opt.state[p]["exp_avg"].zero_(),
    "mul_": lambda p, opt: opt.state[p]["exp_avg_sq"].mul_(2.0),
    "replaced": replace_state,
    "numpy": lambda p, opt: opt.state[p]["exp_avg"].numpy().fill(0.5),
    "step": other_step,
    "deleted": lambda p, opt: opt.state.pop(p),
}


@pytest.mark.parametrize("write", STATE_WRITES)
def test_state_written_while_pending(write):
    def change(model, optimizer, i):
        for p in model.parameters():
            STATE_WRITES[write](p, optimizer)

    same(trained(between=change))


def test_all_state_cleared_while_pending():
    def clear(model, optimizer, i):
        optimizer.state.clear()

    same(trained(between=clear))


@pytest.mark.parametrize(
    "clip",
    (
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    ),
    ids=("clip_grad_norm_", "without foreach", "clip_grad_value_", "get_total_norm"),
)
def test_clipping_before_step(clip):
    same(trained(before_step=lambda model, *_: clip(model)))


@pytest.mark.parametrize("set_to_none", (True, False))
@pytest.mark.parametrize("through", ("optimizer", "model"))
def test_both_forms_of_zero_grad_right_after_step(set_to_none, through):
    def change(model, optimizer, i):
        (optimizer if through == "optimizer" else model).zero_grad(set_to_none)

    same(trained(between=change))


@pytest.mark.parametrize("make", (adamw, sgd))
def test_both_forms_of_zero_grad_before_backward(make):
    for set_to_none in (True, False):
        same(trained(make, zeroing=set_to_none))


def test_gradients_read_after_step_and_zeroed():
    def change(model, optimizer, i):
        norms = [p.grad.norm().item() for p in model.parameters()]
        optimizer.zero_grad(i % 2 == 0)
        assert sum(norms) > 0

    same(trained(between=change))


@pytest.mark.parametrize("make", (adamw, sgd))
def test_gradients_that_accumulate_without_zero_grad(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            loss_of(model, i).backward()
            optimizer.step()
            wrap.pending()
        yield "gradients", [p.grad for p in model.parameters()]
        yield from everything(model, optimizer)

    same(script)


def test_gradient_accumulation_over_several_batches():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(4 * STEPS):
            loss_of(model, i).backward()
            if i % 4 == 3:
                optimizer.step()
                wrap.pending()
                optimizer.zero_grad()
        yield from everything(model, optimizer)

    same(script)


def test_step_twice_for_one_backward():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
            wrap.pending()
            optimizer.step()
            wrap.pending()
        yield from everything(model, optimizer)

    same(script)


def test_backward_through_a_weight_that_step_changed_raises():
    """As with stock's default; stock's fused=True forgets to bump versions and
    would give a wrong gradient without a word. Here step() bumps them, although
    the weight is still the old one."""
    for fused, wrap in ((False, Stock()), (True, Fused("forward"))):
        model = net()
        optimizer = wrap(adamw(model.parameters(), fused=fused))
        train(model, optimizer, 0)
        loss = loss_of(model, 1)
        loss.backward(retain_graph=True)
        optimizer.step()
        wrap.pending(optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("foreach", (False, True))
def test_averaged_model(foreach):
    average = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if foreach else {}

    def script(wrap):
        model = net()
        averaged = AveragedModel(model, use_buffers=True, **average)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
            wrap.pending()
            averaged.update_parameters(model)
        yield "average", dict(averaged.state_dict())
        yield from everything(model, optimizer)

    same(script)


@torch.no_grad()
def test_moving_average_by_hand():
    def script(wrap):
        model = net()
        shadow = [p.detach().clone() for p in model.parameters()]
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            with torch.enable_grad():
                train(model, optimizer, i)
            wrap.pending()
            for mean, p in zip(shadow, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        yield "average", shadow

    same(script)


@pytest.mark.parametrize("whose", ("own", "other"))
def test_weights_loaded_while_pending(whose):
    other = dict(net().state_dict())

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            before = {k: v.clone() for k, v in model.state_dict().items()}
            train(model, optimizer, i)
            wrap.pending()
            if i == 2:
                model.load_state_dict(before if whose == "own" else other)
        yield from everything(model, optimizer)

    same(script)


def test_weights_moved_by_swap_tensors_while_pending():
    def between(model, optimizer, i):
        if i == 2:
            weight = model[2].weight
            weight.grad = None
            other = nn.Parameter(torch.full_like(weight, 0.1))
            torch.utils.swap_tensors(weight, other)
            yield "swapped out", other
            del weight, other

    same(trained(between=between))


def test_module_applied_under_swap_mode_while_pending():
    def between(model, optimizer, i):
        if i == 2:
            optimizer.zero_grad()
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                model._apply(lambda t: t * 0.5)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)

    same(trained(between=between))


def test_requires_grad_switched_off_and_on():
    def iteration(model, optimizer, i):
        for p in model[0].parameters():
            p.requires_grad_(i % 3 != 1)
        train(model, optimizer, i)

    same(trained(iteration=iteration, steps=2 * STEPS, pending=True))


def test_exception_in_forward():
    class Boom(Exception):
        pass

    def explode(*_):
        raise Boom

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
            wrap.pending()
            hook = model[2].register_forward_pre_hook(explode)
            with pytest.raises(Boom):
                model(batch(i)[0])
            wrap.pending()  # of the layers that forward did not reach
            hook.remove()
        yield from everything(model, optimizer)

    same(script)


def test_exception_in_backward_and_another_try():
    def between(model, optimizer, i):
        hook = model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, i).backward()
        hook.remove()

    same(trained(between=between))
