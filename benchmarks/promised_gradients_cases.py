# SPDX-License-Identifier: BSD-3-Clause
"""The models and scripts of the section promises: stacks of linear layers, blocks of a transformer
and an embedding, with few rows in a batch, and scripts that look at gradients or add them up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

import peers
import torch
from models import Block
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optfuse_tools.ab.variants import Iteration, Wrap

HEAD = 64  # features of an attention head
CLASSES = 64  # behind an embedding
MAX_NORM = 100.0  # that no model here reaches
REACHED = 1e-4  # by each model at each step


@dataclass(frozen=True)
class Case:
    kind: str  # of the model: mlp, gpt or embedding
    layers: int  # of an embedding: words
    width: int
    rows: tuple[int, ...]  # of the batches, in turn; of gpt and an embedding: tokens
    iterations: int  # a round
    passes: int = 1  # backward passes a step
    clips: float = 0  # clip_grad_norm_'s max_norm; 0: it is not called
    norm_every: int = 0  # reads its norm behind step() and zero_grad(), at every so many steps
    logs: bool = False  # reads the norm of each gradient after each step
    autocast: bool = False  # to bfloat16

    def __str__(self) -> str:
        rows = f"{len(self.rows)} sizes" if len(self.rows) > 1 else f"{self.rows[0]}"
        unit = f"batch {rows}" if self.kind == "mlp" else f"{rows} tokens"
        also = {
            "clip_grad_norm_": self.clips == MAX_NORM,
            "clip_grad_norm_ that clips": self.clips == REACHED,
            "norm read each step": self.norm_every == 1,
            f"norm read each {self.norm_every}th step": self.norm_every > 1,
            f"accumulate={self.passes}": self.passes > 1,
            "norm logger": self.logs,
            "bfloat16 autocast": self.autocast,
        }
        name = f"{self.kind} {self.layers} x {self.width}, {unit}"
        return ", ".join([name, *(word for word, is_so in also.items() if is_so)])

    @property
    def has_peers(self) -> bool:
        """Whether the iteration is one that peers.py can make as a whole."""
        plain = self.kind in ("mlp", "gpt") and len(self.rows) == self.passes == 1
        return plain and not self.logs and not self.autocast and not self.norm_every

    @property
    def in_backward(self) -> bool:
        """Whether backward fusion can: its gradients are gone when a script would look."""
        return not self.clips and not self.logs


PLAIN = Case("mlp", 4, 2048, (16,), 5)
CASES = (
    Case("mlp", 4, 4096, (8,), 2),
    PLAIN,
    Case("gpt", 4, 1024, (16,), 3),
    Case("gpt", 4, 768, (64,), 3),
    Case("mlp", 8, 1024, (8,), 10),
    Case("mlp", 8, 1024, (128,), 4),
    Case("mlp", 20, 512, (8,), 10),
    Case("mlp", 4, 2048, (16,), 5, clips=MAX_NORM),
    Case("mlp", 4, 2048, (16,), 5, clips=MAX_NORM, norm_every=1),
    Case("mlp", 4, 2048, (16,), 5, clips=MAX_NORM, norm_every=10),
    Case("mlp", 4, 2048, (16,), 5, clips=REACHED),
    Case("gpt", 4, 1024, (16,), 3, clips=MAX_NORM),
    Case("mlp", 4, 2048, (16,), 2, passes=4),
    Case("mlp", 4, 2048, (16,), 5, logs=True),
    Case("mlp", 4, 2048, tuple(range(1, 41)), 8),
    Case("mlp", 4, 2048, tuple(range(1, 201)), 8),
    Case("embedding", 50257, 768, (256,), 3),
)
#: Wide models, by name only (--case).
WIDE = (
    Case("mlp", 4, 4096, (1,), 2),
    Case("mlp", 4, 4096, (128,), 1),
    Case("mlp", 4, 2048, (1,), 6),
    Case("mlp", 4, 2048, (128,), 3),
    Case("mlp", 2, 8192, (8,), 1),
    Case("gpt", 4, 768, (16,), 4),
    Case("gpt", 4, 768, (256,), 2),
    Case("gpt", 4, 1024, (64,), 2),
    Case("gpt", 4, 1024, (256,), 1),
    Case("mlp", 4, 2048, (16,), 5, autocast=True),
    Case("gpt", 4, 1024, (16,), 3, autocast=True),
)
QUICK = (PLAIN, Case("mlp", 8, 1024, (8,), 10))
SMOKE = (Case("mlp", 2, 512, (4,), 2),)
ALL = {str(case): case for case in (*CASES, *WIDE, *QUICK, *SMOKE)}


def model_of(case: Case) -> nn.Module:
    width = case.width
    if case.kind == "gpt":
        return nn.Sequential(*(Block(width, width // HEAD) for _ in range(case.layers)))
    if case.kind == "embedding":
        return nn.Sequential(nn.Embedding(case.layers, width), nn.Linear(width, CLASSES))
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(case.layers))
    return nn.Sequential(*layers)


def batch_of(case: Case, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and what the model is to make of them."""
    if case.kind == "embedding":
        return torch.randint(case.layers, (rows,)), torch.randn(rows, CLASSES)
    shape = (1, rows, case.width) if case.kind == "gpt" else (rows, case.width)
    return torch.randn(shape), torch.randn(shape)


def training(case: Case, wrap: Wrap) -> Iteration:
    """A build function for optfuse.ab, the case given."""
    model = model_of(case)
    opt = wrap(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    made = [batch_of(case, rows) for rows in case.rows]
    if isinstance(opt, peers.Jitted):
        return in_jax(case, opt, model, *made[0])
    opt, whole = peers.stock_of(opt)
    batches, steps = cycle(made), count()
    norms = deque[Tensor](maxlen=1 if case.norm_every else 0)  # where the last one lives on

    def iterate() -> Tensor:
        opt.zero_grad()
        for _ in range(case.passes):
            x, y = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = mse_loss(model(x), y)
            loss.backward()
        if case.clips:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clips))
        opt.step()
        if case.norm_every:
            opt.zero_grad()
            if next(steps) % case.norm_every == 0:
                norms[-1].item()
        if case.logs:
            _ = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        return loss.detach()

    return whole(iterate)


def in_jax(case: Case, opt: peers.Jitted, model: nn.Module, x: Tensor, y: Tensor) -> Iteration:
    inputs, wanted = peers.array(x), peers.array(y)
    with torch.no_grad():
        first = mse_loss(model(x), y).item()

    def loss_of(run: Callable[[Any], Any]) -> Any:
        return ((run(inputs) - wanted) ** 2).mean()

    return peers.jitted(opt, model, loss_of, first, case.clips or None)
