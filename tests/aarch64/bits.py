# SPDX-License-Identifier: BSD-3-Clause
"""Runs under emulation and prints the figures of docs/numerics.md about AArch64: norms in each
order, and the trials of optfuse/_trials/stock_trial.py for each class and dtype, of updates that
promise the bits of this torch. Fails unless those differ that this page names."""

from __future__ import annotations

import sys
import time
from typing import Any

import norm_orders
import torch
from torch.optim import Optimizer

import optfuse
from optfuse._fused.classes import become_fused
from optfuse._options import Options
from optfuse._rules import RULES, Group, Rule
from optfuse._trials import stock_trial

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# One to eight vectors of 16 bytes in each dtype, and one element less and more.
PLACES = [(count, size, more) for count in range(1, 9) for size in (2, 4, 8) for more in (-1, 0, 1)]
SIZES = sorted({16 * count // size + more for count, size, more in PLACES})
BROKEN = {"SGD bfloat16", "SGD float16"}  # in stock
# Where add(y, alpha=a) rounds in another way.
CHAINS = ("RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Lion", "Adan")
SVE = BROKEN | {f"{name} float16" for name in CHAINS}
# By PyTorch's kernels; those of SVE128 give other reciprocals, too.
DIFFERENT = {"DEFAULT": BROKEN, "SVE128": SVE | {"RAdam bfloat16"}, "SVE256": SVE}


def difference(stock: type[Optimizer], rule: Rule, dtype: torch.dtype) -> str:
    some: Any = [torch.zeros(1, 1, dtype=dtype, requires_grad=True)]
    group: Group = stock(some, lr=1e-2).param_groups[0]  # type: ignore[call-arg]
    options = {k: v for k, v in group.items() if k not in ("params", "lr")}
    kind = (stock, dtype, torch.device("cpu"), "")
    options |= rule.flags(options)
    return stock_trial._try(kind, options, rule, lambda own: become_fused(own, Options(), rule))


def compare_all() -> set[str]:
    """The names of what differs; prints a line for each."""
    names, different = [], set()
    for stock, rule in RULES.items():
        for dtype in DTYPES:
            if rule.rounds and dtype is torch.float64:
                continue  # its own lines run
            started = time.monotonic()
            why = difference(stock, rule, dtype)
            names.append(f"{stock.__name__} {str(dtype).removeprefix('torch.')}")
            different |= {names[-1]} if why else set()
            passed = time.monotonic() - started
            print(f"{names[-1]}: {why or 'equal'} ({passed:.0f} s)", flush=True)
    print(f"{len(names) - len(different)} of {len(names)} equal", flush=True)
    return different


def main() -> int:
    capability = torch.backends.cpu.get_cpu_capability()
    print(torch.__version__, capability, flush=True)
    stock_trial.SIZES = (*SIZES, 1003)  # type: ignore[assignment]
    optfuse.fuse(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))  # starts the library
    wrong = norm_orders.complaints()
    if not torch.ops.optfuse.norms_are_torchs():
        wrong += "\nthe library finds norms in no order of ours"
    if unlike := compare_all() ^ DIFFERENT[capability]:
        wrong += f"\nnot as docs/numerics.md says: {', '.join(sorted(unlike))}"
    print(wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
