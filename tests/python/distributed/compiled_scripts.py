# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train under DistributedDataParallel and torch.compile, for common.same() on every
rank. What dynamo counts is compared, too: graphs, compiled frames, breaks."""

import contextlib
import functools

import torch
import torch.distributed as dist
from common import Stock, adamw, everything, run, same_as
from ddp_models import BUCKETS, Net, fused, train
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

from optfuse import _process

STEPS = 12
LOOKED_AT = set()  # ways to compile: dynamo looks once at what it will leave alone
COUNTED = ("stats", "frames", "graph_break", "unimplemented", "recompiles")


def compiled_ddp(model, backend):
    """Dynamo cuts the graph where a bucket ends."""
    wrapped = DDP(model, **BUCKETS)
    return wrapped, torch.compile(wrapped, backend=backend)


def ddp_of_compiled(model, backend):
    wrapped = DDP(torch.compile(model, backend=backend), **BUCKETS)
    return wrapped, wrapped


@contextlib.contextmanager
def small_buckets():
    """Smaller ones than dynamo takes otherwise."""
    before, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 100
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


def compiled(way, backend):
    """In both modes. Compiling takes long: stock is run once for both."""

    def script(wrap, fusion="forward", backend=backend):
        wrap.way = fusion
        torch.compiler.reset()
        counters.clear()
        model = Net()
        wrapped, called = way(model, backend)
        optimizer = fused(wrap, wrapped, adamw(model.parameters()))
        for i in range(STEPS):
            yield "loss", train(called, optimizer, i)
        counts = {name: dict(counters[name]) for name in COUNTED}
        assert counts["stats"]["unique_graphs"] > 0, "nothing was compiled"
        yield "counts", counts
        yield from everything(model, optimizer)

    _process.start()  # replaces functions of DDP, which dynamo leaves alone then
    with small_buckets():
        if way not in LOOKED_AT:
            run(functools.partial(script, backend="eager"), Stock())
            LOOKED_AT.add(way)
        stock = run(script, Stock())
        for fusion in ("forward", "backward", "awaited"):
            mode = "backward" if fusion == "backward" else "forward"
            same_as(stock, functools.partial(script, fusion=fusion), mode)


SCENARIOS = {
    f"{way.__name__} {backend}": functools.partial(compiled, way, backend)
    for backend in ("aot_eager", "inductor")
    for way in (compiled_ddp, ddp_of_compiled)
}
