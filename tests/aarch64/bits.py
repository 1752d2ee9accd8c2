# SPDX-License-Identifier: BSD-3-Clause
"""Runs under emulation: the trials of norms, and of optfuse/_trials/stock_trial.py for each class
and dtype, of updates that promise the bits of this torch. Prints a line each; fails if bits
differ."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.optim import Optimizer

import optfuse
from optfuse._classes import become_fused
from optfuse._options import Options
from optfuse._rules import RULES, Group, Rule
from optfuse._trials import stock_trial

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# One to eight vectors of 16 bytes in each dtype, and one element less and more.
PLACES = [(count, size, more) for count in range(1, 9) for size in (2, 4, 8) for more in (-1, 0, 1)]
SIZES = sorted({16 * count // size + more for count, size, more in PLACES})


def difference(stock: type[Optimizer], rule: Rule, dtype: torch.dtype) -> str:
    some: Any = [torch.zeros(1, 1, dtype=dtype, requires_grad=True)]
    group: Group = stock(some, lr=1e-2).param_groups[0]  # type: ignore[call-arg]
    options = {k: v for k, v in group.items() if k not in ("params", "lr")}
    kind = (stock, dtype, torch.device("cpu"), "")
    options |= rule.flags(options)
    return stock_trial._try(kind, options, rule, lambda own: become_fused(own, Options(), rule))


def is_known(stock: type[Optimizer], dtype: torch.dtype) -> bool:
    """Whether bits may differ, as docs/numerics.md says: of SGD in 16 bits, where stock's are
    broken, and of chains of operators in float16 with SVE."""
    if stock is torch.optim.SGD:
        return dtype.itemsize == 2
    fused = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    has_sve = "SVE" in torch.backends.cpu.get_cpu_capability()
    return has_sve and dtype == torch.float16 and stock not in fused


def main() -> int:
    print(torch.__version__, torch.backends.cpu.get_cpu_capability(), flush=True)
    stock_trial.SIZES = (*SIZES, 1003)  # type: ignore[assignment]
    optfuse.fuse(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))  # starts the library
    same = torch.ops.optfuse.norms_are_torchs()
    print(f"norms: {'equal' if same else 'in no order of ours'}", flush=True)
    failed = int(not same)
    for stock, rule in RULES.items():
        for dtype in DTYPES:
            started = time.monotonic()
            why = difference(stock, rule, dtype)
            failed += bool(why) and not is_known(stock, dtype)
            name = f"{stock.__name__} {str(dtype).removeprefix('torch.')}"
            print(f"{name}: {why or 'equal'} ({time.monotonic() - started:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
