# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and CAME: of a square's average they keep the means of rows and columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._rounding import NARROW, store
from optfuse._rounding.one_by_one import Entry, Group, Rounding, check_numbers, rounding_options

_DTYPES = (torch.float32, *NARROW)
_PLAIN = (Tensor, torch.nn.Parameter)
_SHARED_OUT = 1 << 15  # PyTorch's threads share sums of so many elements
_LANES, _GROUP = 8, 32  # of its vectors, and of four of them, which it sums together
_MOST_ROWS, _MOST_COLUMNS = 1 << 19, 1 << 24  # of more it adds in another order
# Tried once: shapes that lead to every kind of sum, and that no threads share.
_TRIED = ((9, 3100), (1100, 29), (2, 37, 47), (1030, 7), (9, 4, 3, 3), (5, 1), (613,), ())
_agree: dict[type[Factored], bool] = {}


def _rms(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.norm(2) / (tensor.numel() ** 0.5)
    return found


def _sizes(name: str, shape: torch.Size) -> tuple[int, ...]:
    """Returns those of a tensor of the state."""
    kinds = {"row": shape[:-1], "col": (*shape[:-2], *shape[-1:]), "RMS": ()}
    return tuple(kinds.get(name.rpartition("_")[2], shape))


def _has_known_order(shape: torch.Size, numel: int) -> bool:
    """Whether PyTorch's means over the last two dimensions add in the order of factored.h."""
    if len(shape) < 2:
        return True
    rows, columns = shape[-2:]
    if rows > _MOST_ROWS or columns > _MOST_COLUMNS or (columns == 1 and rows >= _LANES):
        return False
    if numel < _SHARED_OUT:
        return True
    rest = columns % _GROUP
    if numel == columns:  # one sum, of which each thread makes a part
        return False
    if rest == columns or not _LANES // 2 <= rest < _LANES:
        return True
    each = -(-columns // torch.get_num_threads())  # the last thread may have but the rest
    return (columns - 1) // each * each < columns - rest


def _try_operator(cls: type[Factored]) -> None:
    """Finds out, once, whether the operator has the bits of the class's own lines here. A subclass
    may have other lines, and never has it."""
    if cls in _agree or cls not in (Adafactor, CAME):
        return
    try:
        with torch.inference_mode(False):
            _agree[cls] = all(_is_equal(cls, torch.Size(s), d) for s in _TRIED for d in _DTYPES)
    except RuntimeError:
        return  # fake tensors, for example, have no numbers: the next optimizer tries again


def _is_equal(cls: type[Factored], shape: torch.Size, dtype: torch.dtype) -> bool:
    draws = torch.Generator().manual_seed(shape.numel())
    numbers = [
        torch.randn(shape, generator=draws, dtype=torch.float32, device="cpu").to(dtype)
        for _ in range(3)
    ]
    one, found = object.__new__(cls), []
    for update in (one._by_operator, one._by_lines):
        param, state = numbers[0].clone(), dict[str, Any]()
        one._make_state(cls.TRIED, param, state)
        for state["step"], grad in enumerate(numbers[1:], 1):  # noqa: B020
            update(cls.TRIED, param, grad, state, 0)
        tensors = (param, *(t for t in state.values() if isinstance(t, Tensor)))
        found.append([t.reshape(-1).view(torch.uint8) for t in tensors])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Factored(Rounding):
    """Computes in float32, whatever the parameters' dtype, and rounds once. Averages of squares are
    means over the last two dimensions' rows and columns; with less than two they are whole."""

    COUNTS = False  # "step" is a Python number
    supports_fused_back_pass = True
    TRIED: Group  # options with which the operator is tried

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Options that the state of another implementation lacks are this one's."""
        Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        _try_operator(type(self))  # now, and not in the middle of a step()

    def _make_state(self, group: Group, param: Tensor, state: Entry) -> None:
        state["step"] = 0
        dtype = torch.float32 if param.dtype in NARROW else param.dtype
        for name in self._names(group, param.dim() > 1):
            sizes = _sizes(name, param.shape)
            state[name] = torch.zeros(sizes, dtype=dtype, device=param.device)

    def _names(self, group: Group, is_factored: bool) -> list[str]:
        """The state's tensors, in their order."""
        raise NotImplementedError

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As OneByOne, but never compiled: PyTorch's compiler takes no "step" that is a number."""
        return super().step(closure)

    @torch.no_grad()
    def step_parameter(self, p: Tensor, group: Group, i: int | None = None) -> None:
        """The update of one parameter that has a gradient, as a hook on that calls it: of a group
        of param_groups, in which it has the place i. Raises ValueError for another group."""
        if all(its is not group for its in self.param_groups):
            raise ValueError(
                "step_parameter() got a group that is none of param_groups now: load_state_dict() "
                "makes new ones"
            )
        if i is None or group["params"][i] is not p:
            i = next(place for place, its in enumerate(group["params"]) if its is p)
        before = itertools.takewhile(lambda its: its is not group, self.param_groups)
        number = i + sum(len(its["params"]) for its in before)
        params: list[Tensor] = []
        states: list[Entry] = []
        self._init_group({**group, "params": [p]}, params, states)
        for param, state in zip(params, states, strict=True):
            assert param.grad is not None
            self._update(group, param, param.grad, state, number)

    def _update(self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int) -> None:
        state["step"] += 1
        by_operator = _agree.get(type(self), False) and self._fits(group, param, grad, state)
        update = self._by_operator if by_operator else self._by_lines
        update(group, param, grad, state, number)

    def _fits(self, group: Group, param: Tensor, grad: Tensor, state: Entry) -> bool:
        """Whether the operator takes these, and PyTorch adds their numbers in its order."""
        names = self._names(group, param.dim() > 1)
        averages = [state[name] for name in names]
        return (
            param.dtype in _DTYPES
            and grad.dtype is param.dtype
            and grad.shape == param.shape
            and 0 < param.numel() < 2**31
            and all(t.dtype is torch.float32 for t in averages)
            and all(
                type(t) in _PLAIN
                and t.device.type == "cpu"
                and t.is_contiguous()
                and not t.is_inference()
                for t in (param, grad, *averages)
            )
            and all(state[name].shape == _sizes(name, param.shape) for name in names)
            and _has_known_order(param.shape, param.numel())
        )

    def _by_operator(
        self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int
    ) -> None:
        """shim/native/factored.cpp."""
        tensors = [state[name] for name in self._names(group, param.dim() > 1)]
        how = group["stochastic_rounding"], group["seed"], state["step"], number
        numbers = *how, *group["eps"], group["clip_threshold"], *self._numbers(group, state)
        torch.ops.optfuse.factored(param, grad, tensors, list(map(float, numbers)))

    def _numbers(self, group: Group, state: Entry) -> tuple[float, ...]:
        """Whether it is CAME, its three betas, the learning rate, whether it is scaled, and the
        weight decay, for shim/native/factored.cpp."""
        raise NotImplementedError

    def _by_lines(
        self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int
    ) -> None:
        is_narrow = param.dtype in NARROW
        wide = param.float() if is_narrow else param
        self._compute_factored(group, wide, grad.float() if is_narrow else grad, state)
        if not is_narrow:
            return
        if group["stochastic_rounding"]:
            store(param, wide, int(group["seed"]), state["step"], number, 0)
        else:
            param.copy_(wide)

    def _compute_factored(self, group: Group, param: Tensor, grad: Tensor, state: Entry) -> None:
        """The update in place."""
        raise NotImplementedError

    @staticmethod
    def _root_of(state: Entry, name: str, square: Tensor, beta: float) -> Tensor:
        """1 / sqrt() of the average, after that of this square."""
        if name in state:
            whole: Tensor = state[name].mul_(beta).add_(square, alpha=1.0 - beta)
            return whole.rsqrt()
        row, col = state[f"{name}_row"], state[f"{name}_col"]
        row.mul_(beta).add_(square.mean(dim=-1), alpha=1.0 - beta)
        col.mul_(beta).add_(square.mean(dim=-2), alpha=1.0 - beta)
        of_rows = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(of_rows, col.unsqueeze(-2).rsqrt())

    def _clipped(self, group: Group, grad: Tensor, state: Entry, beta: float) -> Tensor:
        square = (grad**2) + group["eps"][0]
        update = self._root_of(state, "exp_avg_sq", square, beta).mul_(grad)
        return update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0))


class Adafactor(Factored):
    """Adafactor ("Adaptive Learning Rates with Sublinear Memory Cost", arXiv 1804.04235) as the
    class of that name in transformers, whose options, state and, in float32 and rounded to
    nearest, bits it has:

        b = 1 - t**decay_rate
        R = b * R + (1 - b) * mean(g**2 + eps[0], -1)
        C = b * C + (1 - b) * mean(g**2 + eps[0], -2)
        u = g / sqrt(R / mean(R, -1)) / sqrt(C)
        u = s * u / max(1, RMS(u) / clip_threshold)
        p = (1 - weight_decay * s) * p - u

    A parameter with less than two dimensions has one average V, and u = g / sqrt(V).

    params: floating-point tensors of any shape, or groups of them.
    lr: s; None with relative_step.
    eps: what is added to squares, and the least RMS of a parameter.
    beta1: of an average of u, which p is changed by then; None: there is none.
    relative_step: s is min(0.01, 1 / sqrt(t)), with warmup_init min(1e-6 * t, 1 / sqrt(t)).
    scale_parameter: s is multiplied by max(eps[1], RMS(p)).
    stochastic_rounding, seed: of parameters of 16 bits, as AdamW's. The state is float32.

    The state has "step" (t), "exp_avg" with beta1, "exp_avg_sq_row" (R) and "exp_avg_sq_col" (C),
    or "exp_avg_sq" (V), and "RMS", that of the parameter. load_state_dict() takes transformers',
    and leaves dtypes as they were saved. Raises ValueError for a number out of its range and
    RuntimeError for a sparse gradient.
    """

    STATE = ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "RMS")
    TRIED: Group = {
        **{"lr": 0.01, "relative_step": False, "scale_parameter": True, "decay_rate": -0.8},
        **{"eps": (1e-30, 1e-3), "clip_threshold": 0.5, "beta1": 0.9, "weight_decay": 0.1},
        **{"stochastic_rounding": False, "seed": 0},
    }

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError("Cannot combine manual `lr` and `relative_step=True` options")
        if lr is None and not relative_step:
            raise ValueError("Invalid lr=None without relative_step=True")
        if warmup_init and not relative_step:
            raise ValueError("`warmup_init=True` requires `relative_step=True`")
        betas = () if beta1 is None else (beta1,)
        check_numbers(lr or 0.0, betas, len(betas), weight_decay, min(eps))
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
            **_rounding(stochastic_rounding, seed),
        }
        super().__init__(params, defaults)
        _try_operator(type(self))

    def _numbers(self, group: Group, state: Entry) -> tuple[float, ...]:
        beta1 = math.nan if group["beta1"] is None else group["beta1"]
        beta2 = 1.0 - math.pow(state["step"], group["decay_rate"])
        rate, decay = self._rate(group, state), group["weight_decay"]
        return 0, beta1, beta2, 0, rate, group["scale_parameter"], decay

    def _names(self, group: Group, is_factored: bool) -> list[str]:
        averages = ["exp_avg_sq_row", "exp_avg_sq_col"] if is_factored else ["exp_avg_sq"]
        return [*(["exp_avg"] if group["beta1"] is not None else []), *averages, "RMS"]

    @staticmethod
    def _rate(group: Group, state: Entry) -> float:
        if not group["relative_step"]:
            return float(group["lr"])
        most = 1e-6 * state["step"] if group["warmup_init"] else 1e-2
        return min(most, 1.0 / math.sqrt(state["step"]))

    @classmethod
    def _get_lr(cls, group: Group, state: Entry, factor: float = 1.0) -> Any:
        """s, by the name that transformers' AdafactorSchedule calls, times a factor."""
        rate, rms, least = cls._rate(group, state), state["RMS"], group["eps"][1]
        if not group["scale_parameter"]:
            return rate * factor
        return torch.where(rms > least, rms * rate * factor, least * rate * factor)

    def _compute_factored(self, group: Group, param: Tensor, grad: Tensor, state: Entry) -> None:
        state["RMS"].copy_(_rms(param))
        beta = 1.0 - math.pow(state["step"], group["decay_rate"])
        update = self._clipped(group, grad, state, beta).mul_(self._get_lr(group, state))
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"] != 0:
            param.add_(param, alpha=self._get_lr(group, state, -group["weight_decay"]))
        param.add_(-update)


class CAME(Factored):
    """CAME ("Confidence-guided Adaptive Memory Efficient Optimization", arXiv 2307.02047) as
    came-pytorch has it: Adafactor's u with a fixed b, betas[1], and of its average m

        m = betas[0] * m + (1 - betas[0]) * u
        R, C of (u - m)**2 + eps[1], by betas[2]
        p = (1 - weight_decay * lr) * p - lr * m / sqrt(R / mean(R, -1)) / sqrt(C)

    A parameter with less than two dimensions changes by lr * m.

    params: floating-point tensors of any shape, or groups of them.
    lr: learning rate, a number.
    eps: what is added to the squares of gradients, and of u - m.
    stochastic_rounding, seed: of parameters of 16 bits, as AdamW's. The state is float32.

    The state has "step", "exp_avg" (m), "exp_avg_sq_row" and "exp_avg_sq_col", or "exp_avg_sq", and
    "exp_avg_res_row" and "exp_avg_res_col": came-pytorch's but for "RMS", which nothing reads.
    load_state_dict() takes came-pytorch's, and leaves dtypes as they were saved. Raises ValueError
    for a number out of its range and RuntimeError for a sparse gradient.
    """

    STATE = (
        *("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"),
        "exp_avg_sq",
    )
    TRIED: Group = {
        **{"lr": 0.01, "betas": (0.9, 0.99, 0.999), "weight_decay": 0.1, "clip_threshold": 0.5},
        **{"eps": (1e-30, 1e-16), "stochastic_rounding": False, "seed": 0},
    }

    def __init__(
        self,
        params: Any,
        lr: float,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_numbers(lr, betas, 3, weight_decay, min(eps))
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "betas": betas,
            "weight_decay": weight_decay,
            **_rounding(stochastic_rounding, seed),
        }
        super().__init__(params, defaults)
        _try_operator(type(self))

    def _numbers(self, group: Group, state: Entry) -> tuple[float, ...]:
        return 1, *group["betas"], group["lr"], 0, group["weight_decay"]

    def _names(self, group: Group, is_factored: bool) -> list[str]:
        return list(self.STATE[:5] if is_factored else ("exp_avg", "exp_avg_sq"))

    def _compute_factored(self, group: Group, param: Tensor, grad: Tensor, state: Entry) -> None:
        beta1, beta2, beta3 = group["betas"]
        update = self._clipped(group, grad, state, beta2)
        average = state["exp_avg"].mul_(beta1).add_(update, alpha=1 - beta1)
        if "exp_avg_res_row" in state:
            square = (update - average) ** 2 + group["eps"][1]
            update = self._root_of(state, "exp_avg_res", square, beta3).mul_(average)
        else:
            update = average.clone()
        if group["weight_decay"] != 0:
            param.add_(param, alpha=-group["weight_decay"] * group["lr"])
        param.add_(-update.mul_(group["lr"]))


def _rounding(stochastic: bool, seed: int) -> Group:
    options = rounding_options(stochastic, False, seed)
    del options["stochastic_state"]
    return options
