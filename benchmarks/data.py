# SPDX-License-Identifier: BSD-3-Clause
"""The data that the benchmark trains on: both come with the software it needs.

A batch stream is an endless iterator that depends on nothing but its
arguments, so that every variant sees the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

CHARACTERS = 3_000_000  # of the standard library's text


@cache
def digits(size: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits, scaled to size x size, normalized."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    if size != images.shape[-1]:
        images = functional.interpolate(images, (size, size), mode="bilinear")
    images = (images - images.mean()) / images.std()
    return images, torch.tensor(found.target, dtype=torch.int64)


def digit_batches(
    batch: int, size: int, channels: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled epochs without end; the last, smaller batch of an epoch is dropped."""
    images, labels = digits(size)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for picks in torch.randperm(len(labels), generator=generator).split(batch):
            if len(picks) == batch:
                chosen = images[picks].expand(-1, channels, -1, -1).contiguous()
                yield chosen, labels[picks]


@cache
def text() -> tuple[Tensor, str]:
    """Python's own standard library as character codes, and its alphabet."""
    parts: list[str] = []
    room = CHARACTERS
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        part = path.read_text(encoding="utf-8", errors="replace")[:room]
        parts.append("".join(c if c.isascii() else "?" for c in part))
        room -= len(part)
    whole = "".join(parts)
    alphabet = "".join(sorted(set(whole)))
    code = torch.zeros(128, dtype=torch.int64)
    code[[ord(c) for c in alphabet]] = torch.arange(len(alphabet))
    return code[torch.tensor(list(whole.encode("ascii")))], alphabet


def text_batches(batch: int, length: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random excerpts, each with itself shifted by one character as the target."""
    codes, _ = text()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(codes) - length, (batch, 1), generator=generator)
        excerpt = codes[starts + window]
        yield excerpt[:, :-1], excerpt[:, 1:]
