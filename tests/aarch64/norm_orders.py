# SPDX-License-Identifier: BSD-3-Clause
"""Runs under emulation, for bits.py: norms by PyTorch beside those in each order that the kernels
have. All have to be equal in the order of PyTorch's kernels for this processor, and not in another
one: else the comparison shows nothing."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "aarch64" / "norm_orders.so"
ORDERS = {"DEFAULT": "neon", "SVE128": "sve128", "SVE256": "sve256"}  # by PyTorch's kernels
ROWS = 64
ALONE = 4  # of the rows, whose norms are taken by themselves, too
LENGTHS = (*range(1, 41), 63, 64, 65, 100, 127, 131, 140)
LONG = (1000, 1003, 5001, 33333, 100_001)  # PyTorch computes the last ones on two threads
# Squares of the second vanish, and sums of those of the third nearly overflow.
SPREADS = (1.0, 1e-30, 1e18)
Case = tuple[Tensor, int, Tensor]  # rows, how many numbers of each, and PyTorch's norms


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    library.order_name.argtypes, library.order_name.restype = [size], ctypes.c_char_p
    library.norms_of_rows.argtypes = [size, pointer, size, size, size, pointer]
    library.norms_of_rows.restype = None
    return library


def _norm(numbers: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(numbers, 2)
    return norm


def _short() -> Iterator[Case]:
    random = torch.Generator().manual_seed(1)
    for spread in SPREADS:
        rows = torch.randn(ROWS, LENGTHS[-1], generator=random) * spread
        for n in LENGTHS:
            some = rows[:, :n]
            yield rows, n, torch.linalg.vector_norm(some, 2, dim=1)
            yield rows[:ALONE], n, torch.stack([_norm(row) for row in some[:ALONE]])


def _long() -> Iterator[Case]:
    random = torch.Generator().manual_seed(2)
    for n in LONG:
        row = torch.randn(1, n, generator=random)
        yield row, n, _norm(row).view(1)
        yield row, n, torch._foreach_norm([row], 2)[0].view(1)


def _ours(library: ctypes.CDLL, order: int, rows: Tensor, n: int) -> Tensor:
    norms = torch.empty(len(rows))
    library.norms_of_rows(order, rows.data_ptr(), len(rows), rows.stride(0), n, norms.data_ptr())
    return norms


def _differing(ours: Tensor, theirs: Tensor) -> int:
    return int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())


def complaints() -> str:
    """Prints a line for each order."""
    torch.set_num_threads(2)
    library = _library()
    cases = [*_short(), *_long()]
    names = itertools.takewhile(bool, map(library.order_name, itertools.count()))
    differ = {}
    for order, name in enumerate(names):
        parts = [_differing(_ours(library, order, rows, n), theirs) for rows, n, theirs in cases]
        differ[name.decode()] = sum(parts)
        total = sum(len(theirs) for _, _, theirs in cases)
        print(f"norms, order of {name.decode()}: {sum(parts)} of {total} differ", flush=True)
    own = ORDERS[torch.backends.cpu.get_cpu_capability()]
    equal = [name for name, n in differ.items() if n == 0]
    return "" if equal == [own] else f"norms are equal in {equal}, and should be in {own} alone"
