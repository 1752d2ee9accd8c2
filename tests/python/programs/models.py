# SPDX-License-Identifier: BSD-3-Clause
"""The models that programs train: as small as their hazard allows."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def numbers(i, *shape):
    """The same in every run and on every device, whatever else draws numbers."""
    made = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(i), device="cpu")
    return made.to(torch.get_default_device())


def words(i):
    generator = torch.Generator("cpu").manual_seed(i)
    made = torch.randint(0, 7, (3, 2), generator=generator, device="cpu")
    return made.to(torch.get_default_device())


def rows(i):
    return numbers(i, 3, 4)


def images(i):
    return numbers(i, 2, 2, 4, 4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embed(ids))))


class OneStorage(nn.Module):
    """Parameters that are parts of one storage; overlap: the same elements."""

    def __init__(self, overlap):
        super().__init__()
        flat = torch.randn(32)
        self.first = nn.Parameter(flat[:16].view(4, 4))
        self.second = nn.Parameter((flat[4:20] if overlap else flat[16:]).view(4, 4))
        self.own = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second @ self.own


class Odd(nn.Module):
    """Parameters of odd shapes and layouts, one unused and one frozen."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.holes = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x):
        x = torch.cat([x * self.scalar + self.frozen, self.empty.to(x.dtype)])
        return torch.tanh(x @ self.turned) @ self.holes


class Branching(nn.Module):
    """Uses another part of its weights, and of one weight, every time."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        start = int(x.abs().sum() * 3) % 4
        side = self.left if x.sum() > 0 else self.right
        return side(x) @ self.table[start : start + 3].t()


class WithAnAlias(nn.Module):
    """Keeps a second name for the memory of its weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("alias", self.layer.weight.detach())

    def forward(self, x):
        return self.layer(x)


class Checkpointed(nn.Module):
    """Computes a part of it again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = checkpoint(self.again, x, use_reentrant=self.reentrant)
        return self.last(x)

    def again(self, x):
        return torch.tanh(self.second(x))


class Shared(nn.Module):
    """Two layers with one weight, which is used turned as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(x @ self.first.weight)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        state = x.new_zeros(1, 4)
        for row in x.split(1):
            state = (self.first(row) + self.again(state)).tanh()
        return state


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def convolution():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def with_group_norm():
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(48, 4))


def renormalized():
    """The lookup itself changes the weight."""
    return nn.Sequential(nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 3))


def with_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3, bias=False))


# name -> (how to build it, its i-th batch)
MODELS = {
    "mlp": (mlp, rows),
    "mlp in float64": (lambda: mlp().double(), rows),
    "mlp in bfloat16": (lambda: mlp().bfloat16(), rows),
    "mlp in float16": (lambda: mlp().half(), rows),
    "layer norm": (with_norm, rows),
    "batch norm": (with_batch_norm, rows),
    "convolution": (convolution, images),
    "group norm": (with_group_norm, images),
    "checkpointed": (lambda: Checkpointed(reentrant=False), rows),
    "reentrant": (lambda: Checkpointed(reentrant=True), rows),
    "shared": (Shared, rows),
    "recurrent": (Recurrent, rows),
    "tied": (Tied, words),
    "renormalized": (renormalized, words),
    "one storage": (lambda: OneStorage(overlap=False), rows),
    "same elements": (lambda: OneStorage(overlap=True), rows),
    "odd": (Odd, rows),
    "branching": (Branching, rows),
    "alias": (WithAnAlias, rows),
}
DRAWN = tuple(MODELS)  # by random programs; a deed may add a model of its own
LEAVE_OUT = ("odd", "branching")  # some of their parameters, in some passes
SIXTEEN_BITS = ("mlp in bfloat16", "mlp in float16")


def inputs(kind, model, i):
    x = MODELS[kind][1](i)
    if not x.is_floating_point():
        return x
    return x.to(next(model.parameters()).dtype)
