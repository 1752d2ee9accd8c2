# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels on a GPU whose step() is recorded have stock's bits; which of their
operators ran as programs is printed."""

from __future__ import annotations

from typing import Any

import torch
from bits import assert_same_optimizers, deliver, different
from harness import On
from own_rules import VECTORS, parameters, recorded
from program_operators import FORMULAS, LISTS, operands
from recorded_classes import KINDS, Base
from style_classes import ON_ANY_DEVICE
from torch import Tensor
from traced import in_each_dtype

import optfuse
from optfuse import _recorded

# NumPy takes no tensor on a GPU; and one whose state are lists.
LEFT_OUT = ("Looks", "Addresses", "KeepsAnAddress", "Gathers")
CLASSES = [*ON_ANY_DEVICE, *(cls for name, cls in KINDS.items() if name not in LEFT_OUT)]
STEPS, LOOK_EVERY = 12, 4


def each_class(on: On, dtype: torch.dtype) -> None:
    for cls in CLASSES:
        twins = [parameters(VECTORS, on, dtype) for _ in range(2)]
        gradients = recorded(VECTORS, on, dtype)
        stock, ours = (cls(twin) for twin in twins)
        ours = optfuse.fuse(ours, recorded=True)
        for step in range(STEPS):
            for optimizer in (stock, ours):
                torch.manual_seed(step)  # of classes that draw
                getattr(optimizer, "train", bool)()
                deliver(optimizer, gradients(step), "forward")
                optimizer.step()
            counts = _recorded.last_counts()
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                what = f"{cls.__name__}, step {step + 1}"
                assert_same_optimizers(what, ours, stock, gradients=False)
        print(f"{cls.__name__}, {dtype}: {counts}", flush=True)


class One(Base):
    def one(self, p: Tensor, group: Any, state: dict[str, Any]) -> None:
        state["made"] = FORMULAS[group["formula"]](p, p.grad)


def each_operator(on: On, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    by_operator, differ, ran = [], [], 0
    for name, formula in FORMULAS.items():
        if name in LISTS and not on.is_cuda:
            continue  # their roundings are not all played
        params = operands(on, dtype, random)
        try:
            wanted = [formula(p.detach(), p.grad) for p in params]
        except (RuntimeError, TypeError):
            continue  # PyTorch has it not for this dtype and device
        optimizer: Any = optfuse.fuse(One([{"params": params, "formula": name}]), recorded=True)
        for _ in range(3):  # the third runs programs
            optimizer.step()
        ran += 1
        if _recorded.last_counts()["operators"] or not _recorded.last_counts()["programs"]:
            by_operator.append(name)
        made = [optimizer.state[p]["made"] for p in params]
        if any(different(a, b) for a, b in zip(made, wanted, strict=True)):
            differ.append(name)
    print(f"{dtype}: {ran - len(by_operator)} of {ran} by programs, by PyTorch: {by_operator}")
    assert not differ, f"{len(differ)} have other bits: {differ}"


in_each_dtype("recorded classes", each_class, modes=("forward",), long=True)
in_each_dtype("recorded operators", each_operator, modes=("forward",))
