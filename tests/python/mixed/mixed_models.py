# SPDX-License-Identifier: BSD-3-Clause
"""Small models, each for a feature, and optimizers: random training is made of them."""

import torch
from own_classes import Counter as CountsInAttribute
from own_classes import GroupCounter, NewTensors, Numbers, Stateless, Tensors
from style_classes import AdaBelief, SignOfAverage
from torch import nn, optim
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import optfuse

OWN = (Tensors, Numbers, NewTensors, Stateless, GroupCounter, CountsInAttribute)
for cls in (Tensors, Numbers, NewTensors, Stateless):
    optfuse.register(cls)

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-3),
    "AdaBelief": AdaBelief,
    "SignOfAverage": SignOfAverage,
    **{cls.__name__: cls for cls in OWN},
}
# PyTorch's fused kernels read gradients in the order of memory, whatever their strides.
IGNORES_STRIDES = ("AdamW", "Adam", "SGD", "Adagrad")
HAVE_ATTRIBUTES = ("Counter",)  # which PyTorch pickles none of
WIDTH = 12
AVERAGES = (
    lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.7)},
    dict,
)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, 3)

    def forward(self, x, part=0):
        x = torch.tanh(self.a(x))
        return self.c(x if part == 1 else torch.tanh(self.b(x)))


class Checkpointed(Plain):
    """Computes a part of it again in backward."""

    reentrant = False

    def forward(self, x, part=0):
        x = torch.tanh(self.a(x))
        if part != 1:
            x = checkpoint(lambda h: torch.tanh(self.b(h)), x, use_reentrant=self.reentrant)
        return self.c(x)


class Reentrant(Checkpointed):
    reentrant = True


class Tied(nn.Module):
    """The embedding is the head; one of both is left out in some passes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, part=0):
        h = x if part == 1 else self.embed((x[:, 0].abs() * 7).long() % 20) + x
        h = torch.tanh(self.body(h))
        return h if part == 2 else self.head(h)


class Shared(nn.Module):
    """Two layers with one weight, and a third that uses it turned."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.c = nn.Linear(WIDTH, 2)

    def forward(self, x, part=0):
        x = torch.tanh(self.a(x))
        if part != 1:
            x = torch.tanh(self.b(x))
        if part == 2:
            x = x @ self.a.weight
        return self.c(x)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.c = nn.Linear(3 * WIDTH, 4)

    def forward(self, x, part=0):
        x = self.conv(x.view(-1, 1, 3, WIDTH // 3))
        return self.c((x if part == 1 else torch.relu(self.norm(x))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, part=0):
        state = x.new_zeros(2, WIDTH)
        for piece in x[: len(x) // 2 * 2].split(2):
            state = (self.a(piece) + (0 if part == 1 else self.b(state))).tanh()
        return state


MODELS = (Plain, Checkpointed, Reentrant, Tied, Shared, Images, Recurrent)
