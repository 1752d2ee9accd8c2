#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""A long training run with pauses, checkpoints and resumes at random moments:
the same bits as stock at every checkpoint, and memory that stays flat.

    python tests/python/training/long_run.py --steps 5000"""

import argparse
import gc
import hashlib
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import Fused, Stock, adamw, loss_of, net, sgd
from torch.optim.lr_scheduler import CosineAnnealingLR

MAKE = {"adamw": adamw, "sgd": sgd}


class Training:
    """The objects of a script, and its checkpoint on disk."""

    def __init__(self, wrap, make, path):
        self.wrap, self.make, self.path = wrap, make, path
        self.start()

    def start(self):
        torch.manual_seed(0)
        self.model = net()
        self.optimizer = self.wrap(self.make(self.model.parameters()))
        self.scheduler = CosineAnnealingLR(self.optimizer, 50)
        self.done = 0

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self):
        self.optimizer.zero_grad()
        loss_of(self.model, self.done % 97).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1

    def save(self):
        """By a rename, so that a kill leaves one whole checkpoint."""
        states = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**states, "done": self.done}, f"{self.path}.new")
        os.replace(f"{self.path}.new", self.path)

    def resume(self):
        """Everything made anew, as in a new process."""
        self.start()
        kept = torch.load(self.path)
        for name, part in self.parts().items():
            part.load_state_dict(kept[name])
        self.done = kept["done"]

    def digest(self):
        seen = hashlib.sha256()
        entries = sorted(self.optimizer.state_dict()["state"].items())
        for state in (self.model.state_dict(), *(entry for _, entry in entries)):
            for value in state.values():
                seen.update(value.numpy().tobytes())
        return seen.hexdigest()


def play(wrap, make, steps, seed, path, pause=0.0):
    """Yields (steps, digest) now and then; steps count what was done, also if
    a resume did it again."""
    rng = random.Random(seed)
    training = Training(wrap, make, path)
    training.save()
    for i in range(steps):
        training.step()
        draw = rng.random()
        if draw < 0.05:
            training.save()
        elif draw < 0.07:
            training.resume()
        elif draw < 0.09:
            time.sleep(pause * rng.random())
        elif draw < 0.11:
            gc.collect()
        elif draw < 0.13 or i == steps - 1:
            yield i + 1, training.digest()
        if isinstance(wrap, Fused):
            wrap.optimizers.clear()  # it would keep those that a resume replaced


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def compare(mode, make, steps, seed, pause=0.0, say=lambda *_: None):
    """Plays both, in turns; returns (memory after a tenth, memory at the end).
    Raises AssertionError where a digest differs."""
    with tempfile.TemporaryDirectory() as folder:
        stock = play(Stock(), make, steps, seed, f"{folder}/stock")
        ours = play(Fused(mode), make, steps, seed, f"{folder}/ours", pause)
        warm = None
        for (i, a), (_, b) in zip(ours, stock, strict=True):
            assert a == b, f"after {i} steps in {mode} mode the bits differ from stock"
            if warm is None and i >= steps // 10:
                gc.collect()
                warm = resident()
            say(i, resident())
    gc.collect()
    return warm, resident()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.05, help="longest pause in seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for mode in ("forward", "backward"):
        for name, make in MAKE.items():
            warm, end = compare(mode, make, options.steps, options.seed, options.pause)
            print(
                f"{mode:8} {name:5} {options.steps} steps: bits of stock; memory "
                f"{warm / 2**20:.1f} MiB after a tenth, {end / 2**20:.1f} at the end",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
