# SPDX-License-Identifier: BSD-3-Clause
"""Run by launch.py under callgrind, as "counted.py cpu N" or "counted.py gpu N": each part of
the machinery once, between marks, for N parameters of one element. Prints nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Run = Callable[[], object]
Count = Callable[[str, Run], None]
WARM_UP = 3  # iterations: the first makes the state, then a GPU's records are used again


def marks() -> Count:
    """Counts what it runs, under a name."""
    build = Path(os.environ["OPTFUSE_BUILD"])
    library = ctypes.CDLL(str(build / "benchmarks" / "libcallgrind_marks.so"))

    def count(name: str, run: Run) -> None:
        library.count_begin()
        run()
        library.count_end(name.encode())

    return count


def uncounted(name: str, run: Run) -> None:
    run()


def parameters(n: int, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1, device=device)) for _ in range(n)]


# For the CPU. Each part runs first to warm up and is not counted then; backward mode takes
# over in the second iteration what the first one has made.


def backward(params: list[nn.Parameter]) -> Run:
    return torch.stack([p * 2.0 for p in params]).sum().backward


def hooks(n: int, count: Count) -> None:
    plain, ours = parameters(n), parameters(n)
    without, optimizer = AdamW(plain), optfuse.fuse(AdamW(ours), mode="backward")
    for counting in (uncounted, uncounted, count):
        counting("zero_grad, fused=True", without.zero_grad)
        counting("zero_grad, backward fusion", optimizer.zero_grad)
        counting("backward, no optimizer", backward(plain))
        counting("backward, backward fusion", backward(ours))
        counting("step, backward fusion", optimizer.step)


def forward_parts(n: int, count: Count) -> None:
    params = parameters(n)
    optimizer = optfuse.fuse(AdamW(params), mode="forward")
    backward(params)()
    optimizer.step()
    assert optfuse.summary(optimizer).pending, "there is nothing to measure"
    optfuse.flush(optimizer)
    link = link_of(optimizer)
    needs, missing = (ctypes.c_size_t * n)(), ctypes.c_size_t()

    def in_c() -> None:
        bindings.check(bindings.lib.of_shim_step(link.plan, needs, n, ctypes.byref(missing)))

    def use(op: Callable[[Tensor], Tensor]) -> None:
        for p in params:
            op(p)

    for counting in (uncounted, count):
        counting("step in C", in_c)
        counting("flush", lambda: optfuse.flush(optimizer))
        counting("step", optimizer.step)
        optfuse.flush(optimizer)
        for name, op in (("detach", Tensor.detach), ("view", lambda p: p.view(1))):
            use(op)
            counting(f"{name}, nothing pending", lambda op=op: use(op))
            optimizer.step()
            counting(f"{name}, pending", lambda op=op: use(op))


def clipping(n: int, count: Count) -> None:
    params = parameters(n)
    optimizer = optfuse.fuse(AdamW(params))
    for p in params:
        p.grad = torch.ones(1)
    for counting in (uncounted, count):
        counting("clip", lambda: nn.utils.clip_grad_norm_(params, 0.1))
    optfuse.unfuse(optimizer)


def zeroing(n: int, count: Count) -> None:
    params = parameters(n)
    optimizer = optfuse.fuse(AdamW(params))
    for counting in (uncounted, uncounted, count):
        backward(params)()
        optimizer.step()
        counting("zero_grad", optimizer.zero_grad)
    optfuse.unfuse(optimizer)


def scaling(n: int, count: Count) -> None:
    for suffix in ("", ", fused=True"):
        params = parameters(n)
        optimizer = AdamW(params, fused=bool(suffix))
        if not suffix:
            optfuse.fuse(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for counting in (uncounted, uncounted, count):
            optimizer.zero_grad()
            scaler.scale(torch.stack([p * 2.0 for p in params]).sum()).backward()
            counting(f"unscale{suffix}", partial(scaler.unscale_, optimizer))
            counting(f"scaled step{suffix}", partial(scaler.step, optimizer))
            counting(f"scaler's update{suffix}", scaler.update)


def averages(n: int, count: Count) -> None:
    model = nn.ParameterList(parameters(n))
    optimizer = optfuse.fuse(AdamW(model.parameters()))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn())
    backward([*model])()
    for counting in (uncounted, uncounted, count):
        optimizer.step()
        counting("average", lambda: averaged.update_parameters(model))
    assert optfuse.summary(optimizer).averages, "there is nothing to measure"
    optfuse.unfuse(optimizer)


def sharded(n: int, count: Count) -> None:
    """By FSDP2, in one process; a layer of two parameters is a unit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for way in ("fused=True", "forward fusion", "backward fusion"):
        model = nn.Sequential(*[fully_shard(nn.Linear(1, 1)) for _ in range(n // 2)])
        optimizer = AdamW(fully_shard(model).parameters(), fused=True)
        if way != "fused=True":
            optfuse.fuse(optimizer, way.split()[0])
        for counting in (*[uncounted] * WARM_UP, count):
            counting(f"sharded backward, {way}", model(torch.ones(1, 1)).sum().backward)
            counting(f"sharded step, {way}", optimizer.step)
            optimizer.zero_grad()
    dist.destroy_process_group()


class Plain(AdamW):
    """A class that has no rule."""


def recorded(_: int, count: Count) -> None:
    for way in ("by itself", "recorded"):
        params = parameters(1)
        optimizer = Plain(params, foreach=False)
        if way == "recorded":
            optfuse.fuse(optimizer)
        params[0].grad = torch.ones(1)
        for counting in (*[uncounted] * 12, count):
            counting(f"one tensor, {way}", optimizer.step)


def stock(n: int, count: Count) -> None:
    params = parameters(n)
    optimizer = AdamW(params, fused=True)
    for p in params:
        p.grad = torch.ones(1)
    optimizer.step()
    count("step, fused=True", optimizer.step)


PARTS = (hooks, forward_parts, zeroing, clipping, scaling, averages, sharded, recorded, stock)


def backward_of_each(params: list[nn.Parameter]) -> Run:
    """One operator a parameter: what the device itself does is left out, but not exactly."""
    ends = [p.neg() for p in params]
    return partial(torch.autograd.backward, ends, [torch.ones_like(p) for p in params])


def train(name: str, n: int, count: Count) -> None:
    params = parameters(n, gpu.NAME)
    optimizer = AdamW(params, fused=name == "fused=True")
    if name != "fused=True":
        backward = optfuse.Backward(side_stream=name == "side stream")
        optfuse.fuse(optimizer, "forward" if name == "forward fusion" else backward)

    def use() -> None:
        for p in params:
            p.detach()

    for counting in (*[uncounted] * WARM_UP, count):
        optimizer.zero_grad()
        counting(f"backward, {name}", backward_of_each(params))
        counting(f"step, {name}", optimizer.step)
        counting(f"use, {name}", use)
        counting(f"use again, {name}", use)
        gpu.synchronize()
        gpu.clear()
    drain_all()  # or the next one would find updates in flight


if __name__ == "__main__":
    where, parameter_count = sys.argv[1], int(sys.argv[2])
    if where == "gpu":  # the one that the tests play; loaded before optfuse
        os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "device"))
        import gpu

        gpu.load()
    import optfuse
    from optfuse._library import bindings
    from optfuse._link import link_of
    from optfuse._process import drain_all

    torch.set_num_threads(1)
    gc.disable()
    if where == "gpu":
        for way in ("fused=True", "forward fusion", "backward fusion", "side stream"):
            train(way, parameter_count, marks())
    else:
        for part in PARTS:
            part(parameter_count, marks())
