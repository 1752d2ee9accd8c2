# SPDX-License-Identifier: BSD-3-Clause
"""K-FAC's factors packed and unpacked by optfuse's kernels, beside PyTorch's operators that do the
same by an index for each element: microseconds a call, launched one after the other; and that the
kernels have the CPU's bits.

    packing.py --device cuda"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

import optfuse  # noqa: F401 - registers the operators

SIZES = (256, 577, 1153, 2305, 4608)
CALLS, REPEATS = 20, 5


def places(d: int, device: torch.device) -> Tensor:
    row, column = torch.triu_indices(d, d, device=device)
    return row * d + column


def pack_by_index(matrix: Tensor) -> Tensor:
    d = len(matrix)
    packed = matrix.new_zeros(d * (d + 1) // 2)
    return packed.add_(matrix.view(-1).index_select(0, places(d, matrix.device)))


def unpack_by_index(packed: Tensor, d: int, damping: float) -> Tensor:
    upper = packed.new_zeros(d, d)
    upper.view(-1).index_copy_(0, places(d, packed.device), packed)
    full = upper + upper.triu(1).T
    full.diagonal().add_(damping)
    return full


def microseconds(run: Callable[[], object], device: torch.device) -> float:
    """The least of some, each the mean of some calls."""
    api, found = torch.get_device_module(device), []
    for _ in range(1 + REPEATS):
        api.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        api.synchronize()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    return min(found[1:])


def measured(d: int, dtype: torch.dtype, device: torch.device) -> str:
    there = torch.ones(d, d, dtype=dtype).normal_()
    matrix, ops = there.to(device), torch.ops.optfuse
    packed = ops.pack_factor(matrix)
    assert torch.equal(packed.cpu(), ops.pack_factor(there)), f"packed, {d} rows"
    whole, wanted = ops.unpack_factor(packed, d, 0.3), ops.unpack_factor(packed.cpu(), d, 0.3)
    assert torch.equal(whole.cpu(), wanted), f"unpacked, {d} rows"
    assert torch.equal(pack_by_index(matrix), packed), "an index finds other places"
    times = (
        microseconds(lambda: ops.pack_factor(matrix), device),
        microseconds(lambda: pack_by_index(matrix), device),
        microseconds(lambda: ops.unpack_factor(packed, d, 0.3), device),
        microseconds(lambda: unpack_by_index(packed, d, 0.3), device),
    )
    name = str(dtype).removeprefix("torch.")
    return f"{d:6} {name:8}" + "".join(f" {spent:10.1f}" for spent in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small ones")
    chosen = parser.parse_args()
    head = ("pack", "by index", "unpack", "by index")
    print(f"{'us':15}" + "".join(f" {name:>10}" for name in head), flush=True)
    for dtype in (torch.float32, torch.float64):
        for d in SIZES[:2] if chosen.quick else SIZES:
            print(measured(d, dtype, torch.device(chosen.device)), flush=True)


if __name__ == "__main__":
    main()
