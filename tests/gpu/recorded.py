# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels on a GPU, whose step() is recorded, have stock's bits, and so has every
operator of programs; which of them ran as programs is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bits import DTYPES, assert_same_optimizers, deliver, different
from harness import MODES, On, add
from own_rules import VECTORS, parameters, recorded
from recorded_classes import KINDS, Base
from style_classes import ON_ANY_DEVICE
from test_operators import CALLS, ELEMENTWISE, special
from torch import Tensor

import optfuse
from optfuse import _recorded

# NumPy takes no tensor on a GPU; and one whose state are lists.
LEFT_OUT = ("Looks", "Addresses", "KeepsAnAddress", "Gathers")
CLASSES = [*ON_ANY_DEVICE, *(cls for name, cls in KINDS.items() if name not in LEFT_OUT)]
STEPS, LOOK_EVERY = 12, 4
LISTS = {name: lambda p, g, of=formula: of([p], [g])[0] for name, formula in CALLS}
#: By name, of a parameter and its gradient.
FORMULAS: dict[str, Any] = {**ELEMENTWISE, **LISTS}
SIZES = (1, 37, 20_011)


def said(optimizer: Any, mode: str) -> str:
    """How the last step() ran."""
    return str(_recorded.last_counts()) if mode == "forward" else optfuse.explain(optimizer)


def each_class(on: On, dtype: torch.dtype) -> None:
    for cls in CLASSES:
        twins = [parameters(VECTORS, on, dtype) for _ in range(2)]
        gradients = recorded(VECTORS, on, dtype)
        stock, ours = (cls(twin) for twin in twins)
        ours = optfuse.fuse(ours, on.mode)
        for step in range(STEPS):
            for optimizer, mode in ((stock, "forward"), (ours, on.mode)):
                torch.manual_seed(step)  # of classes that draw
                getattr(optimizer, "train", bool)()
                deliver(optimizer, gradients(step), mode)
                optimizer.step()
            how = said(ours, on.mode)
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                what = f"{cls.__name__}, step {step + 1}"
                assert_same_optimizers(what, ours, stock, gradients=False)
        print(f"{cls.__name__}, {dtype}: {how}", flush=True)


class One(Base):
    def one(self, p: Tensor, group: Any, state: dict[str, Any]) -> None:
        state["made"] = FORMULAS[group["formula"]](p, p.grad)


def operands(on: On, dtype: torch.dtype, random: torch.Generator) -> list[torch.nn.Parameter]:
    """Parameters of all sizes, with gradients."""
    params = [torch.nn.Parameter(special(n, dtype, random).to(on.device)) for n in SIZES]
    for p in params:
        p.grad = special(p.numel(), dtype, random).to(on.device)
    return params


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
        optimizer: Any = optfuse.fuse(One([{"params": params, "formula": name}]))
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
    assert ran - len(by_operator) > 40, "hardly an operator ran as a program"


def in_each_dtype(
    title: str,
    check: Callable[[On, torch.dtype], None],
    modes: tuple[str, ...] = MODES,
    long: bool = False,
) -> None:
    """A scenario of a GPU for each dtype. long: a quick run has that of float32 only."""
    for dtype in DTYPES:

        def body(on: On, dtype: torch.dtype = dtype) -> None:
            check(on, dtype)

        body.__module__ = check.__module__  # by which scenarios have their parts
        name = str(dtype).removeprefix("torch.")
        add(f"{title}, {name}", body, ("cuda",), modes, slow=long and dtype is not torch.float32)


in_each_dtype("recorded classes", each_class, long=True)
in_each_dtype("recorded operators", each_operator, modes=("forward",))
