# SPDX-License-Identifier: BSD-3-Clause
"""Each name of the public API as a typed script uses it. mypy reads this file; nobody runs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import optfuse

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
stock = torch.optim.AdamW(model.parameters())
delay = optfuse.Delay({model[0]: 2}, weights="latest")
for mode in (optfuse.Backward(accumulate=2), optfuse.Forward(max_grad_norm=1.0, delay=delay)):
    assert_type(optfuse.fuse(stock, mode), torch.optim.AdamW)
parallel = optfuse.DDPModel(nn.parallel.DistributedDataParallel(model), comm_hook=None)
assert_type(optfuse.fuse(stock, optfuse.Forward(ddp=parallel), strict=True), torch.optim.AdamW)
optimizer = assert_type(optfuse.fuse(stock, mode="backward"), torch.optim.AdamW)
assert_type(optfuse.unfuse(optimizer), torch.optim.AdamW)
assert_type(optfuse.fuse(optfuse.optim.Lion(model.parameters(), lr=1e-3)), optfuse.optim.Lion)
assert_type(optfuse.clip_grad_norm_(optimizer, 1.0), Tensor)
assert_type(optfuse.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf")), Tensor)
assert_type(optfuse.summary(optimizer), optfuse.Summary)
assert_type(str(optfuse.explain(optimizer)), str)
assert_type(optfuse.random_bits(1, 1, 0, 0, (3, 5), torch.bfloat16, first=7), Tensor)
optfuse.flush()
optfuse.keep_memory()
masters = optfuse.masters(model.parameters(), torch.float64)
assert_type(masters[0], nn.Parameter)
masters.take_over()
masters.hand_over()
optfuse.drain(optimizer)
optfuse.register(torch.optim.Adamax, per_parameter=True)
with optfuse.accumulate(optimizer):
    pass
with optfuse.reorder(model, "reverse_first", k=1) as reordering:
    assert_type(reordering, optfuse.Reordering)
kfac = assert_type(optfuse.kfac(model, optimizer), optfuse.KFAC)
assert_type(kfac.summary(), optfuse.KFACSummary)
plan = optfuse.pipeline.plan(model, torch.ones(2, 4), 2, "layerpipe", network=(0.0, 0.0))
assert_type(plan, optfuse.pipeline.PipelinePlan)
pipeline = optfuse.pipeline.Pipeline(plan, model, nn.MSELoss(), stock)
pipeline.drain()


def build(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> Callable[[], Tensor]:
    fused = wrap(torch.optim.AdamW(model.parameters()))

    def iteration() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        fused.step()
        return loss

    return iteration


assert_type(str(optfuse.ab(build, rounds=5)), str)
try:
    optfuse.fuse(stock, strict=True)
except optfuse.Error as error:
    assert_type(error, optfuse.Error)
