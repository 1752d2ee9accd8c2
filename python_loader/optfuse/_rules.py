# SPDX-License-Identifier: BSD-3-Clause
"""Which optimizer classes fuse, and where their numbers are."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from optfuse._check import shown
from optfuse._gpu import lr_of
from optfuse.optim import Lion

Group = dict[str, Any]
MakeState = Callable[[Optimizer, type[Optimizer], Group, Tensor], None]


@functools.cache
def _n_lists(stock: type[Optimizer]) -> int:
    """How many lists _init_group() fills."""
    return len(inspect.signature(stock._init_group).parameters) - 2  # type: ignore[attr-defined]


def _stock_state(optimizer: Optimizer, stock: type[Optimizer], group: Group, param: Tensor) -> None:
    """Stock's own lazy initialisation, for one parameter."""
    init: Any = stock._init_group  # type: ignore[attr-defined]
    lists: list[list[Tensor]] = [[] for _ in range(_n_lists(stock))]  # type: ignore[arg-type]
    init(optimizer, {**group, "params": [param]}, *lists)


def _sgd_state(optimizer: Optimizer, stock: type[Optimizer], group: Group, param: Tensor) -> None:
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(
        param, memory_format=torch.preserve_format, requires_grad=False
    )


#: Rules without kernels: what options stand for that are not numbers.
_WORDS: dict[str, dict[Any, float]] = {
    "eps.0": {None: math.nan},
    "foreach": {None: 0.0},
    "adjust_lr_fn": {None: 0.0, "original": 0.0, "match_rms_adamw": 1.0},
}
#: And of which types numbers may be; a tensor's or NumPy's arithmetic rounds otherwise.
_NUMBERS: dict[str, tuple[type, ...]] = {"ns_steps": (int,), "adjust_lr_fn": ()}


def _plain(name: str, value: Any) -> float:
    """An option as a number; raises ValueError if it is not a usual one."""
    if type(value) in _NUMBERS.get(name, (float, int, bool)) and value == value:
        return float(value)
    words = _WORDS.get(name, {})
    if (value is None or type(value) is str) and value in words:
        return words[value]
    raise ValueError(name)


@dataclass(frozen=True)
class Rule:
    """One row for each stock class."""

    name: str  # of the C rule
    options: tuple[str, ...]  # its hyper-parameters in the C rule's order; "betas.0": the first
    state: tuple[str, ...]  # its state tensors in the C rule's order
    counters: tuple[str, ...] = ()  # 0-dim tensors other than "step" that count updates
    counts_on_gpu: bool = False  # of a parameter on a GPU all of these are there, too
    counts_steps: bool = True  # there is a "step"
    # The implementation of PyTorch on the CPU whose bits are reproduced, and the
    # flag of a group that selects it.
    reference: str = "fused=True"
    make_state: MakeState = _stock_state
    # The reference computes its scalars in the dtype of a learning rate that is a
    # tensor; we always do in float64.
    lr_makes_scalars: bool = False
    # What updates on a GPU has to pass a trial there against the class's own step() ...
    tried: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()  # of the trial's parameters; none: vectors
    as_made: bool = False  # ... and has: its bits are the class's, with its own flags
    external: bool = False  # there are none: torch's operators or the class's own step() update
    # Keys of a state entry, in the order of the native update by operators; none: there
    # is no such update.
    entries: tuple[tuple[str, ...], ...] = ()
    _where: list[tuple[str, int | None]] = field(init=False, repr=False, compare=False)
    _lengths: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        split = [name.partition(".") for name in self.options]
        where = [(key, int(index) if index else None) for key, _, index in split]
        object.__setattr__(self, "_where", where)
        lengths = {key: 1 + index for key, index in where if index is not None}
        object.__setattr__(self, "_lengths", lengths)

    def hyper(self, group: Group) -> tuple[float, ...]:
        """A group's numbers, as the C rule wants them."""
        if self.external:
            return self._plain_numbers(group)
        try:
            return tuple(
                [
                    lr_of(group)
                    if key == "lr"
                    else float(group[key] if i is None else group[key][i])
                    for key, i in self._where
                ]
            )
        except (TypeError, ValueError, LookupError) as error:
            raise type(error)(self._named(group)) from None

    def _named(self, group: Group) -> str:
        """The option that is no number."""
        for key, i in self._where:
            try:
                float(group[key] if i is None else group[key][i])
            except Exception:
                wanted = "a number" if i is None else f"{self._lengths[key]} numbers"
                found = shown(group[key]) if key in group else "missing"
                return f"option {key!r} of a parameter group is {found}, and must be {wanted}"
        return "an option of a parameter group is no number"

    def flags(self, group: Group) -> Group:
        """Those options of a group that select the reference on the CPU, and on GPUs of
        rules that are not tried there, where the group selects another one."""
        wanted = {"capturable": False}
        if not self.external:
            wanted |= {"fused": self.reference == "fused=True", "foreach": False}
        return {flag: value for flag, value in wanted.items() if flag in group}

    def on_gpus(self) -> Rule:
        """Where the trial was passed."""
        return self if self.external else replace(self, reference="own step()", as_made=True)

    def numbers_on_gpu(self) -> tuple[str, ...]:
        """Keys of the state whose tensors are where the parameter is."""
        return ("step", *self.counters) if self.counts_on_gpu else ()

    def updates_by(self) -> str:
        """What takes the place of the class's own step() on a GPU."""
        return "torch's operators" if self.external else "the kernels"

    def _plain_numbers(self, group: Group) -> tuple[float, ...]:
        """All NaN, for the class's own step(), if one of them is not a usual one."""
        numbers = []
        try:
            for name, (key, i) in zip(self.options, self._where, strict=True):
                if i is not None and len(group[key]) != self._lengths[key]:
                    raise ValueError(name)
                numbers.append(_plain(name, group[key] if i is None else group[key][i]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return (math.nan,) * len(self.options)
        return tuple(numbers)

    def is_native(self, group: Group) -> bool:
        """Whether updates run torch's operators without the class's own step(), once
        there is state."""
        usual = bool(self.entries) and not math.isnan(self.hyper(group)[0])
        return usual and not group.get("foreach")

    def difference(self, group: Group) -> str:
        """What in the group selects an implementation other than the one whose bits
        are reproduced; empty if nothing does."""
        if self.external or self.as_made:
            return ""
        lr = group.get("lr")
        if self.lr_makes_scalars and isinstance(lr, Tensor) and lr.dtype != torch.float64:
            return f"a tensor of {lr.dtype} as lr"
        is_fused = self.reference == "fused=True"
        if group.get("fused") if is_fused else not group.get("foreach"):
            return ""
        return ", ".join(f"{flag}={group.get(flag)}" for flag in ("fused", "foreach"))


_ADAM = Rule(
    "adam",
    (
        "lr", "betas.0", "betas.1", "eps", "weight_decay", "amsgrad", "maximize",
        "decoupled_weight_decay",
    ),
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
)
_SGD = Rule(
    "sgd",
    ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    ("momentum_buffer",),
    counts_steps=False,
    make_state=_sgd_state,
)

_ADAGRAD = Rule(
    "adagrad", ("lr", "lr_decay", "weight_decay", "eps", "maximize"), ("sum",), tried=True
)

_FOR_LOOP = "foreach=False"
_RMSPROP = Rule(
    "rmsprop",
    ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    ("momentum_buffer", "square_avg", "grad_avg"),
    reference=_FOR_LOOP,
    tried=True,
)
_ADADELTA = Rule(
    "adadelta",
    ("lr", "rho", "eps", "weight_decay", "maximize"),
    ("square_avg", "acc_delta"),
    reference=_FOR_LOOP,
    tried=True,
)
_NADAM = Rule(
    "nadam",
    (
        "lr", "betas.0", "betas.1", "eps", "weight_decay", "momentum_decay",
        "decoupled_weight_decay", "maximize",
    ),
    ("exp_avg", "exp_avg_sq"),
    counters=("mu_product",),
    reference=_FOR_LOOP,
    lr_makes_scalars=True,
    tried=True,
)
_RADAM = Rule(
    "radam",
    ("lr", "betas.0", "betas.1", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    ("exp_avg", "exp_avg_sq"),
    reference=_FOR_LOOP,
    lr_makes_scalars=True,
    tried=True,
)
_ADAMAX = Rule(
    "adamax",
    ("lr", "betas.0", "betas.1", "eps", "weight_decay", "maximize"),
    ("exp_avg", "exp_inf"),
    reference=_FOR_LOOP,
    lr_makes_scalars=True,
    tried=True,
)
_RPROP = Rule(
    "rprop",
    ("etas.0", "etas.1", "step_sizes.0", "step_sizes.1", "maximize"),
    ("prev", "step_size"),
    reference=_FOR_LOOP,
    tried=True,
)
_ASGD = Rule(
    "asgd",
    ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"),
    ("ax",),
    counters=("eta", "mu"),
    counts_on_gpu=True,
    reference=_FOR_LOOP,
    lr_makes_scalars=True,
    tried=True,
)
_LION = Rule(
    "lion",
    ("lr", "betas.0", "betas.1", "weight_decay", "maximize"),
    ("exp_avg",),
    counts_steps=False,
    reference="step()",
    tried=True,
)

# Torch's operators, in the order of the class's step().
_ADAFACTOR = Rule(
    "adafactor",
    ("lr", "beta2_decay", "eps.0", "eps.1", "d", "weight_decay", "foreach", "maximize"),
    (),
    counts_steps=False,
    reference="own step()",
    tried=True,
    shapes=((1,), (7,), (1003,), (1, 1), (40, 60), (131, 33), (3, 5, 7)),
    external=True,
    entries=(("step", "row_var", "col_var"), ("step", "variance")),
)
_MUON = Rule(
    "muon",
    (
        "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients.0", "ns_coefficients.1",
        "ns_coefficients.2", "eps", "ns_steps", "adjust_lr_fn",
    ),
    (),
    counts_steps=False,
    reference="own step()",
    tried=True,
    shapes=((1, 1), (7, 3), (40, 60), (131, 33)),
    external=True,
    entries=(("momentum_buffer",),),
)

RULES: dict[type[Optimizer], Rule] = {
    SGD: _SGD,
    Adam: _ADAM,
    AdamW: _ADAM,
    Adagrad: _ADAGRAD,
    RMSprop: _RMSPROP,
    Adadelta: _ADADELTA,
    NAdam: _NADAM,
    RAdam: _RADAM,
    Adamax: _ADAMAX,
    Rprop: _RPROP,
    ASGD: _ASGD,
    Lion: _LION,
    Adafactor: _ADAFACTOR,
    Muon: _MUON,
}

# The class's own step(), on one parameter at a time.
OWN = Rule("own", (), (), counts_steps=False, reference="own step()", external=True)
