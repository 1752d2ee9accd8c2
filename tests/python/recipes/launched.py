# SPDX-License-Identifier: BSD-3-Clause
"""Scripts for two processes that know nothing of optfuse: `launched.py accelerate|lightning`. The
first process prints how many there are and what was trained."""

from __future__ import annotations

import hashlib
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.manual_seed(0)
pixels, labels = (torch.tensor(array[:512]) for array in load_digits(return_X_y=True))
data = torch.utils.data.TensorDataset(pixels.float() / 16, labels)
loader = torch.utils.data.DataLoader(data, batch_size=64)  # of which each process takes a half
net = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))


def say(processes, parameters):
    values = b"".join(p.detach().numpy().tobytes() for p in parameters)
    print(f"{processes} processes, {hashlib.sha256(values).hexdigest()}")


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
    model, optimizer = accelerator.prepare(net, optimizer)
    for batch in loader:
        x, y = (half[accelerator.process_index :: 2] for half in batch)
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        say(accelerator.num_processes, model.parameters())


def lightning():
    from lightning.pytorch import LightningModule, Trainer

    class Digits(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            x, y = (half[self.global_rank :: 2] for half in batch)
            return cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **quiet,
    )
    model = Digits()
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        say(trainer.world_size, model.parameters())


if __name__ == "__main__":
    {"accelerate": accelerate, "lightning": lightning}[sys.argv[1]]()
