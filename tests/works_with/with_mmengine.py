# SPDX-License-Identifier: BSD-3-Clause
"""MMEngine: a Runner with its OptimWrapper. --clip 0: without clip_grad."""

import sys

import torch
from digits import dataset, net
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch.nn.functional import cross_entropy

import optfuse


class Digits(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, image, label, mode):
        return {"loss": cross_entropy(self.net(image), label)}


torch.manual_seed(0)
model = Digits()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
optimizer = optfuse.fuse(optimizer)
clip = None if "--clip" in sys.argv else {"max_norm": 1.0}
runner = Runner(
    model=model,
    work_dir="work",
    train_dataloader={
        "dataset": dataset,
        "batch_size": 128,
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    },
    optim_wrapper=OptimWrapper(optimizer, clip_grad=clip),
    param_scheduler={"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5},
    train_cfg={"by_epoch": True, "max_epochs": 1},
    randomness={"seed": 0},
    default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
)
runner.train()
