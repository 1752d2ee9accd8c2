# SPDX-License-Identifier: BSD-3-Clause
"""Page faults in some iterations of a layer whose gradient glibc's malloc does not keep."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from optfuse._trials.random_state import random_as_it_was
from optfuse_tools.ab.page_faults import WORTH_SAYING, Usage, advice, share
from optfuse_tools.doctor.finding import Finding

WIDTH = 3072  # a gradient of 36 MiB
WARM_UP, ITERATIONS = 4, 6


def _used() -> Usage:
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    used = Usage()
    for iteration in range(WARM_UP + ITERATIONS):
        before = Usage.now()
        layer(torch.ones(8, WIDTH, device="cpu", dtype=torch.float32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if iteration >= WARM_UP:
            used.add_since(before)
    return used


def findings() -> Iterator[Finding]:
    """No problem: it works, and could be faster."""
    with random_as_it_was():
        found = share(_used())
    text = "a small part of the time, also of wide layers"
    if found > WORTH_SAYING:
        text = advice(found, f"of a layer of {WIDTH} x {WIDTH} at batch 8")
    yield Finding("page faults", text)
