# SPDX-License-Identifier: BSD-3-Clause
"""The data that the benchmark trains on: both come with the software it needs.

A batch stream depends on nothing but its arguments, so that every variant sees the same
batches, and gathers each on the device it is for, so that no copy is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

CHARACTERS = 3_000_000  # of the standard library's text


def handwritten() -> tuple[Tensor, Tensor] | None:
    """scikit-learn's 1797 handwritten digits, 8 x 8; None where it is missing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return None
    found = load_digits()
    return torch.tensor(found.images).float().unsqueeze(1), torch.tensor(found.target)


def invented() -> tuple[Tensor, Tensor]:
    """In their place: as many noisy copies of ten random pictures."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1797,), generator=generator)
    pictures = torch.randn(10, 1, 8, 8, generator=generator)
    return pictures[labels] + torch.randn(1797, 1, 8, 8, generator=generator), labels


@cache
def digits(size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The digits, scaled to size x size, normalized, on the device."""
    images, labels = handwritten() or invented()
    images = images.to(device)
    if size != images.shape[-1]:
        images = functional.interpolate(images, (size, size), mode="bilinear")
    images = (images - images.mean()) / images.std()
    return images, labels.to(device)


def digit_batches(
    batch: int, size: int, channels: int, seed: int = 0, device: str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled epochs without end; the last, smaller batch of an epoch is dropped."""
    images, labels = digits(size, device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels), generator=generator).to(device)
        for picks in order.split(batch):
            if len(picks) == batch:
                chosen = images[picks].expand(-1, channels, -1, -1).contiguous()
                yield chosen, labels[picks]


@cache
def text(device: str = "cpu") -> tuple[Tensor, str]:
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
    return code[torch.tensor(list(whole.encode("ascii")))].to(device), alphabet


def text_batches(
    batch: int, length: int, seed: int = 0, device: str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random excerpts, each with itself shifted by one character as the target. Where they are
    is sent to the device for many batches at a time."""
    codes = text(device)[0]
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(length + 1, device=device)
    at_once = 1 if device == "cpu" else 64
    while True:
        shape = (at_once, batch, 1)
        starts = torch.randint(len(codes) - length, shape, generator=generator).to(device)
        for some in starts:
            excerpt = codes[some + window]
            yield excerpt[:, :-1], excerpt[:, 1:]
