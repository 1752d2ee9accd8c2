# SPDX-License-Identifier: BSD-3-Clause
"""Which torch.optim classes fuse, and where their numbers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from optfuse._gpu import number

Group = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """One row for each stock class: the C rule's name, its hyper-parameters in
    the C rule's order, the state tensors in the C rule's order, and behind them
    the 0-dim tensors other than "step" that count updates."""

    name: str
    hyper: Callable[[Group], tuple[float, ...]]
    state: tuple[str, ...]
    counts_steps: bool
    make_state: Callable[[Optimizer, type[Optimizer], Group, Tensor], None]
    counters: tuple[str, ...] = ()


def _adam_hyper(group: Group) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return (
        number(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        float(group["amsgrad"]),
        float(group["maximize"]),
        float(group["decoupled_weight_decay"]),
    )


def _adam_state(optimizer: Optimizer, stock: type[Optimizer], group: Group, param: Tensor) -> None:
    """Stock's own lazy initialisation, for one parameter."""
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    stock._init_group(optimizer, {**group, "params": [param]}, *lists)  # type: ignore[attr-defined]


def _sgd_hyper(group: Group) -> tuple[float, ...]:
    return (
        number(group["lr"]),
        float(group["momentum"]),
        float(group["dampening"]),
        float(group["weight_decay"]),
        float(group["nesterov"]),
        float(group["maximize"]),
    )


def _sgd_state(optimizer: Optimizer, stock: type[Optimizer], group: Group, param: Tensor) -> None:
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(
        param, memory_format=torch.preserve_format, requires_grad=False
    )


_ADAM = Rule("adam", _adam_hyper, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), True, _adam_state)
_SGD = Rule("sgd", _sgd_hyper, ("momentum_buffer",), False, _sgd_state)

RULES: dict[type[Optimizer], Rule] = {Adam: _ADAM, AdamW: _ADAM, SGD: _SGD}
