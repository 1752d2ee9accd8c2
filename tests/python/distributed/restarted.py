# SPDX-License-Identifier: BSD-3-Clause
"""A job for torchrun that keeps checkpoints. In its first life rank 1 is killed in the middle of
a step; the next life goes on from the last checkpoint.

torchrun ... restarted.py FOLDER MODE    (MODE: stock, undisturbed; forward; backward)"""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from common import adamw, loss_of, net
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

STEPS, EVERY = 12, 3
KILLED = 7  # between two checkpoints
SMALL = 0.0002  # MiB a bucket


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def arm(mode, model):
    """Half of the updates are launched then, the others are pending or have no gradient yet."""
    middle = model.module[2]
    if mode == "forward":
        middle.register_forward_hook(kill)
    else:
        middle.register_full_backward_hook(kill)


def save(path, **what):
    """Whole, or not at all."""
    if dist.get_rank() == 0:
        torch.save(what, f"{path}.new")
        os.replace(f"{path}.new", path)


def train(folder, mode):
    torch.manual_seed(0)
    model = DDP(net(), bucket_cap_mb=SMALL)
    optimizer = adamw(model.parameters())
    if mode != "stock":
        optfuse.fuse(optimizer, optfuse.Backward(ddp=model) if mode == "backward" else mode)
    first, checkpoint = 0, Path(folder, "checkpoint")
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    print(f"life {life} begins with step {first}", flush=True)
    for step in range(first, STEPS):
        if (dist.get_rank(), step, life) == (1, KILLED, 0) and mode != "stock":
            arm(mode, model)
        optimizer.zero_grad()
        loss_of(model, 2 * step + dist.get_rank()).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(checkpoint, step=step + 1, **state)
            dist.barrier()  # or a rank could be ahead of the checkpoint of a step that it ended
    save(f"{folder}/end", model=model.state_dict(), optimizer=optimizer.state_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(*sys.argv[1:])  # when the group ends, no model may be left: it would end it under the GIL
    dist.destroy_process_group()
