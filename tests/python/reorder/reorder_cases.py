# SPDX-License-Identifier: BSD-3-Clause
"""Generated layers: every combination of what a Linear and a Conv2d can be given, and the bits
and strides of y, dx, dw and db under a schedule against stock's. Run as a program it does all
cases under all schedules and says how many there were."""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from common import differing
from torch import nn

import optfuse

SCHEDULES = {
    "stock": {"schedule": "stock"},
    "last": {"schedule": "last"},
    "reverse_first": {"schedule": "reverse_first", "k": 1},
    "budget": {"schedule": "budget", "memory": 1 << 30},
    "chosen": {"schedule": ["layer"]},
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def of(**choices):
    keys = list(choices)
    return [dict(zip(keys, case, strict=True)) for case in itertools.product(*choices.values())]


LINEAR = of(
    kind=["linear"],
    dims=[1, 2, 3, 4],
    x=["contiguous", "transposed", "sliced", "expanded"],
    weight=["rows", "columns", "sliced"],
    dy=["contiguous", "transposed", "expanded"],
    bias=[True, False],
    dtype=DTYPES,
    needs_dx=[True, False],
    sizes=[(5, 7), (1, 4)],
)
CONV = of(
    kind=["conv"],
    batched=[True, False],
    x=["contiguous", "channels_last"],
    groups=["one", "two", "each"],
    stride=[1, 2],
    padding=[0, 1],
    dilation=[1, 2],
    kernel=[1, 3],
    bias=[True, False],
    dtype=DTYPES[:3],
    needs_dx=[True, False],
)
CASES = LINEAR + CONV


def laid_out(how, *shape, dtype, generator):
    """Random numbers of this shape that lie so."""
    shape = list(shape)
    if how == "transposed" and len(shape) == 1:
        return torch.randn(2 * shape[0], generator=generator).to(dtype)[::2]
    if how == "transposed" or how == "columns":
        shape[-1], shape[-2] = shape[-2], shape[-1]
    elif how == "sliced":
        shape[-1] += 3
    elif how == "expanded":
        shape[0] = 1
    t = torch.randn(shape, generator=generator).to(dtype)
    if how == "transposed" or how == "columns":
        return t.transpose(-1, -2)
    if how == "sliced":
        return t[..., 1:-2]
    if how == "channels_last" and len(shape) == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t


def expanded(t, how, n):
    return t.expand(n, *t.shape[1:]) if how == "expanded" else t


def linear_of(case, generator):
    inputs, outputs = case["sizes"]
    layer = nn.Linear(inputs, outputs, case["bias"], dtype=case["dtype"])
    how = {"dtype": case["dtype"], "generator": generator}
    weight = laid_out(case["weight"], outputs, inputs, **how)
    layer.weight = nn.Parameter(weight)
    lead = (2, 3, 4)[: case["dims"] - 1]
    x = expanded(laid_out(case["x"], *lead, inputs, **how), case["x"], (*lead, inputs)[0])
    dy = expanded(laid_out(case["dy"], *lead, outputs, **how), case["dy"], (*lead, outputs)[0])
    return layer, x, dy


def conv_of(case, generator):
    groups = {"one": 1, "two": 2, "each": 4}[case["groups"]]
    options = {name: case[name] for name in ("stride", "padding", "dilation", "bias", "dtype")}
    layer = nn.Conv2d(4, 8, case["kernel"], groups=groups, **options)
    how = {"dtype": case["dtype"], "generator": generator}
    lead = (2,) if case["batched"] else ()
    x = laid_out(case["x"], *lead, 4, 7, 6, **how)
    with torch.no_grad():
        dy = laid_out("contiguous", *layer(x).shape, **how)
    return layer, x, dy


class Handed(torch.autograd.Function):
    """The same numbers, lying the same way, that are no parameter any more."""

    @staticmethod
    def forward(ctx, x):
        if 0 in x.stride():
            return x[:1].clone().expand_as(x)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Holder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def play(case, choice=None):
    """y and all gradients; under a schedule whether it was obeyed."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layer, x, dy = (linear_of if case["kind"] == "linear" else conv_of)(case, generator)
    model = Holder(layer)
    leaf = x.detach().requires_grad_(case["needs_dx"])
    reordering = optfuse.reorder(model, **choice) if choice else None
    y = model(Handed.apply(leaf) if case["needs_dx"] else leaf)
    y.backward(dy)
    rows = reordering.plan.rows if reordering else ()
    if reordering:
        reordering.remove()
    found = {"y": y.detach(), "dx": leaf.grad}
    found |= {f"d{name}": p.grad for name, p in layer.named_parameters()}
    return found, rows


def difference(case, name):
    """The difference from stock under this schedule; an empty string: none."""
    stock, _ = play(case)
    ours, rows = play(case, SCHEDULES[name])
    if not rows or (rows[0].turn is None) != (name == "stock"):
        return f"the schedule was not obeyed: {rows}"
    for what, b in stock.items():
        a = ours[what]
        if (a is None) != (b is None):
            return f"{what}: {a} is not {b}"
        if b is not None and (a.stride() != b.stride() or differing(a, b).any()):
            return f"{what}: {a.stride()} or values differ from {b.stride()}"
    return ""


def main():
    torch.set_num_threads(1)
    wrong = 0
    for name in SCHEDULES:
        for case in CASES:
            said = difference(case, name)
            wrong += bool(said)
            if said:
                print(name, case, said)
    print(f"{len(LINEAR)} Linear, {len(CONV)} Conv2d, {len(SCHEDULES)} schedules: {wrong} differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
