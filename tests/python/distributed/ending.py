# SPDX-License-Identifier: BSD-3-Clause
"""A job of two ranks that ends while gradients are on their way. Rank 0 says what its weights are,
after rank 1 has ended.

python ending.py FOLDER RANK stock|fused [destroy]"""

import datetime
import gc
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from common import adamw, loss_of, net
from ddp_models import Network, over
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse


def trained(rank, way):
    """The model and its optimizer. What DDP makes of the model ends here: PyTorch can deadlock
    where that outlives its group, in stock's job, too."""
    model = net()
    wrapped = DDP(model, bucket_cap_mb=0.0002)  # which gives rank 1 the weights of rank 0
    optimizer, hook = adamw(model.parameters()), (Network(0.05), over)
    if way == "stock":
        wrapped.register_comm_hook(*hook)
    else:
        optfuse.fuse(optimizer, optfuse.Forward(ddp=optfuse.DDPModel(wrapped, hook)))
    for i in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, 10 * rank + i).backward()
        optimizer.step()
    return model, optimizer


def main(folder, rank, way, *ends):
    store = dist.FileStore(f"{folder}/store", 2)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    model, _optimizer = trained(rank, way)
    if "destroy" in ends:
        gc.collect()
        dist.destroy_process_group()
    if rank == 0:
        time.sleep(1.0)
        print([p.tolist() for p in model.parameters()])


if __name__ == "__main__":
    import torch

    torch.manual_seed(0)
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
