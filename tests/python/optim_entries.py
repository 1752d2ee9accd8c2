# SPDX-License-Identifier: BSD-3-Clause
"""Facts that tests need of an optimizer whose kernels on GPUs a trial compares with the class's own
step(), one entry for each. Those of optfuse.optim have more in theirs. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]
DECAYS: tuple[Options, ...] = ({}, {"weight_decay": 0.1, "maximize": True})
DECOUPLED = (*DECAYS, {"weight_decay": 0.1, "decoupled_weight_decay": True})


@dataclass(frozen=True)
class Entry:
    #: To train with: on the played GPU, on a real one, and on the CPU if it is ours.
    options: Sequence[Options]
    rate: float = 0.01  # a learning rate that suits it


@dataclass(frozen=True)
class Ours(Entry):
    #: The paper's algorithm: the parameter after one update for each gradient.
    formula: Callable[..., Any] = NotImplemented
    #: Options for `formula`.
    paper: Options = field(default_factory=dict)
    #: Options that the class has to refuse with "Invalid ...".
    invalid: Sequence[Options] = ()


def lion(p: Any, gradients: Sequence[Any], lr: float, betas: Any, weight_decay: float) -> Any:
    """arXiv 2302.06675, algorithm 2."""
    m = 0 * p
    for g in gradients:
        c = betas[0] * m + (1 - betas[0]) * g
        p = p - lr * (c.sign() + weight_decay * p)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


def adan(
    p: Any, gradients: Sequence[Any], lr: float, betas: Any, eps: float, weight_decay: float
) -> Any:
    """arXiv 2208.06677, algorithm 1, with betas as Adam's and bias corrections."""
    m, v, n, previous = 0 * p, 0 * p, 0 * p, gradients[0]
    for k, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * (g - previous)
        n = betas[2] * n + (1 - betas[2]) * (g + betas[1] * (g - previous)) ** 2
        size = lr / ((n / (1 - betas[2] ** k)) ** 0.5 + eps)
        direction = m / (1 - betas[0] ** k) + betas[1] * v / (1 - betas[1] ** k)
        p = (p - size * direction) / (1 + weight_decay * lr)
        previous = g
    return p


ENTRIES: dict[str, Entry] = {
    "RMSprop": Entry(
        (*DECAYS, {"momentum": 0.9}, {"centered": True},
         {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
         {"momentum": 0.5, "centered": True, "weight_decay": 0.01, "alpha": 0.3}),
    ),
    "Adadelta": Entry((*DECAYS, {"rho": 0.3}), rate=1.0),
    "NAdam": Entry((*DECOUPLED, {"betas": (0.3, 0.6), "momentum_decay": 0.1})),
    "RAdam": Entry((*DECOUPLED, {"betas": (0.3, 0.6)})),
    "Adamax": Entry((*DECAYS, {"betas": (0.0, 0.5)})),
    "Rprop": Entry(
        ({}, {"maximize": True}, {"maximize": True, "etas": (0.3, 1.7)},
         {"etas": (0.3, 1.7), "step_sizes": (1e-3, 0.02)}), rate=1e-5,
    ),
    "Adagrad": Entry(
        (*DECAYS, {"lr_decay": 0.1}, {"lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    ),
    "ASGD": Entry(
        (*DECAYS, {"lambd": 3.0, "alpha": 0.3, "t0": 5.0},
         {"lambd": 3.0, "alpha": 0.3, "t0": 5.0, "maximize": True},
         {"lambd": 0.5, "alpha": 0.5}, {"lambd": 0.5, "alpha": 0.5, "t0": 3}), rate=0.05,
    ),
    "Lion": Ours(
        (*DECAYS, {"betas": (0.0, 0.5)}, {"betas": (0.8, 0.95)}, {"weight_decay": 0.1},
         {"betas": (0.0, 0.0), "lr": 0.02}, {"weight_decay": 0.01, "maximize": True}, {"lr": 0.01}),
        rate=1e-3,
        formula=lion,
        paper={"betas": (0.9, 0.99), "weight_decay": 0.5},
        invalid=({"lr": -1.0}, {"betas": (1.0, 0.5)}, {"betas": (0.5, -0.1)}, {"betas": (0.5,)},
                 {"betas": (0.5, 0.5, 0.5)}, {"weight_decay": -1.0}),
    ),
    "Adan": Ours(
        (*DECAYS, {"betas": (0.0, 0.5, 0.9)}, {"weight_decay": 0.1, "no_prox": True},
         {"no_prox": True, "maximize": True}, {"eps": 1e-3, "weight_decay": 0.01}),
        rate=1e-3,
        formula=adan,
        paper={"betas": (0.9, 0.8, 0.95), "eps": 1e-4, "weight_decay": 0.5},
        invalid=({"lr": -1.0}, {"betas": (0.5, 0.5)}, {"betas": (0.5, 0.5, 1.0)}, {"eps": -1.0},
                 {"weight_decay": -1.0}),
    ),
}  # fmt: skip
OURS = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, Ours)}
