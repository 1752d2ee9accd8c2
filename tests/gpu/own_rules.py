# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose kernels have to pass a trial on the GPU, and those of torch.optim that are
recorded: equal to the class's own step(), with the flags that it was made with, by bits;
with every input that PyTorch's own tests have for GPUs. Whether these ran or the
class's own step() is printed: both must have these bits."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bits import (
    DTYPES,
    Gradients,
    assert_same_optimizers,
    deliver,
    numbers,
    parameter,
    parameters_of,
    tape,
)
from harness import On, add
from optim_entries import DECAYS, ENTRIES

import optfuse
from optfuse._options import is_recorded
from optfuse._rules import RULES

Shapes = tuple[tuple[int, ...], ...]
VECTORS: Shapes = ((1,), (4,), (7,), (1003,), (8196,), (9001,))
MATRICES: Shapes = ((1, 1), (20, 50), (131, 57), (57, 131), (512, 384))
SHAPES: dict[str, Shapes] = {
    "Muon": MATRICES,
    "Adafactor": ((), (1,), (1003,), (3, 5, 7), *MATRICES),
}  # of the others: VECTORS
PLAYED_ELEMENTS = (
    10_000  # of a matrix, at most, where a CPU plays the GPU: there products take long
)
LOOK_EVERY = 7
OPTIONS: dict[str, Sequence[dict[str, Any]]] = {
    **{name: entry.options for name, entry in ENTRIES.items()},
    "Adafactor": [*DECAYS, {"eps": (1e-5, 1e-2), "beta2_decay": -0.3, "d": 2},
                  {"foreach": True}],
    "Muon": [{}, {"nesterov": False, "weight_decay": 0},
             {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}],
}  # fmt: skip
CLASSES = {cls.__name__: cls for cls, rule in RULES.items() if rule.tried}
CLASSES |= {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon}  # recorded
assert CLASSES.keys() == OPTIONS.keys(), "OPTIONS does not name the classes with a trial"


def played(shapes: Shapes, on: On) -> Shapes:
    """Those that the device has the time for."""
    return shapes if on.is_cuda else tuple(s for s in shapes if math.prod(s) <= PLAYED_ELEMENTS)


def sizes_of(shapes: Shapes) -> tuple[int, ...]:
    return tuple(map(math.prod, shapes))


def recorded(shapes: Shapes, on: On, dtype: torch.dtype) -> Gradients:
    flat = tape(sizes_of(shapes), on, dtype, 1, spoil=False)
    return lambda step: [g.view(s) for g, s in zip(flat(step), shapes, strict=True)]


def parameters(shapes: Shapes, on: On, dtype: torch.dtype) -> list[Any]:
    """Every other one off the alignment."""
    values = enumerate(numbers(sizes_of(shapes), on, dtype, 3))
    flat = [parameter(v, i % 2 == 1).detach() for i, v in values]
    return [torch.nn.Parameter(v.view(s)) for v, s in zip(flat, shapes, strict=True)]


def train(make: Callable[[list[Any]], Any], what: str, shapes: Shapes, dtype: torch.dtype, on: On,
          steps: int) -> str:  # fmt: skip
    """Twins on recorded gradients; what updated ours."""
    twins = [parameters(shapes, on, dtype) for _ in range(2)]
    gradients = recorded(shapes, on, dtype)
    stock = make(twins[0])
    ours = optfuse.fuse(make(twins[1]), mode=on.mode)
    for step in range(steps):
        deliver(stock, gradients(step), "forward")
        deliver(ours, gradients(step), on.mode)
        stock.step()
        ours.step()
        if step % LOOK_EVERY == 2 or step == steps - 1:
            assert_same_optimizers(f"{what}, step {step + 1}", ours, stock, gradients=False)
    if is_recorded(ours) or "recorded" in optfuse.explain(ours):
        return "recorded"
    made = optfuse.summary(ours).created
    wanted = steps * len(parameters_of(ours))
    assert made == wanted, f"{what}: {made} updates were made, not {wanted}"
    return " and ".join(optfuse.summary(ours).isa.values())


def options_of(name: str, dtype: torch.dtype) -> Callable[[On], None]:
    def body(on: On) -> None:
        ran: Counter[str] = Counter()
        for options in OPTIONS[name]:

            def make(params: list[Any], options: dict[str, Any] = options) -> Any:
                return CLASSES[name](params, **{"lr": 0.01, **options})

            what = f"{name} {options}"
            steps = 10 if on.quick else 100
            shapes = played(SHAPES.get(name, VECTORS), on)
            ran[train(make, what, shapes, dtype, on, steps)] += 1
        print(f"{name}, {dtype}: {dict(ran)}", flush=True)

    return body


def database(name: str) -> Callable[[On], None]:
    def body(on: On) -> None:
        import optim_inputs  # PyTorch's own tests' package

        ran: Counter[str] = Counter()
        for one in optim_inputs.inputs_for_gpus(name):
            if one.kwargs.get("differentiable"):
                ran["not for updates in place"] += 1
                continue

            def make(params: list[Any], one: Any = one) -> Any:
                return optim_inputs.make(one, params)

            shapes, steps = played(SHAPES.get(name, VECTORS), on), 6 if on.quick else 20
            ran[train(make, str(one), shapes, torch.float32, on, steps)] += 1
        print(f"{name}, every input of PyTorch's tests: {dict(ran)}", flush=True)

    return body


def add_all() -> None:
    for name, dtype in itertools.product(CLASSES, DTYPES):
        body = options_of(name, dtype)
        what = f"{name} {str(dtype).removeprefix('torch.')}, own step()"
        add(what, body, ("cuda",), slow=dtype is not torch.float32)
    for name in CLASSES:
        add(f"{name}, every input of PyTorch's tests", database(name), ("cuda",))


add_all()
