# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed: its engine copies the parameters into one flat tensor and steps that."""

import os

import deepspeed
import torch
from digits import dataset, net

import optfuse

os.environ["LOCAL_RANK"] = "0"
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(0)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
settings = {"train_batch_size": 128, "zero_optimization": {"stage": 1}}
settings |= {"zero_allow_untested_optimizer": True}
engine, optimizer, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer, config=settings, dist_init_required=False
)
optimizer = optfuse.fuse(optimizer)
for image, label in torch.utils.data.DataLoader(dataset, batch_size=128, drop_last=True):
    engine.backward(torch.nn.functional.cross_entropy(engine(image), label))
    engine.step()
