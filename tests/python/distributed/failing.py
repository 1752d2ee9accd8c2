# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of two ranks in which rank 1 goes wrong. A forked child plays each; what stopped it is
written down.

python failing.py FOLDER RANK NAME ..."""

import datetime
import itertools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo
import torch.distributed as dist
from common import adamw, loss_of, net, refused
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

TIMEOUT = 20.0  # seconds of the process group
PATIENCE = 300.0  # seconds that a rank stays
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


CASES = {
    "fuse() refuses, forward": (refused_by_fuse, "forward"),
    "step() raises, forward": (raises_in_step, "forward"),
    "fuse() refuses, the rank stays": (refused_by_fuse, "forward"),
    "fuse() refuses, backward": (refused_by_fuse, "backward"),
    "step() raises, backward": (raises_in_step, "backward"),
    "backward raises, backward": (raises_in_backward, "backward"),
    "fuse() refuses, first_use": (refused_by_fuse, "first_use"),
    "step() raises, first_use": (raises_in_step, "first_use"),
    "backward raises, first_use": (loses_its_partner, "first_use"),
    "fuse() refuses, the rank stays, first_use": (refused_by_fuse, "first_use"),
}


def play(folder, rank, name):
    job, mode = CASES[name]
    store = dist.FileStore(f"{folder}/store-{list(CASES).index(name)}", 2)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    began, error = time.monotonic(), None
    try:
        job(rank, mode)
    except Exception as raised:
        error = [type(raised).__module__, type(raised).__name__, str(raised)]
    told = {"error": error, "seconds": time.monotonic() - began}
    if "stays" in name and rank == 1:  # rank 0 waits, but not for ever
        wait_for(place(folder, 0, name))
    place(folder, rank, name).write_text(json.dumps(told), "utf-8")
    os._exit(error is not None)


def place(folder, rank, name):
    return Path(f"{folder}/{rank}-{name}")


def wait_for(path):
    ends = time.monotonic() + PATIENCE
    while not path.exists() and time.monotonic() < ends:
        time.sleep(0.02)


def main(folder, rank, names):
    torch.set_num_threads(1)
    for name in names:
        if os.fork() == 0:
            play(folder, rank, name)
        _, status = os.wait()
        if os.WIFSIGNALED(status):
            told = {"error": ["", "signal", str(os.WTERMSIG(status))], "seconds": 0.0}
            place(folder, rank, name).write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
