# SPDX-License-Identifier: BSD-3-Clause
"""Random programs that clip gradients which are promises, by norms around max_norm, and look at the
norm at random."""

import random
from collections import Counter

import torch
from programs.deed import DEEDS
from programs.deeds.late_norms import OUTCOMES
from programs.draw import LAST, Program
from programs.models import PROMISED
from programs.play import judge

CLIP = DEEDS["clip_near_the_norm"]
KINDS = ("AdamW", "AdamW", "SGD", "Adagrad", "RMSprop", "Lion")
IN_16_BITS = ("AdamW", "Adagrad")
#: More often than by chance.
USUAL = {
    "near": ("2.0", "10.0", "1.01"),
    "order": (2.0,),
    "spoiled": ("",),
    "when": ("before step()", "after the next forward pass", "when gradients have changed"),
    "how": ("item", "stack", "deepcopy"),
}


def drawn(seed):
    rng = random.Random(seed)
    model = rng.choice([*PROMISED, "promised", "promised", "promised, in panels"])
    kind = rng.choice(IN_16_BITS if "16" in model else KINDS)
    spec = {"kind": kind, "options": {"lr": 0.01}}
    setup = {"models": [model], "optimizers": [spec], "bucket_bytes": rng.choice((0, 1))}
    actions = [("iteration", {"model": 0, "batch": 0, "set_to_none": True})]
    for i in range(rng.randint(1, 4)):
        arguments = CLIP.draw(random.Random(f"{seed} {i}"))
        for name, usual in USUAL.items():
            if rng.random() < 0.6:
                arguments[name] = rng.choice(usual)
        actions.append((CLIP.name, arguments))
    return Program(seed, setup, [*actions, LAST]), rng.choice((1, 1, 2, 3))


def play(first, n):
    """Plays n programs. Their outcomes, and how many differ; the first that do, as code."""
    OUTCOMES.clear()
    tally, wrong = Counter(), []
    before = torch.get_num_threads()
    for seed in range(first, first + n):
        program, threads = drawn(seed)
        torch.set_num_threads(threads)
        verdict = judge(program, ("forward",))["forward"]
        tally["programs"] += 1
        tally["differ"] += bool(verdict.failure)
        if verdict.failure and len(wrong) < 3:
            wrong.append(f"{verdict.failure}, {threads} threads\n{program.code()}")
    torch.set_num_threads(before)
    return {**tally, **OUTCOMES, "wrong": wrong}
