# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train under DistributedDataParallel and torch.compile, for common.same() on every
rank. What dynamo counts is compared, too: graphs, compiled frames, breaks."""

import functools

import torch
import torch.distributed as dist
from common import Stock, adamw, everything, run, same
from ddp_scripts import SMALL, Net, ddp_of, train
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 12
COUNTED = ("stats", "frames", "graph_break", "unimplemented", "recompiles")


def compiled_ddp(model, backend):
    """Dynamo cuts the graph where a bucket ends."""
    wrapped = DDP(model, bucket_cap_mb=SMALL)
    return wrapped, torch.compile(wrapped, backend=backend)


def ddp_of_compiled(model, backend):
    wrapped = DDP(torch.compile(model, backend=backend), bucket_cap_mb=SMALL)
    return wrapped, wrapped


def compiled(mode, way, backend):
    def script(wrap):
        torch.compiler.reset()
        counters.clear()
        dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # dynamo takes no smaller ones
        model = Net()
        wrapped, called = way(model, backend)
        optimizer = wrap(adamw(model.parameters()), **ddp_of(wrap, wrapped))
        for i in range(STEPS):
            yield "loss", train(called, optimizer, i)
        counts = {name: dict(counters[name]) for name in COUNTED}
        assert counts["stats"]["unique_graphs"] > 0, "nothing was compiled"
        yield "counts", counts
        yield from everything(model, optimizer)

    run(script, Stock())  # dynamo looks once at what it will leave alone
    same(script, mode)


SCENARIOS = {
    f"{way.__name__} {backend} {mode}": functools.partial(compiled, mode, way, backend)
    for backend in ("aot_eager", "inductor")
    for way in (compiled_ddp, ddp_of_compiled)
    for mode in ("forward", "backward")
}
