# SPDX-License-Identifier: BSD-3-Clause
"""Classes without a rule on a GPU: those whose operators round there as the kernels do are
traced, the others refused by their trial. Which ones is printed; the traced ones must have the
bits of the class."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bits import DTYPES
from harness import MODES, On, add
from own_rules import VECTORS, train
from traced_classes import TRACEABLE

import optfuse
from optfuse._link import link_of


@contextlib.contextmanager
def cuda_roundings(on: On) -> Iterator[None]:
    """Also of PyTorch's operators where a CPU plays the GPU."""
    if on.is_cuda:
        yield
        return
    import fakecuda

    fakecuda.round_as_cuda()
    try:
        yield
    finally:
        fakecuda.round_as_cuda(False)


def each_class(on: On, dtype: torch.dtype) -> None:
    ran: dict[str, str] = {}
    for cls in TRACEABLE:

        def make(params: list[Any], cls: Any = cls) -> Any:
            optimizer = cls(params)
            getattr(optimizer, "train", bool)()
            return optimizer

        probe = make([torch.ones(40, device=on.device, dtype=dtype, requires_grad=True)])
        try:
            traced = link_of(optfuse.fuse(probe, mode=on.mode)).traced
        except optfuse.Error as error:
            assert "can't be traced" in str(error), error
            ran[cls.__name__] = f"refused: {error}"
            continue
        assert traced is not None
        what, steps = f"{cls.__name__}, {dtype}", 10 if on.quick else 25
        ran[cls.__name__] = train(make, what, VECTORS, dtype, on, steps)
    for name, what in ran.items():
        print(f"{name}, {dtype}: {what}", flush=True)
    assert any(not what.startswith("refused") for what in ran.values()), "no class is traced here"


def in_each_dtype(
    title: str,
    check: Callable[[On, torch.dtype], None],
    modes: tuple[str, ...] = MODES,
    long: bool = False,
) -> None:
    """A scenario of a GPU for each dtype. long: a quick run has that of float32 only."""
    for dtype in DTYPES:

        def body(on: On, dtype: torch.dtype = dtype) -> None:
            with cuda_roundings(on):
                check(on, dtype)

        body.__module__ = check.__module__  # by which scenarios have their parts
        name = str(dtype).removeprefix("torch.")
        add(f"{title}, {name}", body, ("cuda",), modes, slow=long and dtype is not torch.float32)


in_each_dtype("traced classes", each_class, long=True)
