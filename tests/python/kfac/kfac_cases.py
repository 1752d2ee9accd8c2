# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of optfuse.kfac().

A script is a generator function that takes `arrange`, trains something with
`arrange(model, optimizer, **options)`, and yields (name, value) pairs. What arrange() returns
has step(), factors(name) and discard(). agree() runs the script with the reference and with
ours."""

import importlib.util
import io
from pathlib import Path

import torch
from common import Fused, Stock, assert_same, run, snapshot
from kfac_reference import Reference
from torch import nn

import optfuse

STEPS = 12
EXACT = 1e-9  # relative, in float64
# With the default decay most of a factor would still be identity after these few steps.
OFTEN = {"factors_every": 1, "inverses_every": 1, "decay": 0.5}
SELDOM = {"factors_every": 2, "inverses_every": 3, "decay": 0.5}


class Ours:
    """optfuse.kfac() with the face of the reference."""

    is_ours = True

    def __init__(self, model, optimizer, **options):
        self.optimizer = optimizer
        self.kfac = optfuse.kfac(model, optimizer, **options)
        self.factors, self.discard = self.kfac.factors, self.kfac.discard

    def step(self):
        self.optimizer.step()


class Second(Reference):
    is_ours = False


def played(script, arrange):
    torch.manual_seed(0)
    return [(name, snapshot(value)) for name, value in script(arrange)]


def relative(ours, reference):
    ours, reference = ours.detach().double(), reference.detach().double()
    assert ours.shape == reference.shape, f"{tuple(ours.shape)}, expected {tuple(reference.shape)}"
    assert ours.isfinite().all() and reference.isfinite().all()
    size = float(reference.norm())
    return float((ours - reference).norm()) / (size or 1.0)


def assert_close(name, ours, reference, tolerance=EXACT):
    """All the way down, tensors within a relative distance."""
    if isinstance(reference, dict):
        assert set(ours) == set(reference), f"{name}: {list(ours)}, expected {list(reference)}"
        for key in reference:
            assert_close(f"{name}[{key!r}]", ours[key], reference[key], tolerance)
    elif isinstance(reference, list | tuple):
        for i, pair in enumerate(zip(ours, reference, strict=True)):
            assert_close(f"{name}[{i}]", *pair, tolerance)
    else:
        distance = relative(ours, reference)
        assert distance <= tolerance, f"{name}: relative distance {distance:.3g} > {tolerance}"


def agree(script, mode=None, tolerance=EXACT):
    """With a stock optimizer, or with a fused one (mode="forward"). Returns both runs."""
    reference = played(script, Second)
    assert reference, "the script yielded nothing"
    wrap = Fused(mode) if mode else Stock()
    ours = played(script, lambda model, optimizer, **o: Ours(model, wrap(optimizer), **o))
    for i, (a, b) in enumerate(zip(ours, reference, strict=True)):
        assert a[0] == b[0]
        assert_close(f"yield {i}, {b[0]}", a[1], b[1], tolerance)
    if mode:
        wrap.prove()
    return ours, reference


def same_bits(script, other):
    """Two runs of ours: with a stock optimizer under this script, and another one, which may
    be "forward": the same script with a fused optimizer."""
    stock = played(script, Ours)
    if other == "forward":
        wrap = Fused("forward")
        found = run(lambda w: script(lambda m, o, **options: Ours(m, w(o), **options)), wrap)
        wrap.prove()
    else:
        found = played(other, Ours)
    for i, (a, b) in enumerate(zip(found, stock, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a[1], b[1])


def seen(model, arranged, *names):
    """The values that are compared after training."""
    yield "parameters", dict(model.named_parameters())
    for name in names:
        yield f"factors of {name!r}", arranged.factors(name)


# Models, each with the loss of its i-th batch and the names of its layers


def generator_of(i):
    return torch.Generator("cpu").manual_seed(1000 + i)


def rows(i, *shape):
    """Made on the CPU, for whatever device is the default."""
    how = {"generator": generator_of(i), "dtype": torch.float64, "device": "cpu"}
    return torch.randn(*shape, **how).to(torch.get_default_device())


def labels(i, below, *shape):
    found = torch.randint(below, shape, generator=generator_of(i), device="cpu")
    return found.to(torch.get_default_device())


def mlp(width=8, layers=3):
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), *parts, nn.Linear(width, 3)).double()


def mlp_loss(model, i, n=7):
    x = rows(i, n, 9).to(next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x[:, :6]), x[:, 6:].sin())


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(5, 4, (3, 2), stride=(2, 1), bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(40, 3),
    ).double()


def conv_loss(model, i, n=6):
    return nn.functional.cross_entropy(model(rows(i, n, 2, 6, 6)), labels(i, 3, n))


def gpt():
    """The benchmark's, small: a block, an embedding, and a head."""
    path = Path(__file__).parents[3] / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("benchmark_models", path)
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    return models.GPT(vocabulary=7, length=5, width=8, layers=1, heads=2).double()


def gpt_loss(model, i, n=4):
    words = labels(i, 7, n, 6)
    logits = model(words[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x + self.attend(x, x, x, need_weights=False)[0])


def attention():
    return Attention().double()


def attention_loss(model, i, n=4):
    return model(rows(i, n, 5, 8)).sin().square().mean()


IN_BLOCK = [f"blocks.0.{name}" for name in ("qkv", "out", "feed.0", "feed.2")]
MODELS = {
    "mlp": (mlp, mlp_loss, ["0", "2", "4", "6", "8"]),
    "conv net": (conv_net, conv_loss, ["0", "2", "4", "7"]),
    "gpt": (gpt, gpt_loss, [*IN_BLOCK, "head"]),
    "attention": (attention, attention_loss, ["attend.in_proj_weight", "attend.out_proj", "head"]),
}


def mean_of(y):
    """The loss of an output."""
    return y.sin().square().mean()


def sgd(parameters, lr=0.05):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-2, fused=True)


def adamw(parameters, lr=1e-2):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=1e-1, fused=True)


def training(
    model="mlp", make=sgd, loss=None, names=None, before_step=None, after_step=None, **options
):
    """A script: every step's loss, and what seen() says at the end.

    model: a name of MODELS, or what builds one
    loss: of the model and the number of the step, or those of several passes
    names: the layers whose factors are compared
    before_step, after_step: called with the model, what arrange() returned and the number;
    the second yields pairs to compare"""
    build, its_loss, its_names = MODELS.get(model, (model, None, ()))
    loss, names = loss or its_loss, its_names if names is None else names

    def script(arrange):
        model = build()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        arranged = arrange(model, optimizer, **options)
        for i in range(STEPS):
            optimizer.zero_grad()
            total = 0.0
            found = loss(model, i)
            for value in [found] if isinstance(found, torch.Tensor) else found:
                value.backward()
                total = total + value.detach()
            if before_step:
                before_step(model, arranged, i)
            arranged.step()
            yield "loss", total
            if after_step:
                yield from after_step(model, arranged, i)
        yield from seen(model, arranged, *(n for n in names if n not in options.get("skip", ())))

    return script


def played_close(script, other, arrange=Ours):
    """Two runs of ours see the same but for rounding."""
    for a, b in zip(played(script, arrange), played(other, arrange), strict=True):
        assert_close(b[0], a[1], b[1])


# Checkpoints


def through_a_file(value):
    """As a checkpoint has it; loading it must not need a pickle of classes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
