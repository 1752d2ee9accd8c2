# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small GPT on characters as nanoGPT does: groups with and without weight decay, a warm-up
and a cosine of the learning rate, accumulation, clipping, evaluation and checkpoints."""

import argparse
import inspect
import math
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
for name, default in {
    "iterations": 20, "width": 32, "layers": 2, "heads": 2, "block": 32, "batch": 4, "accumulate": 2
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--clip", type=float, default=1.0)
options = parser.parse_args()

torch.manual_seed(1337)
text = "".join(inspect.getsource(module) for module in (argparse, inspect, tempfile))
letters = sorted(set(text))
data = np.array([letters.index(letter) for letter in text], dtype=np.uint16)


def get_batch():
    starts = torch.randint(len(data) - options.block, (options.batch,))
    x = [torch.from_numpy(data[i : i + options.block].astype(np.int64)) for i in starts]
    y = [torch.from_numpy(data[i + 1 : i + 1 + options.block].astype(np.int64)) for i in starts]
    return torch.stack(x), torch.stack(y)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        width = options.width
        self.wte, self.wpe = nn.Embedding(len(letters), width), nn.Embedding(options.block, width)
        self.blocks = nn.Sequential(*(Block(width, options.heads) for _ in range(options.layers)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, len(letters), bias=False)
        self.wte.weight = self.head.weight  # tied

    def forward(self, x, y):
        hidden = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        logits = self.head(self.ln_f(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizer(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))


def rate(iteration):
    if iteration < 5:
        return 1e-3 * (iteration + 1) / 5
    return 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * iteration / options.iterations))


@torch.no_grad()
def estimate():
    model.eval()
    losses = [model(*get_batch()).item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


def save():
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, os.path.join(folder, "ckpt.pt"))


model = GPT()
optimizer = model.configure_optimizer()
for iteration in range(options.iterations):
    for group in optimizer.param_groups:
        group["lr"] = rate(iteration)
    if iteration % 10 == 0:
        print(f"step {iteration}: loss {estimate():.4f}")
        save()
    for _ in range(options.accumulate):
        (model(*get_batch()) / options.accumulate).backward()
    if options.clip:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"loss {estimate():.4f}")
