# SPDX-License-Identifier: BSD-3-Clause
"""Programs as data: drawn from a seed, printed as code."""

import random
from dataclasses import dataclass, replace

import hazard.adding  # noqa: F401
import hazard.clipping  # noqa: F401
import hazard.faults  # noqa: F401
import hazard.keeping  # noqa: F401
import hazard.late  # noqa: F401
import hazard.reading  # noqa: F401
import hazard.renewing  # noqa: F401
import hazard.reshaping  # noqa: F401
import hazard.training  # noqa: F401
import hazard.tuning  # noqa: F401
import hazard.writing  # noqa: F401
from hazard.models import MODELS, SIXTEEN_BITS
from hazard.registry import ACTIONS

LAST = ("look_at_weights_and_state", {})


@dataclass(frozen=True)
class Program:
    seed: int
    setup: dict
    actions: list  # (name, arguments) each

    def with_actions(self, actions):
        return replace(self, actions=list(actions))

    def code(self):
        """Runs from tests/python."""
        lines = ["import torch", "from hazard.play import check"]
        lines += ["from hazard.programs import Program", ""]
        lines += [f"setup = {self.setup!r}", "actions = ["]
        lines += [f"    ({name!r}, {arguments!r})," for name, arguments in self.actions]
        lines += ["]", f"check(Program({self.seed}, setup, actions))"]
        return "\n".join(lines)


OTHERS = {
    "Adagrad": ({}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    "RMSprop": ({}, {"momentum": 0.9, "centered": True}, {"weight_decay": 0.1, "maximize": True}),
    "Adadelta": ({}, {"weight_decay": 0.1}),
    "NAdam": ({}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ({}, {"weight_decay": 0.1}),
    "Adamax": ({}, {"weight_decay": 0.1, "maximize": True}),
    "Rprop": ({},),
    "ASGD": ({}, {"t0": 2, "weight_decay": 0.1}),
    "Adafactor": ({}, {"foreach": True}),  # by operators, and by its own step()
}
# Some of the others compute with it in float32, which the reference does not.
WITH_TENSOR_LR = ("SGD", "Adam", "AdamW", "Adafactor")


def options(rng, kind):
    lr = rng.choice((1e-1, 1e-2, 1e-3))
    if kind in OTHERS:
        return {"lr": lr, **rng.choice(OTHERS[kind])}
    decay = rng.choice((0.0, 0.1))
    maximize = rng.random() < 0.1
    if kind == "SGD":
        momentum = rng.choice((0.0, 0.9, 0.9))
        damped = rng.random() < 0.3
        return {
            "lr": lr,
            "weight_decay": decay,
            "momentum": momentum,
            "dampening": 0.25 if damped else 0.0,
            "nesterov": momentum > 0 and not damped and rng.random() < 0.4,
            "maximize": maximize,
        }
    return {
        "lr": lr,
        "weight_decay": decay,
        "betas": rng.choice(((0.9, 0.999), (0.3, 0.9), (0.0, 0.5))),
        "amsgrad": rng.random() < 0.3,
        "maximize": maximize,
    }


# The parameters that each optimizer takes; a choice that overlaps is refused in
# backward mode, so it is rare.
SHARES = (
    [("all",)] * 12
    + [("even", "odd")] * 3
    + [("first models", "last model")] * 3
    + [("all", "all"), ("even", "odd", "all")]
)


# There is no max_grad_norm in backward mode, so it is rare. ddp: the first model is wrapped in
# DistributedDataParallel, of one process; views: with gradient_as_bucket_view=True.
OPTIONS_OF_FUSE = [
    *[{}] * 25,
    {"accumulate": 2},
    {"accumulate": 3},
    *[{"max_grad_norm": 0.05}] * 2,
    {"ddp": "buckets"},
    {"ddp": "views"},
]


def draw_setup(rng):
    names = [rng.choice(tuple(MODELS)) for _ in range(rng.choice((1, 1, 1, 2)))]
    share = rng.choice(SHARES)
    if "last model" in share:
        names += [rng.choice(tuple(MODELS))] * (2 - len(names))
    kinds = (*("SGD", "Adam", "AdamW") * 5, *OTHERS)
    if any(name in SIXTEEN_BITS for name in names):
        # Stock's SGD is broken there, and the for-loop's bits depend on how a
        # tensor lies in memory, see docs/numerics.md.
        kinds = ("Adam", "AdamW")
    optimizers = []
    for over in share:
        kind = rng.choice(kinds)
        optimizers.append(
            {
                "kind": kind,
                "over": over,
                "groups": rng.choice((1, 1, 2)),
                "tensor_lr": rng.random() < 0.1 and kind in WITH_TENSOR_LR,
                "options": options(rng, kind),
            }
        )
        if "same elements" in names:
            # It computes all updates before it makes any; optfuse one by one, as the for-loop.
            optimizers[-1]["options"].pop("foreach", None)
    options_of_fuse = rng.choice(OPTIONS_OF_FUSE)
    return {"models": names, "optimizers": optimizers, **options_of_fuse}


def generate(seed, often=()):
    """About half of all programs hold only what backward fusion can answer.
    often: names of actions to be drawn more often, in programs of all kinds."""
    rng = random.Random(seed)
    setup = draw_setup(rng)
    # 1: the first use of one parameter does not do for that of its neighbours.
    setup["bucket_bytes"] = random.Random(-1 - seed).choice((1, 1, 0, 400))
    gentle = rng.random() < 0.5 and not often
    usable = [a for a in ACTIONS.values() if a.gentle or not gentle]
    if gentle:
        usable = [a for a in usable if not a.between or a.name == "collect_garbage"]
    if any(name in SIXTEEN_BITS for name in setup["models"]):
        usable = [a for a in usable if a.name != "train_in_another_dtype"]
    weights = [a.weight * (40 if a.name in often else 1) for a in usable]
    drawn = rng.choices(usable, weights, k=rng.randint(5, 16))
    start = [("iteration", {"model": 0, "batch": 0, "set_to_none": True})]
    actions = [(a.name, a.draw(rng)) for a in drawn]
    return Program(seed, setup, [*start, *actions, LAST])
