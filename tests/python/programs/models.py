# SPDX-License-Identifier: BSD-3-Clause
"""The models that programs train: as small as their hazard allows."""

import torch
from style_classes import MyParameter
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.nn.utils import parametrizations
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


class Parts(nn.Module):
    """A loss of each parameter by itself."""

    def __init__(self, *tensors):
        super().__init__()
        self.parts = nn.ParameterList(tensors)

    def forward(self, x):
        return sum((p * x.sum().to(p.dtype)).square().sum().double() for p in self.parts)


def of_several_dtypes(*dtypes):
    return lambda: Parts(*(numbers(i, 11, 3).to(d) for i, d in enumerate(dtypes)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        state = x.new_zeros(1, 4)
        for row in x.split(1):
            state = (self.first(row) + self.again(state)).tanh()
        return state


class Marked(nn.Module):
    """An embedding, whose weights decode, too, a convolution, a norm and a matrix; some parameters
    are marked."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.conv = nn.Conv1d(12, 10, 3, padding=1)
        self.norm = nn.BatchNorm1d(10)
        self.out, self.back = nn.Linear(10, 30), nn.Linear(30, 7)
        self.tied = nn.Linear(12, 7, bias=False)
        self.tied.weight = self.table.weight
        self.conv.weight = MyParameter(self.conv.weight.detach())
        self.out.bias.special = True
        self.back.bias.register_hook(lambda grad: grad)

    def forward(self, x):
        embedded = self.table(x)
        hidden = self.norm(self.conv(embedded.transpose(1, 2))).relu()
        return self.back(self.out(hidden.mean(2)).relu()) + self.tied(embedded).mean(1)


class Shapes(nn.Module):
    """A parameter of each number of dimensions."""

    def __init__(self):
        super().__init__()
        shapes = (3, 5), (4,), (2, 3, 2), (41,), (1,), ()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x):
        scale = x.mean()
        parts = [((p * p).sum() + (p * (scale + i)).sum()) for i, p in enumerate(self.weights)]
        return torch.stack(parts)


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


class First(nn.Module):
    """The first output of a module that is given its input several times."""

    def __init__(self, inner, times=1):
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x):
        out = self.inner(*[x] * self.times)
        return out[0] if isinstance(out, tuple) else out


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def recurrent(kind):
    return First(kind(4, 3, num_layers=2, bidirectional=True, batch_first=True))


def twice(parametrization):
    return nn.Sequential(*(parametrization(nn.Linear(4, 4)) for _ in range(2)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class JoinsLater(nn.Module):
    """Its second parameter has its first gradient later."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.full((3, 4), 1.0 + i) for i in range(4))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return sum(x * p for i, p in enumerate(self.weights) if i != 1 or self.passes > 1)


def replicated():
    """Its parameters are DTensors. Without a message: gloo's thread has the parameters' memory for
    a while after one, so that updates are left to step()."""
    mesh = init_device_mesh("cpu", (1,))

    def replicate(_, module, mesh):
        for name, p in list(module.named_parameters(recurse=False)):
            local = distribute_tensor(p.data, mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(local))

    return distribute_module(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        mesh,
        replicate,
        input_fn=lambda _, inputs, mesh: DTensor.from_local(*inputs, mesh),
        output_fn=lambda _, output, mesh: output.to_local(),
    )


def sequences(i):
    return numbers(i, 2, 3, 4)


# Modules of torch.nn, in which a use of a parameter is not an operator of Python's.
MODULES = {
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 3, 3), images),
    "convolution in channels_last": (
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        images,
    ),
    "bilinear": (lambda: First(nn.Bilinear(4, 4, 3), times=2), rows),
    "PReLU": (lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU()), rows),
    "attention": (
        lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), times=3),
        sequences,
    ),
    "encoder": (encoder, sequences),
    "LSTM": (lambda: recurrent(nn.LSTM), sequences),
    "GRU": (lambda: recurrent(nn.GRU), sequences),
    "weight_norm": (lambda: twice(parametrizations.weight_norm), rows),
    "spectral_norm": (lambda: twice(parametrizations.spectral_norm), rows),
    "orthogonal": (lambda: twice(parametrizations.orthogonal), rows),
}

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
MODELS |= MODULES
MODELS["marked"] = (Marked, words)
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
OF_SHAPES = {f"shapes in {str(dtype)[6:]}": dtype for dtype in DTYPES}
MODELS |= {name: (lambda of=dtype: Shapes().to(of), rows) for name, dtype in OF_SHAPES.items()}
MODELS["joins later"] = (JoinsLater, rows)
MODELS["layers"] = (Layers, rows)
MODELS["odd sizes"] = (
    lambda: Parts(*(numbers(1, *size) for size in ((5,), (), (0,), (3, 0), (1, 1, 1), (4, 2)))),
    rows,
)
MODELS["long"] = (lambda: nn.Sequential(nn.Linear(4, 700), nn.Tanh(), nn.Linear(700, 3)), rows)
MODELS["a number beside float64"] = (
    lambda: Parts(torch.tensor(1.0), torch.linspace(-1, 1, 9).double()),
    rows,
)
MODELS["two dtypes"] = (of_several_dtypes(torch.float32, torch.float64), rows)
MODELS["four dtypes"] = (
    of_several_dtypes(torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32),
    rows,
)
# Their gradients are promises, see World.
PROMISED = {
    "promised": MODELS["mlp"],
    "checkpointed and promised": MODELS["checkpointed"],
    "promised and used twice": MODELS["recurrent"],
    "promised embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)), words),
    "promised, in panels": (lambda: nn.Sequential(nn.Linear(4, 200), nn.Linear(200, 50)), rows),
    "promised in bfloat16": MODELS["mlp in bfloat16"],
}
MODELS |= PROMISED
PROMISING = set(PROMISED)
MODELS["replicated"] = (replicated, rows)
LEAVE_OUT = ("odd", "branching")  # some of their parameters, in some passes
SIXTEEN_BITS = ("mlp in bfloat16", "mlp in float16")


def inputs(kind, model, i):
    x = MODELS[kind][1](i)
    if not x.is_floating_point():
        return x
    return x.to(next(model.parameters()).dtype)
