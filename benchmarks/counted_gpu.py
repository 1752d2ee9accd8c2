# SPDX-License-Identifier: BSD-3-Clause
"""Run by launch_gpu.py, on the GPU that the tests play (tests/device):

counted_gpu.py instructions N   under callgrind: what counted.py does; prints nothing
counted_gpu.py launches         of models by the size of buckets; prints JSON"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "device"))

import fakecuda

fakecuda.load()  # before optfuse

import torch  # noqa: E402
from cells import MODELS  # noqa: E402
from counted import count  # noqa: E402
from micro import parameters  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim import AdamW  # noqa: E402

import optfuse  # noqa: E402
from optfuse._process import drain_all  # noqa: E402

LAUNCHING = ("MobileNetV2", "ResNet-18", "GPT")
BUCKETS = (1, 1 << 20, 4 << 20, 16 << 20, 1 << 40)
WARM_UP = 3  # the first makes the state, and then records come back from what is done

WAYS: dict[str, Callable[[AdamW], AdamW]] = {
    "fused=True": lambda optimizer: optimizer,
    "forward fusion": lambda optimizer: optfuse.fuse(optimizer, mode="forward"),
    "backward fusion": lambda optimizer: optfuse.fuse(optimizer, mode="backward"),
    "side stream": lambda optimizer: optfuse.fuse(optimizer, mode="backward", side_stream=True),
}


def backward(params: list[Tensor]) -> Callable[[], None]:
    """One operator a parameter: what the device itself does is left out, but not exactly."""
    ends = [p.neg() for p in params]
    ones = [torch.ones_like(p) for p in params]
    return lambda: torch.autograd.backward(ends, ones)


def use(params: list[Tensor]) -> None:
    for p in params:
        p.detach()


def iterate(
    name: str,
    params: list[Tensor],
    optimizer: AdamW,
    count: Callable[[str, Callable[[], object]], None],
) -> None:
    """fused=True's backward and uses are those without an optimizer."""
    optimizer.zero_grad()
    count(f"backward, {name}", backward(params))
    count(f"step, {name}", optimizer.step)
    count(f"use, {name}", lambda: use(params))
    count(f"use again, {name}", lambda: use(params))
    fakecuda.synchronize()
    fakecuda.clear()


def train(name: str, n: int) -> None:
    params = parameters(n, fakecuda.NAME)
    optimizer = WAYS[name](AdamW(params, fused=name == "fused=True"))
    for _ in range(WARM_UP):
        iterate(name, params, optimizer, lambda _, run: run())
    iterate(name, params, optimizer, count)
    drain_all()  # or the next one would find updates in flight


def launches(params: list[Tensor], **options: object) -> int:
    """Kernels of one iteration."""
    optimizer = optfuse.fuse(AdamW(params), **options)
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        fakecuda.synchronize()
        torch.ops.fakecuda.set_logging(True)
        backward(params)()
        optimizer.step()
        use(params)
    names = torch.ops.fakecuda.launches()
    torch.ops.fakecuda.set_logging(False)
    drain_all()
    return sum(name.startswith("of_cuda") for name in names)


def all_launches() -> list[dict[str, object]]:
    found = []
    for model in LAUNCHING:
        params = [p.detach().to(fakecuda.NAME) for p in MODELS[model]().parameters()]
        for p in params:
            p.requires_grad_()
        for mode in ("forward", "backward"):
            by_bucket = {n: launches(params, mode=mode, bucket_bytes=n) for n in BUCKETS}
            found.append({"model": model, "mode": mode, "launches": by_bucket})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.disable()
    if sys.argv[1] == "launches":
        print(json.dumps(all_launches()))
    else:
        for way in WAYS:
            train(way, int(sys.argv[2]))
