# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of two ranks in which rank 1 goes wrong, and what stopped each (apart.py)."""

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import apart
import torch
import torch._dynamo
from common import adamw, loss_of, net, refused
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

TIMEOUT = 20.0  # seconds of the process group
BROKEN = 3  # the step in which rank 1 goes wrong
SMALL = 0.0002  # MiB a bucket


class Job:
    def __init__(self, rank, mode):
        torch.manual_seed(0)
        self.rank, self.mode = rank, mode
        self.model = DDP(net(), bucket_cap_mb=SMALL)
        self.optimizer = adamw(self.model.parameters())

    def fuse(self):
        how = {
            "forward": optfuse.Forward(),
            "backward": optfuse.Backward(ddp=self.model),
            "first_use": optfuse.Forward(ddp=self.model),
        }
        optfuse.fuse(self.optimizer, how[self.mode])

    def train(self, before_step=lambda: None, **in_backward):
        """Rank 1 does what it is told to in the broken step."""
        for i in range(2 * BROKEN):
            broken = self.rank == 1 and i == BROKEN
            self.optimizer.zero_grad()
            loss_of(self.model, i).backward(**(in_backward if broken else {}))
            if broken:
                before_step()
            self.optimizer.step()


def refused_by_fuse(rank, mode):
    """The arguments of fuse() differ between the ranks, as they may by mistake."""
    job = Job(rank, mode)
    if rank == 1:
        job.optimizer.param_groups[0]["differentiable"] = True
    job.fuse()
    job.train()


def raises_in_step(rank, mode):
    def spoil():
        if mode != "backward":
            next(iter(job.optimizer.state.values()))["step"] = 7  # not a tensor
        else:
            job.optimizer.param_groups[0]["lr"] = 7.0  # after the updates

    job = Job(rank, mode)
    job.fuse()
    job.train(before_step=spoil)


def raises_in_backward(rank, mode):
    """An update would change weights that the graph of the gradients still needs."""
    job = Job(rank, mode)
    job.fuse()
    job.train(create_graph=True)


def loses_its_partner(rank, mode):
    """Whatever rank 0 uses then says so, again and again."""
    job = Job(rank, mode)
    job.fuse()
    try:
        if rank == 1:
            job.model.module[0].weight.register_hook(fail_at(BROKEN))
        job.train()
    except RuntimeError as error:
        if rank == 0:
            lost = "reduction of gradients between processes has failed"
            assert lost in str(error), f"rank 0 got {error}"
            for use in (
                job.optimizer.step,
                job.model.module[0].weight.sum,
                lambda: job.model.module[0].weight.grad.sum(),
                job.model.state_dict()["0.weight"].sum,
                optfuse.flush,
            ) * 2:
                refused(use, way_out="Load them from a checkpoint")
        raise


def fail_at(last):
    """A hook of a gradient: the first weight's is the last of a pass."""
    passes = itertools.count()

    def hook(_):
        if next(passes) == last:
            raise optfuse.Error("optfuse: this process gives up")

    return hook


class Case(NamedTuple):
    job: Callable
    mode: str
    world: int = 2


CASES = {
    "fuse() refuses, forward": Case(refused_by_fuse, "forward"),
    "step() raises, forward": Case(raises_in_step, "forward"),
    "fuse() refuses, the rank stays": Case(refused_by_fuse, "forward"),
    "fuse() refuses, backward": Case(refused_by_fuse, "backward"),
    "step() raises, backward": Case(raises_in_step, "backward"),
    "backward raises, backward": Case(raises_in_backward, "backward"),
    "fuse() refuses, first_use": Case(refused_by_fuse, "first_use"),
    "step() raises, first_use": Case(raises_in_step, "first_use"),
    "backward raises, first_use": Case(loses_its_partner, "first_use"),
    "fuse() refuses, the rank stays, first_use": Case(refused_by_fuse, "first_use"),
}


def play(name, case, here):
    here.begin(TIMEOUT)
    began = time.monotonic()
    error = apart.attempt(lambda: case.job(here.rank, case.mode))
    told = {"error": error, "seconds": time.monotonic() - began}
    if "stays" in name and here.rank == 1:  # rank 0 waits, but not for ever
        here.wait_for_others()
    here.write(told)


if __name__ == "__main__":
    apart.main(CASES, play)
