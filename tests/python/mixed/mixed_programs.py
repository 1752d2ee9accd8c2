# SPDX-License-Identifier: BSD-3-Clause
"""Random training in which features meet that have tests of their own elsewhere: promised
gradients, orders of backward, averages, clipping, recorded and registered classes, checkpoints,
functional calls, vmap, gradients of gradients, hooks, copies, fuse() and unfuse() in the middle.
(hazard/ draws what a script does, one action after the other; here a step has a part of each kind.)
Run as a script it plays many: python mixed_programs.py FIRST N."""

import os
import sys
import warnings
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OPTFUSE_PRODUCTS", "force")

import torch
from common import assert_same
from mixed_draw import Program
from mixed_run import Run
from pytorchs_own import pytorchs_own


def difference(program, stock, ours):
    """An empty string: equal, up to where one of them raises."""
    for n, (a, b) in enumerate(zip(ours.seen, stock.seen, strict=False)):
        try:
            assert_same(f"{n}: {b[0]}", *(list(x) for x in (a, b)))
        except AssertionError as error:
            return str(error)
    # PyTorch's fused SGD wants momentum of all parameters or of none.
    is_known = program.optimizer == "SGD" and stock.end.startswith("error: TypeError")
    if ours.end == "equal" and stock.end != "equal" and not is_known:
        return f"stock ended with {stock.end}"
    if ours.end.startswith("error") and not stock.end.startswith("error"):
        return f"ended with {ours.end}"
    if len(ours.seen) > len(stock.seen) and not is_known:
        return f"saw more than stock, which ended with {stock.end}"
    return ""


def play(seed):
    """How it went, and a difference."""
    program = Program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytorchs_own():
            stock = Run(program, False).play()
        ours = Run(program, True).play()
    found = difference(program, stock, ours)
    word = ours.end if ours.end.startswith("raised") else ours.end.split(":")[0]
    return f"{program.mode}: {word}", f"{found}\n{program}" if found else ""


def main():
    torch.set_num_threads(1)
    first, n = map(int, sys.argv[1:])
    tally = Counter()
    for seed in range(first, first + n):
        print(seed, end=" ", file=sys.stderr, flush=True)
        word, found = play(seed)
        tally[word[:150]] += 1
        if found:
            print(f"seed {seed}: {word[:200]}: {found}", flush=True)
    for word, count in tally.most_common():
        print(count, word)


if __name__ == "__main__":
    main()
