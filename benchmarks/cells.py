# SPDX-License-Identifier: BSD-3-Clause
"""A cell of the benchmark is a model and a batch size; here it becomes training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from data import digit_batches, masked_batches, text, text_batches
from large_models import BERT, GPT2, ResNet50, ViT
from models import GPT, MLP, MobileNetV2, ResNet18
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from optfuse._ab.variants import BuildFn, Iteration, Wrap

IMAGE, LENGTH = 64, 128
LARGE_IMAGE, LARGE_LENGTH, SHORT_LENGTH = 224, 512, 128  # on a GPU: images, GPT-2, BERT
MASK = 128  # no character

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MobileNetV2": lambda: MobileNetV2(10),
    "ResNet-18": lambda: ResNet18(10),
    "GPT": lambda: GPT(len(text()[1]), LENGTH),
    "MLP": MLP,  # 20 x Linear(512)
    "MLP-200x64": lambda: MLP(64, 200),
    "ResNet-50": lambda: ResNet50(10),
    "ViT-S": lambda: ViT(10),
    "GPT-2": GPT2,
    "BERT": BERT,
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


# The first of each model, but of the last, is also that of --quick and of the
# memory section.
CELLS = (
    Cell("MobileNetV2", 1, 6),
    Cell("MobileNetV2", 8, 4),
    Cell("ResNet-18", 1, 4),
    Cell("ResNet-18", 8, 4),
    Cell("GPT", 1, 6),
    Cell("GPT", 8, 4),
    Cell("MLP", 8, 10),
    Cell("MLP", 128, 6),
    Cell("MLP-200x64", 8, 10),
    Cell("MLP-200x64", 128, 6),
)
# Iterations a round: enough for some 100 ms where an iteration is shorter.
GRID = {
    "MobileNetV2": {1: 6, 8: 4, 32: 2},
    "ResNet-18": {1: 4, 8: 2, 32: 1},
    "GPT": {1: 4, 8: 1, 32: 1},
    "MLP": {1: 10, 8: 10, 128: 4},
    "MLP-200x64": {1: 10, 8: 10, 128: 6},
}
GRID_CELLS = tuple(Cell(model, batch, n) for model in GRID for batch, n in GRID[model].items())
QUICK_CELLS = tuple(
    cell
    for cell in CELLS
    if cell.batch == (8 if cell.model == "MLP" else 1) and cell.model != "MLP-200x64"
)

GPU_BATCHES = {
    "MobileNetV2": (1, 8, 32, 128, 256),
    "ResNet-50": (1, 8, 32, 128, 256),
    "ViT-S": (1, 8, 64, 256),
    "GPT-2": (1, 4, 16),
    "BERT": (1, 8, 64, 256),
}
GPU_CELLS = tuple(
    Cell(model, batch, max(3, 16 // batch), "cuda")
    for model, batches in GPU_BATCHES.items()
    for batch in batches
)
GPU_QUICK = (("MobileNetV2", 1), ("MobileNetV2", 32), ("ResNet-50", 1), ("ViT-S", 8), ("GPT-2", 1))
GPU_QUICK_CELLS = tuple(cell for cell in GPU_CELLS if (cell.model, cell.batch) in GPU_QUICK)
SMOKE = ("MLP", 8, 2)  # what --smoke trains, on any device


def cells_for(device: str, quick: bool, smoke: bool) -> tuple[Cell, ...]:
    if smoke:
        return (Cell(*SMOKE, device),)
    if device == "cpu":
        return QUICK_CELLS if quick else CELLS
    return GPU_QUICK_CELLS if quick else GPU_CELLS


def parameters_of(cell: Cell) -> int:
    return sum(p.numel() for p in MODELS[cell.model]().parameters())


def batches(cell: Cell) -> Iterator[tuple[Tensor, Tensor]]:
    batch, device = cell.batch, cell.device
    image = LARGE_IMAGE if device == "cuda" else IMAGE
    if cell.model == "GPT":
        return text_batches(batch, LENGTH, device=device)
    if cell.model == "GPT-2":
        return text_batches(batch, LARGE_LENGTH, device=device)
    if cell.model == "BERT":
        return masked_batches(batch, SHORT_LENGTH, MASK, device)
    if cell.model.startswith("MLP"):
        return digit_batches(batch, 8, 1, device=device)
    return digit_batches(batch, LARGE_IMAGE if cell.model == "ViT-S" else image, 3, device=device)


def training(cell: Cell, optimizer: str, autocast: bool = False) -> BuildFn:
    """What optfuse.ab takes: plain PyTorch training, the same for each variant."""

    def build(wrap: Wrap) -> Iteration:
        with torch.device(cell.device):
            model = MODELS[cell.model]()
        opt = wrap(OPTIMIZERS[optimizer](model.parameters()))
        stream = batches(cell)

        def iteration() -> Tensor:
            x, y = next(stream)
            opt.zero_grad()
            with torch.autocast(cell.device, torch.bfloat16) if autocast else nullcontext():
                loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            opt.step()
            return loss

        return iteration

    return build
