# SPDX-License-Identifier: BSD-3-Clause
"""A program of random training, drawn from a seed: what happens in each step, as words."""

import random

import torch
from mixed_models import AVERAGES, MODELS, OPTIMIZERS

# name -> (weight, whether backward mode can answer)
BEFORE = {
    "": (6, True),
    "unfuse and fuse": (2, True),
    "reorder": (2, True),
    "deepcopy": (1, True),
    "pickle": (1, True),
    "load": (2, True),
    "save": (2, True),
    "rate": (2, True),
    "freeze": (1, True),
    "empty state": (1, True),
    "set state": (1, True),
    "new group": (0.5, True),
    "turn": (1, True),
}
FORWARD = {
    "": (6, True),
    "functional": (1, True),
    "vmap": (1, True),
    "penalty": (1.5, True),
    "gradients first": (1, True),
    "autocast": (0.7, True),
    "hook on output": (1, True),
}
BACKWARD = {
    "": (8, True),
    "twice": (1, False),
    "create graph": (0.7, False),
    "thread": (0.7, True),
}
HOOKS = {
    "": (6, True),
    "double": (1, True),
    "add to itself": (1, True),
    "in place": (1, True),
    "new": (1, True),
    "after: in place": (1, True),
    "after: add to itself": (1, True),
    "after: turned": (1, True),
    "after: keep": (1, True),
}
BETWEEN = {
    "": (6, True),
    "clip": (2, False),
    "clip twice": (1, False),
    "clip doubled": (0.5, False),
    "clip some": (1, False),
    "clip other norm": (1, False),
    "clip values": (1, False),
    "clip with norm": (1, False),
    "look": (1, False),
    "write": (1, False),
    "add to itself": (1, False),
    "turned": (1, False),
    "swap": (1, False),
    "of another": (1, False),
    "is state": (1, False),
    "drop one": (1, False),
    "deepcopy": (0.5, False),
}
AFTER = {
    "": (4, True),
    "average": (4, True),
    "average twice": (1, True),
    "another thread": (1, True),
    "look": (1, True),
    "look at average": (2, True),
    "look at state": (1, True),
    "flush": (1, True),
    "write weight": (1, True),
    "alias": (0.5, True),
    "gradient": (1, False),
    "step again": (0.5, False),
    "swap weights": (0.5, True),
}


def chosen(draw, table, in_backward):
    names = [name for name, (_, can) in table.items() if can or not in_backward]
    return draw.choices(names, [table[name][0] for name in names])[0]


class Program:
    def __init__(self, seed):
        draw = random.Random(seed)
        self.seed = seed
        self.mode = draw.choice(("forward", "forward", "backward"))
        self.model = draw.choice(MODELS)
        self.optimizer = draw.choice([*OPTIMIZERS])
        self.groups = draw.choice((1, 1, 2))
        self.dtype = draw.choice((torch.float32, torch.float32, torch.float32, torch.float64))
        self.bucket_bytes = draw.choice((1, 1, 0))
        self.set_to_none = draw.random() < 0.8
        self.passes = draw.choice((1, 1, 2, 3))
        self.averages = draw.choice(AVERAGES)
        self.fused_from = draw.choice((0, 0, 0, 1, 3))
        self.rows = draw.choice((2, 5, 8))
        in_backward = self.mode == "backward"
        self.steps = [
            {
                "before": [
                    chosen(draw, BEFORE, in_backward) for _ in range(draw.choice((0, 1, 2)))
                ],
                "passes": [
                    (
                        chosen(draw, FORWARD, in_backward),
                        draw.choice((0, 0, 1, 2)),
                        chosen(draw, BACKWARD, in_backward),
                    )
                    for _ in range(self.passes)
                ],
                "hook": chosen(draw, HOOKS, in_backward),
                "between": [
                    chosen(draw, BETWEEN, in_backward) for _ in range(draw.choice((0, 1, 2)))
                ],
                "after": [chosen(draw, AFTER, in_backward) for _ in range(draw.choice((1, 2)))],
                "pick": draw.randrange(100),
                "how": draw.choice(("last", "reverse_first", "auto", "budget")),
            }
            for _ in range(draw.randint(4, 8))
        ]

    def __str__(self):
        head = {k: v for k, v in vars(self).items() if k != "steps"}
        return "\n".join([str(head), *map(str, self.steps)])
