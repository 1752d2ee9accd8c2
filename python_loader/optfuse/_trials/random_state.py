# SPDX-License-Identifier: BSD-3-Clause
"""The state of the generators that training draws from, and back to it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """The state of PyTorch's, Python's and, where it is imported, NumPy's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpys = sys.modules["numpy"].random.get_state(legacy=False) if "numpy" in sys.modules else None
    return random.getstate(), torch.get_rng_state(), cuda, numpys


def set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2]:
        torch.cuda.set_rng_state_all(state[2])
    if state[3]:
        sys.modules["numpy"].random.set_state(state[3])


@contextlib.contextmanager
def random_as_it_was() -> Iterator[None]:
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
