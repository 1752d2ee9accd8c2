# SPDX-License-Identifier: BSD-3-Clause
"""A cell of the benchmark is a model and a batch size; here it becomes training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from data import digit_batches, text, text_batches
from models import GPT, GPT2, MLP, MobileNetV2, ResNet18, ResNet50, ViT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from optfuse_tools.ab.variants import BuildFn, Iteration, Wrap

IMAGE, LENGTH = 64, 128
LARGE_IMAGE, LARGE_LENGTH = 224, 512  # on a GPU

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MobileNetV2": lambda: MobileNetV2(10),
    "ResNet-18": lambda: ResNet18(10),
    "GPT": lambda: GPT(len(text()[1]), LENGTH),
    "MLP": MLP,  # 20 x Linear(512)
    "MLP-200x64": lambda: MLP(64, 200),
    "ResNet-50": lambda: ResNet50(10),
    "ViT-S": lambda: ViT(10),
    "GPT-2": GPT2,
}

OPTIMIZERS: dict[str, Callable[[Iterator[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=3e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=3e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=3e-3, momentum=0.9),
}


@dataclass(frozen=True)
class Cell:
    model: str
    batch: int
    iterations: int  # a round
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}"


# Iterations a round: enough for some 100 ms where an iteration is shorter.
GRID = {
    "MobileNetV2": {1: 6, 8: 4, 32: 2},
    "ResNet-18": {1: 4, 8: 2, 32: 1},
    "GPT": {1: 4, 8: 1, 32: 1},
    "MLP": {1: 10, 8: 10, 128: 4},
    "MLP-200x64": {1: 10, 8: 10, 128: 6},
}
GRID_CELLS = tuple(Cell(model, batch, n) for model in GRID for batch, n in GRID[model].items())
#: Two batches of each model; one of each in --quick and the section memory.
CELLS = tuple(c for c in GRID_CELLS if c.batch in ((8, 128) if "MLP" in c.model else (1, 8)))
QUICK_CELLS = tuple(c for c in CELLS if c.batch == (8 if "MLP" in c.model else 1))
GPU_BATCHES = {
    "MobileNetV2": (1, 8, 32, 128, 256),
    "ResNet-50": (1, 8, 32, 128, 256),
    "ViT-S": (1, 8, 64, 256),
    "GPT-2": (1, 4, 16),
}
GPU_CELLS = tuple(
    Cell(model, batch, max(3, 16 // batch), "cuda")
    for model, batches in GPU_BATCHES.items()
    for batch in batches
)
GPU_QUICK = (("MobileNetV2", 1), ("MobileNetV2", 32), ("ResNet-50", 1), ("ViT-S", 8), ("GPT-2", 1))
GPU_QUICK_CELLS = tuple(cell for cell in GPU_CELLS if (cell.model, cell.batch) in GPU_QUICK)
SMOKE = ("MLP", 8, 2)  # what --smoke trains, on any device


def cells_of(chosen: Any, quick: bool) -> list[Cell]:
    """Those that the arguments of the benchmark ask for."""
    if chosen.smoke:
        return [Cell(*SMOKE, chosen.device)]
    if chosen.device == "cpu":
        cells = QUICK_CELLS if quick else CELLS
    else:
        cells = GPU_QUICK_CELLS if quick else GPU_CELLS
    models = chosen.model or MODELS
    return [cell for cell in cells if cell.model in models and cell.batch >= chosen.batch_from]


def batches(cell: Cell) -> Iterator[tuple[Tensor, Tensor]]:
    batch, device = cell.batch, cell.device
    image = LARGE_IMAGE if device == "cuda" else IMAGE
    if cell.model.startswith("GPT"):
        length = LENGTH if cell.model == "GPT" else LARGE_LENGTH
        return text_batches(batch, length, device=device)
    if cell.model.startswith("MLP"):
        return digit_batches(batch, 8, 1, device=device)
    return digit_batches(batch, LARGE_IMAGE if cell.model == "ViT-S" else image, 3, device=device)


def training(cell: Cell, optimizer: str) -> BuildFn:
    """A build function for optfuse.ab: plain PyTorch training, the same for each variant."""

    def build(wrap: Wrap) -> Iteration:
        with torch.device(cell.device):
            model = MODELS[cell.model]()
        return iteration(model, wrap(OPTIMIZERS[optimizer](model.parameters())), batches(cell))

    return build


def iteration(
    model: nn.Module, opt: torch.optim.Optimizer, stream: Iterator[tuple[Tensor, Tensor]]
) -> Iteration:
    def iterate() -> Tensor:
        x, y = next(stream)
        opt.zero_grad()
        loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        opt.step()
        return loss

    return iterate
