# SPDX-License-Identifier: BSD-3-Clause
"""The recorded program of a step(), computed by PyTorch's operators, does what the step() does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import traced_classes
from replay import OPERATORS, Replay
from torch import Tensor
from torch.optim import Optimizer
from traced_classes import TRACEABLE, Base

from optfuse._own_step.twin import Twin, attributes_of, options_of, own_attributes, own_options
from optfuse._traced.guide import Place, Recorded, record
from optfuse._traced.program import GRAD, NAMES, PARAM, STATE, TEMPORARY
from optfuse._traced.standin import Untraceable
from optfuse._trials.compare import difference

Make = Callable[[Any], Optimizer]
SHAPES = ((7, 5), (33,), (2, 3, 4, 1), (1,))


def stock(name: str, **options: Any) -> Make:
    return lambda params: getattr(torch.optim, name)(params, foreach=False, **options)


OPTIM: dict[str, Make] = {
    "SGD": stock("SGD", lr=0.1),
    "SGD momentum": stock("SGD", lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": stock("SGD", lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adam": stock("Adam"),
    "Adam all": stock("Adam", amsgrad=True, weight_decay=0.1, maximize=True),
    "Adam tensor lr": lambda params: torch.optim.Adam(params, torch.tensor(0.01), foreach=False),
    "AdamW": stock("AdamW", lr=0.01),
    "AdamW amsgrad": stock("AdamW", lr=0.01, amsgrad=True),
    "Adagrad": stock("Adagrad", lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": stock("RMSprop"),
    "RMSprop all": stock("RMSprop", momentum=0.9, centered=True, weight_decay=0.1),
    "Adadelta": stock("Adadelta", weight_decay=0.1, maximize=True),
    "NAdam": stock("NAdam", lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": stock("RAdam", lr=0.01, weight_decay=0.1),
    "Adamax": stock("Adamax", weight_decay=0.1),
    "Rprop": stock("Rprop", lr=0.1),
    "ASGD": stock("ASGD", lr=0.1, t0=5, weight_decay=0.01),
}


class ThreeAverages(Base):
    """As Adan: of gradients, of their differences and of squares; the last gradient is kept."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
            state["exp_avg_diff"] = torch.zeros_like(p)
            state["neg_pre_grad"] = grad.clone().mul_(-1.0)
        (b1, b2), diff = group["betas"], state["neg_pre_grad"]
        diff.add_(grad)
        state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
        state["exp_avg_diff"].mul_(b2).add_(diff, alpha=1 - b2)
        diff.mul_(b2).add_(grad)
        state["exp_avg_sq"].mul_(b2).addcmul_(diff, diff, value=1 - b2)
        root = state["exp_avg_sq"].sqrt().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"])
        p.addcdiv_(state["exp_avg_diff"], root, value=-group["lr"] * b2)
        p.div_(1 + group["lr"] * group["weight_decay"])
        diff.zero_().add_(grad, alpha=-1.0)


class WeightedAverages(Base):
    """As QHAdam: the step is between the gradient and its average."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if len(state) == 0:
            state["weight"] = 0.0
            state["exp_avg"] = torch.zeros_like(p.data)
            state["exp_avg_sq"] = torch.zeros_like(p.data)
        beta = group["betas"][0] * state["weight"] / (state["weight"] + 1)
        state["weight"] = 1.0 + group["betas"][0] * state["weight"]
        square = grad.data.mul(grad.data)
        state["exp_avg"].mul_(beta).add_(grad.data, alpha=1.0 - beta)
        state["exp_avg_sq"].mul_(beta).add_(square, alpha=1.0 - beta)
        average = state["exp_avg"].mul(0.7)
        average.add_(grad.data, alpha=0.3)
        root = state["exp_avg_sq"].mul(0.9).add_(square, alpha=0.1).sqrt_()
        p.data.addcdiv_(average, root.add_(group["eps"]), value=-group["lr"])


class SignOfDifference(Base):
    """As Yogi."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["exp_avg_sq"] = torch.full_like(p, 1e-6)
        square = grad * grad
        sign = (state["exp_avg_sq"] - square).sign_()
        state["exp_avg_sq"].addcmul_(sign, square, value=-(1 - group["betas"][1]))
        p -= group["lr"] * grad / (state["exp_avg_sq"].sqrt() + group["eps"])


class LimitsRates(Base):
    """As AdaMod: a rate for each element, at most its own average."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float64)
            state["square"], state["rates"] = torch.zeros_like(p), torch.ones_like(p)
        state["step"] += 1
        state["square"].mul_(group["betas"][1]).addcmul_(grad, grad, value=1 - group["betas"][1])
        rates = torch.full_like(p, float(group["lr"] * state["step"].sqrt()))
        rates.div_(state["square"].sqrt() + group["eps"])
        state["rates"].lerp_(rates, 0.1)
        p.add_(torch.min(rates, state["rates"]).mul_(grad).neg_())


class Clamps(Base):
    """As Sophia: a ratio between limits, of tensors in one place."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if "hessian" not in state:
            state["hessian"] = p.new_zeros(p.shape)
        state["hessian"].add_(grad.pow(2), alpha=0.04)
        ratio = (grad.abs() / (0.1 * state["hessian"] + 1e-15)).clamp(None, 1)
        p.addcmul_(grad.sign(), ratio, value=-group["lr"])
        p.clamp_(-p.abs() - 1, grad.abs() + 1).clamp_(max=2.0)


class Chooses(Base):
    """Masks in all ways that PyTorch has."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        agree = ((grad > 0) & (p > 0)) | (grad.le(0) & ~(p > 0.0)) | torch.isnan(p)
        masked = torch.where(agree, grad, 0.5 - grad).masked_fill(grad.eq(0), 1.0)
        masked[p >= grad] = 0.25
        p.add_(masked * agree.to(grad.dtype), alpha=-group["lr"])
        ordered = (p > grad).to(p.dtype) + (p < masked) * p - p * (p <= grad)
        p.add_(ordered * (grad >= 0.1), alpha=0.1).add_(p.eq(masked).to(p.dtype))
        p.sub_(torch.where(p != 0, 0.1, p)).mul_(torch.where(p < 0, p, 1.0))
        p.copy_(torch.logical_not(agree).to(p.dtype) + p)


class Powers(Base):
    """Every power that programs have."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        x = grad.abs() + 1
        y = x**3 + x**-2 + x**0.5 + x**-0.5 + x**-1 + x**1 + x.rsqrt() + x.reciprocal() + x.square()
        p.add_(y, alpha=-group["lr"]).sub_(1 / y).add_(2, alpha=-1)
        p.add_(torch.tensor(0.3) / y).sub_(0.1 - x)


STYLES = [ThreeAverages, WeightedAverages, SignOfDifference, LimitsRates, Clamps, Chooses, Powers]


def parameters() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).requires_grad_() for shape in SHAPES]


def groups_of(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]


def give_gradients(params: list[Tensor], step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=random)


def left(optimizer: Optimizer) -> Any:
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    return {
        "params": [p.detach() for p in params],
        "grads": [p.grad for p in params],
        "state": [optimizer.state.get(p) for p in params],
        "options": [own_options(group) for group in groups],
        "attributes": own_attributes(attributes_of(optimizer)),
    }


def expect_equal(make: Make, steps: int = 20) -> Replay:
    """Steps of the class, and those that are replayed."""
    ours, theirs = parameters(), parameters()
    replay, optimizer = Replay(make(groups_of(ours))), make(groups_of(theirs))
    if hasattr(optimizer, "train"):
        optimizer.train()
        replay.optimizer.train()  # type: ignore[attr-defined]
    for step in range(steps):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        replay.step()
        optimizer.step()
        place = difference("", left(replay.optimizer), left(optimizer))
        assert place is None, f"{place} differs after step {step + 1}"
    return replay


@pytest.mark.parametrize("name", OPTIM)
def test_classes_of_pytorch(name: str) -> None:
    replay = expect_equal(OPTIM[name])
    assert all(recorded.program.instructions for recorded in replay.recorded)


@pytest.mark.parametrize("cls", [*TRACEABLE, *STYLES])
def test_styles_of_other_packages(cls: type[Base]) -> None:
    expect_equal(cls)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Adam all", "RAdam", "Adadelta", "Adamax", "RMSprop all"])
def test_operators_on_lists_are_those_on_one_tensor(name: str) -> None:
    def make(params: Any) -> Optimizer:
        optimizer = OPTIM[name](params)
        for group in optimizer.param_groups:
            group["foreach"] = True
        return optimizer

    expect_equal(make)


def test_every_operator_is_replayed_by_some_class() -> None:
    used: set[str] = set()
    for make in (*OPTIM.values(), *TRACEABLE, *STYLES):
        for recorded in expect_equal(make, steps=2).recorded:  # type: ignore[arg-type]
            used |= {line[0] for line in recorded.program.instructions}
    joined = {"mul_number_add", "mul_number_addcmul", "div_number_add_number"}
    on_gpus = {"div_number_list", "maximum_list", "minimum_list"}
    assert set(OPERATORS) | {"fill"} == set(NAMES) - joined - on_gpus
    assert used == set(OPERATORS) | {"fill"}


# ---- one step of a class


Update = Callable[[Optimizer, dict[str, Any], Tensor, dict[str, Any]], Any]


def recorded_of(
    update: Update,
    entry: dict[str, Any] | None = None,
    names: tuple[str, ...] = (),
    shape: tuple[int, ...] = (3, 4),
    dtype: torch.dtype = torch.float32,
) -> Recorded:
    """update: gets the optimizer, the options, a parameter that has a gradient and its state."""

    class Made(Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    update(self, group, p, self.state[p])

    optimizer = Made([torch.zeros(shape)], {"lr": 0.5})
    given = options_of(optimizer.param_groups[0])
    attributes = attributes_of(optimizer)
    return record(Twin(Made), attributes, given, shape, dtype, entry, list(names))


def lines(recorded: Recorded) -> list[tuple[Any, ...]]:
    return [line[:5] for line in recorded.program.instructions]


def test_what_nobody_sees_is_left_out() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        p.grad.mul(3).add_(p)  # type: ignore[union-attr]
        p.mul_(2)
        p.copy_(p.grad)  # type: ignore[arg-type]

    assert lines(recorded_of(update)) == [("copy", PARAM, GRAD, 0, 0)]


def test_numbers_change_and_the_structure_stays() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / state["n"])  # type: ignore[arg-type]

    first = recorded_of(update)
    second = recorded_of(update, entry=first.entry)
    assert first.program.structure is second.program.structure
    assert first.program.code() == [NAMES.index("add"), PARAM, PARAM, GRAD, 0]
    assert first.program.numbers() == [-0.5, 0.0]
    assert second.program.numbers() == [-0.25, 0.0]
    assert second.entry == {"n": 2}


def test_new_state_is_filled_and_known_state_is_written_in_place() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        if "m" not in state:
            state["m"] = torch.zeros_like(p)
        state["m"].add_(p.grad)

    first = recorded_of(update)
    assert first.entry == {"m": Place(0)}
    assert [line[0] for line in lines(first)] == ["fill", "add", "copy"]
    second = recorded_of(update, entry=first.entry, names=first.names)
    assert lines(second) == [("add", STATE, STATE, GRAD, 0)]


def test_state_is_at_the_register_of_its_name() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        for name in "xyz":
            state[name].mul_(2)

    recorded = recorded_of(update, {"x": Place(1), "y": Place(-1), "z": Place(0)}, ("z", "x"))
    assert recorded.names == ("z", "x", "y")
    assert recorded.entry == {"x": Place(1), "y": Place(2), "z": Place(0)}
    assert [line[1] for line in lines(recorded)] == [STATE + 1, STATE + 2, STATE]


def test_replaced_state_is_copied_after_its_last_use() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        old = state["m"]
        state["m"] = old * 0.9 + p.grad
        p.sub_(old)

    recorded = recorded_of(update, {"m": Place(0)}, ("m",))
    assert [line[:3] for line in lines(recorded)][-2:] == [
        ("add", PARAM, PARAM),
        ("copy", STATE, TEMPORARY),
    ]


def test_state_that_goes_away() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        p.add_(state.pop("m"))

    recorded = recorded_of(update, {"m": Place(0)}, ("m",))
    assert recorded.entry == {}
    assert recorded.names == ("m",)


def test_eighteen_temporaries_and_no_more() -> None:
    def of(n: int) -> Update:
        def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
            kept = [p * i for i in range(n)]
            for x in kept:
                p.add_(x)

        return update

    assert max(line[1] for line in lines(recorded_of(of(18)))) == 27
    with pytest.raises(Untraceable, match="more than 18 temporaries"):
        recorded_of(of(19))


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(),
    "size of one": lambda p: p.size(0),
    "numel": lambda p: p.numel(),
    "torch.numel": torch.numel,
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "len": len,
    "nbytes": lambda p: p.nbytes,
    "stride": lambda p: p.stride(),
    "is_contiguous": lambda p: p.is_contiguous(),
    "contiguous": lambda p: p.contiguous(),
    "of the gradient": lambda p: p.grad.shape,  # type: ignore[union-attr]
    "of a result": lambda p: (p * 2).numel(),
    "reshape": lambda p: p.reshape(3, 4),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_the_shape_are_noted(name: str) -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        LOOKS[name](p)

    assert recorded_of(update).looked_at_shape


def test_operators_do_not_look_at_the_shape() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        grad = p.grad
        assert grad is not None
        state["m"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        masked = torch.where(grad > 0, grad, 0.0).masked_fill_(p > 1, 2.0)
        masked[p > 2] = 0.0
        p.data.addcdiv_(grad.data.clone(), masked.clamp(min=1)).lerp_(grad.detach(), 0.1)
        torch._foreach_add_([p], [grad])
        torch.maximum(p, grad, out=p)

    assert not recorded_of(update).looked_at_shape


def test_shapes_are_those_of_the_parameter() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        x = p.grad.data.clone()  # type: ignore[union-attr]
        assert x.shape == (3, 4) and len(x) == 3 and x.numel() == 12 and x.stride() == (4, 1)
        assert x.ndim == 2 and x.is_contiguous() and x.device.type == "cpu" and not x.is_sparse
        assert x.dtype == torch.float64

    recorded_of(update, dtype=torch.float64)


def test_options_and_attributes_are_returned() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        group["n"] = group.get("n", 0) + 1
        optimizer.total = getattr(optimizer, "total", 0) + group["lr"]
        p.add_(1)

    recorded = recorded_of(update)
    assert recorded.options == {"lr": 0.5, "n": 1}
    assert own_attributes(recorded.attributes)["total"] == 0.5
    assert "state" not in recorded.attributes and "param_groups" not in recorded.attributes


def test_programs_are_shown_with_the_names_of_state() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        state["m"].lerp_(p.grad, 0.25)
        p.addcdiv_(state["m"], (p.grad * 2).sqrt(), value=-0.5)  # type: ignore[operator]

    shown = recorded_of(update, {"m": Place(0)}, ("m",)).program.shown(("m",))
    assert shown.splitlines() == [
        "m = lerp(m, grad, 0.25)",
        "t0 = 2 grad",
        "t0 = sqrt(t0)",
        "param = param + -0.5 m / t0",
    ]


def test_nothing_of_the_optimizer_is_changed() -> None:
    optimizer = traced_classes.GroupCounter([torch.zeros(3, 4)])
    before = copy.deepcopy(left(optimizer))
    attributes = {**attributes_of(optimizer), **copy.deepcopy(own_attributes(optimizer.__dict__))}
    options = copy.deepcopy(own_options(optimizer.param_groups[0]))
    record(Twin(type(optimizer)), attributes, options, (3, 4), torch.float32, None, [])
    assert difference("", left(optimizer), before) is None
