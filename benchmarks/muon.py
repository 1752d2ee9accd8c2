# SPDX-License-Identifier: BSD-3-Clause
"""Section muon: step() of torch.optim.Muon over equal small matrices, whose Newton-Schulz products
run as batched ones where it is fused, in forward mode; beside it as it is. In processor time on
one thread, so that other programs disturb little; interleaved."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from figures import columns, median_interval, title
from torch import nn
from torch.optim import Muon

import optfuse

#: Rows, columns and number of matrices: heads', LoRA's, one without whole vectors, a larger one.
FORMS = ((64, 64, 64), (16, 64, 64), (64, 16, 64), (8, 512, 40), (33, 47, 32), (128, 256, 16))
ROUNDS, SMOKE_ROUNDS, WARM_UP = 21, 3, 4


class Training:
    def __init__(self, rows: int, width: int, n: int, fused: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randn(rows, width, generator=generator) for _ in range(n)]
        self.params = [nn.Parameter(tensor) for tensor in numbers]
        stock = Muon(self.params, lr=1e-2)
        self.optimizer = optfuse.fuse(stock, mode="forward") if fused else stock

    def step(self, number: int) -> float:
        """Milliseconds of a step with gradients of this number."""
        generator = torch.Generator().manual_seed(number)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator)
        began = time.process_time()
        self.optimizer.step()
        optfuse.flush()
        return (time.process_time() - began) * 1e3


def compare(form: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    stock, fused = (Training(*form, fused) for fused in (False, True))
    times = [(stock.step(i), fused.step(i)) for i in range(WARM_UP + rounds)][WARM_UP:]
    equal = all(map(torch.equal, stock.params, fused.params))
    return {
        "rows": form[0],
        "columns": form[1],
        "matrices": form[2],
        "stock_ms": median_interval([a for a, _ in times]),
        "ours_ms": median_interval([b for _, b in times]),
        "by_stock": median_interval([a / b for a, b in times]),
        "equal_bits": equal,
    }


def section(chosen: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    title("step() of Muon, milliseconds of the processor, one thread")
    rounds = chosen.rounds or (SMOKE_ROUNDS if chosen.smoke else ROUNDS)
    found = [compare(form, rounds) for form in FORMS[: 1 if chosen.smoke else None]]
    rows = [("", "stock", "forward fusion", "times as fast", "bits")]
    for one in found:
        rows.append(
            (
                f"{one['matrices']} of {one['rows']} x {one['columns']}",
                *(str(one[key]) for key in ("stock_ms", "ours_ms", "by_stock")),
                "equal" if one["equal_bits"] else "DIFFERENT",
            )
        )
    print(columns(rows))
    return {"forms": found}
