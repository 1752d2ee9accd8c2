# SPDX-License-Identifier: BSD-3-Clause
"""Programs as data: drawn from a seed, printed as code."""

import math
import random
import zlib
from dataclasses import dataclass, replace

import programs.deeds  # noqa: F401 - fills the table
from programs.deed import ANYWHERE, BEFORE_FUSE, DEEDS
from programs.models import DRAWN
from programs.models import SIXTEEN_BITS as IN_SIXTEEN_BITS
from programs.optimizers import ALL, KINDS, SIXTEEN_BITS

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
        lines = ["import torch", "from programs.draw import Program"]
        lines += ["from programs.play import check", ""]
        lines += [f"setup = {self.setup!r}", "actions = ["]
        lines += [f"    ({name!r}, {arguments!r})," for name, arguments in self.actions]
        lines += ["]", f"check(Program({self.seed}, setup, actions))"]
        return "\n".join(lines)


# The parameters that each optimizer takes; a choice that overlaps ends at fuse() in backward mode,
# so it is rare.
SHARES = (
    [("all",)] * 48
    + [("even", "odd")] * 12
    + [("first models", "last model")] * 12
    + [("all", "all"), ("even", "odd", "all")]
)


# There is no max_grad_norm in backward mode, so it is rare, too. ddp: the first model is wrapped in
# DistributedDataParallel, of one process; views: with gradient_as_bucket_view=True.
OPTIONS_OF_FUSE = [
    *[{}] * 50,
    *[{"accumulate": 2}, {"accumulate": 3}] * 2,
    *[{"max_grad_norm": 0.05}] * 4,
    *[{"ddp": "buckets"}, {"ddp": "views"}] * 2,
    *[{"wait_from": 0}] * 4,
]


def draw_setup(rng, kind=None):
    usual = [name for name in DRAWN if name not in IN_SIXTEEN_BITS]
    models = usual if kind and kind.startswith("SGD") else DRAWN  # where stock is broken
    names = [rng.choice(models) for _ in range(rng.choice((1, 1, 1, 2)))]
    share = rng.choice(SHARES)
    if "last model" in share:
        names += [rng.choice(models)] * (2 - len(names))
    kinds = [KINDS[kind]] if kind else [one for one in ALL for _ in range(one.weight)]
    if not kind and any(name in IN_SIXTEEN_BITS for name in names):
        # Stock's SGD is broken there, and the for-loop's bits depend on how a
        # tensor lies in memory, see docs/numerics.md.
        kinds = [KINDS[name] for name in SIXTEEN_BITS]
    optimizers = []
    for over in share:
        chosen = rng.choice(kinds)
        options = {"lr": rng.choice((1e-1, 1e-2, 1e-3)), **rng.choice(chosen.options)}
        if "same elements" in names:
            # It computes all updates before it makes any; optfuse one by one, as the for-loop.
            options.pop("foreach", None)
        optimizers.append(
            {
                "kind": chosen.name,
                "over": over,
                "groups": rng.choice((1, 1, 2)),
                "tensor_lr": rng.random() < 0.1 and chosen.has_tensor_lr,
                "options": options,
            }
        )
    return {"models": names, "optimizers": optimizers, **rng.choice(OPTIONS_OF_FUSE)}


def usable_deeds(setup, gentle):
    """About half of all programs hold only what backward fusion can answer."""
    kinds = [KINDS[spec["kind"]] for spec in setup["optimizers"]]
    for deed in DEEDS.values():
        fits = deed.weight and all(deed.takes(k) and deed.name not in k.spares for k in kinds)
        is_gentle = deed.is_gentle and (deed.where != ANYWHERE or deed.name == "collect_garbage")
        if (
            fits
            and (is_gentle or not gentle)
            and not any(x in deed.spares for x in setup["models"])
        ):
            yield deed


def won(deeds, seed, slot, often):
    """One by their weights. Another deed in the table changes only the draws that it wins."""

    def arrival(deed):
        number = hash((zlib.crc32(deed.name.encode()), seed, slot)) % 2**52  # of numbers: the same
        return -math.log((number + 1) / 2**52) / (deed.weight * (40 if deed.name in often else 1))

    return min(deeds, key=arrival)


def generate(seed, often=(), kind=None):
    """often: names of deeds to be drawn more often, in programs of all kinds. kind: the name of
    that of all optimizers."""
    rng = random.Random(seed)
    setup = draw_setup(rng, kind)
    # 1: the first use of one parameter does not do for that of its neighbours.
    setup["bucket_bytes"] = rng.choice((1, 1, 0, 400))
    usable = list(usable_deeds(setup, rng.random() < 0.5 and not often))
    first = [deed for deed in usable if deed.where == BEFORE_FUSE]
    later = [deed for deed in usable if deed.where != BEFORE_FUSE]
    drawn = [won(first, seed, 0, often)] if first and rng.random() < 0.1 else []
    drawn.append(DEEDS["iteration"])
    drawn += [won(later, seed, slot, often) for slot in range(rng.randint(5, 16))]
    actions = [
        (deed.name, deed.draw(random.Random(f"{seed} {slot}"))) for slot, deed in enumerate(drawn)
    ]
    return Program(seed, setup, [*actions, LAST])
