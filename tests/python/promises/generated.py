# SPDX-License-Identifier: BSD-3-Clause
"""Random training of linear layers of all shapes, whose gradients may be promises, beside stock."""

import random
from collections import Counter

import torch
from common import assert_same, run
from torch import nn, optim

import optfuse
from promises.counted import promises_of

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, fused=True),
    "SGD momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-3),
    "Muon": lambda p: optim.Muon([q for q in p if q.dim() == 2], lr=1e-3),
}
#: Optimizers whose bits in 16 bits are the same for every number of threads (docs/numerics.md).
IN_16_BITS = ("AdamW", "Adam amsgrad", "Adagrad", "Adafactor", "Muon")
DTYPES = (*(4 * (torch.float32,)), torch.float64, torch.bfloat16, torch.float16)
STEPS = 4


def strided(rows, width, dtype, numbers):
    """An input of so many rows: dense, a part of a larger one, transposed, or expanded."""
    kind = numbers.choice(("dense", "dense", "columns", "offset", "transposed", "expanded", "3d"))
    if kind == "columns":
        return torch.randn(rows, 2 * width, dtype=dtype)[:, ::2]
    if kind == "offset":
        return torch.randn(rows * width + 3, dtype=dtype)[3:].view(rows, width)
    if kind == "transposed":
        return torch.randn(width, rows, dtype=dtype).t()
    if kind == "expanded":
        return torch.randn(1, width, dtype=dtype).expand(rows, width)
    if kind == "3d" and rows % 2 == 0:
        return torch.randn(2, rows // 2, width, dtype=dtype)
    return torch.randn(rows, width, dtype=dtype)


def loss_of(out, numbers):
    """A scalar whose gradient of the output is dense, expanded, partly zero or transposed."""
    kind = numbers.choice(("square", "square", "sum", "relu", "slice", "transposed"))
    if kind == "sum":
        return out.sum()
    if kind == "relu":
        return out.relu().sum()
    if kind == "slice":
        return out[..., : max(1, out.shape[-1] // 2)].square().mean()
    if kind == "transposed":
        return (out.transpose(0, -1) * 0.5).tanh().sum()
    return out.square().mean()


class Layers:
    """A program: layers to train, and things to do between two calls, all chosen by its seed."""

    def __init__(self, seed):
        numbers = self.numbers = random.Random(seed)
        self.seed = seed
        self.dtype = numbers.choice(DTYPES)
        self.optimizer = numbers.choice(IN_16_BITS if self.dtype.itemsize == 2 else [*OPTIMIZERS])
        self.mode = numbers.choice(("forward", "backward"))
        self.sizes = [self.width() for _ in range(numbers.choice((2, 3)))]
        self.rows = int(2 ** numbers.uniform(0, 10))
        self.bias = numbers.random() < 0.7
        self.threads = numbers.choice((1, 2, 2, 3, 4))
        self.twice = numbers.random() < 0.1  # a weight that is used two times
        self.passes = numbers.choice((1, 1, 1, 2, 3))  # that are added up
        self.autocast = self.dtype == torch.float32 and numbers.random() < 0.1

    def width(self):
        return int(2 ** self.numbers.uniform(0, 9.5))

    def model(self):
        layers = []
        for k, n in zip(self.sizes, self.sizes[1:], strict=False):
            layers += [nn.Linear(k, n, self.bias, dtype=self.dtype), nn.ReLU()]
        return nn.Sequential(*layers)

    def play(self, wrap):
        """A script as common.py has them."""
        torch.manual_seed(self.seed)
        numbers = random.Random(self.seed + 1)
        model = self.model()
        optimizer = wrap(OPTIMIZERS[self.optimizer](model.parameters()))
        for _ in range(STEPS):
            yield from self.iteration(model, optimizer, numbers)
        yield "weights", list(model.parameters())
        yield "state", [*optimizer.state_dict()["state"].items()]

    def iteration(self, model, optimizer, numbers):
        optimizer.zero_grad(set_to_none=numbers.random() < 0.8)
        for _ in range(self.passes):
            loss = self.backward(model, numbers)
        event = numbers.choice(("", "", "", "look", "clip", "later", "write"))
        if self.mode == "forward" and event == "look":
            yield "gradient", [p.grad for p in model.parameters()]
        if self.mode == "forward" and event == "clip":
            yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if self.mode == "forward" and event == "write":
            model[0].weight.grad.mul_(2)
        optimizer.step()
        if self.mode == "forward" and event == "later":
            yield "gradient, later", [p.grad for p in model.parameters()]
        if numbers.random() < 0.2:
            yield "weight, early", model[0].weight
        yield "loss", loss

    def backward(self, model, numbers):
        """One pass; its loss."""
        x = strided(self.rows, self.sizes[0], self.dtype, numbers)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = model(x)
            if self.twice:
                out = out + model(x * 0.5)
        loss = loss_of(out.to(self.dtype), numbers)
        loss.backward()
        if x.is_contiguous() and numbers.random() < 0.3:
            x.zero_()
        return loss

    def __str__(self):
        return (
            f"seed {self.seed}: {self.optimizer}, {self.mode}, {self.sizes}, {self.rows} rows, "
            f"{self.dtype}, bias {self.bias}, {self.threads} threads, twice {self.twice}, "
            f"autocast {self.autocast}, {self.passes} passes"
        )


def compare(layers, tally):
    """Plays one program with stock and fused, and counts what became of the gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(layers.threads)
    made = []

    def fused(optimizer):
        backward = optfuse.Backward(accumulate=layers.passes)
        mode = backward if layers.mode == "backward" else optfuse.Forward()
        made.append(optfuse.fuse(optimizer, mode))
        return made[-1]

    try:
        stock = run(layers.play, lambda optimizer: optimizer)
        ours = run(layers.play, fused)
    finally:
        torch.set_num_threads(before)
    assert_same(str(layers), ours, stock)
    for layer in promises_of(made[0]):
        tally["panels in " + layers.mode] += layer.panels
        tally["made by a look"] += layer.made
        tally["whole"] += layer.whole
        tally[layer.because] += layer.whole


def play(first, n):
    """Plays n programs; the counts."""
    tally = Counter()
    for seed in range(first, first + n):
        compare(Layers(seed), tally)
        tally["programs"] += 1
    return tally
