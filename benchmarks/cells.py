# SPDX-License-Identifier: BSD-3-Clause
"""A cell of the benchmark is a model and a batch size; here it becomes training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from data import digit_batches, text, text_batches
from models import GPT, MLP, MobileNetV2, ResNet18
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from optfuse._ab import BuildFn, Iteration, Wrap

IMAGE, LENGTH = 64, 128

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MobileNetV2": lambda: MobileNetV2(10),
    "ResNet-18": lambda: ResNet18(10),
    "GPT": lambda: GPT(len(text()[1]), LENGTH),
    "MLP": MLP,
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

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}"


# The first of each model is also the one of --quick and of the memory section.
CELLS = (
    Cell("MobileNetV2", 1, 6),
    Cell("MobileNetV2", 8, 4),
    Cell("ResNet-18", 1, 4),
    Cell("ResNet-18", 8, 4),
    Cell("GPT", 1, 6),
    Cell("GPT", 8, 4),
    Cell("MLP", 8, 10),
    Cell("MLP", 128, 6),
)
QUICK_CELLS = tuple(cell for cell in CELLS if cell.batch == (8 if cell.model == "MLP" else 1))


def batches(cell: Cell) -> Iterator[tuple[Tensor, Tensor]]:
    if cell.model == "GPT":
        return text_batches(cell.batch, LENGTH)
    if cell.model == "MLP":
        return digit_batches(cell.batch, 8, 1)
    return digit_batches(cell.batch, IMAGE, 3)


def training(cell: Cell, optimizer: str) -> BuildFn:
    """What optfuse.ab takes: plain PyTorch training, the same for each variant."""

    def build(wrap: Wrap) -> Iteration:
        model = MODELS[cell.model]()
        opt = wrap(OPTIMIZERS[optimizer](model.parameters()))
        stream = batches(cell)

        def iteration() -> Tensor:
            x, y = next(stream)
            opt.zero_grad()
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            opt.step()
            return loss

        return iteration

    return build
