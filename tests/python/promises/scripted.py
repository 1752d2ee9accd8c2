# SPDX-License-Identifier: BSD-3-Clause
"""Small layers to train whose gradients may be promises, beside stock."""

import torch
from common import adamw, everything, same
from torch import nn

from promises.counted import promises_of, total

STEPS = 3
WIDTH = 40
MODES = ("forward", "backward")
#: Whether oneDNN multiplies numbers of 16 bits here.
MULTIPLIES = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}


def wide():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)
    )


def batch(i, rows=5):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, WIDTH, generator=generator)


def loss_of(model, i):
    return model(batch(i)).square().mean()


class Counting:
    """Stands in the place of same()'s wrap: counts what became of the gradients."""

    def __init__(self, script, shape):
        self.script, self.shape, self.optimizers = script, str(shape), []

    def __call__(self, wrap):
        def counted(optimizer, **options):
            self.optimizers.append(wrap(optimizer, **options))
            return self.optimizers[-1]

        counted.fused = wrap.fused
        yield from self.script(counted)

    def total(self, what):
        fused = self.optimizers[-1]
        return total(fused, what, self.shape)


def equal(script, mode, panels=None, made=None, promised=True, shape="", **options):
    """Stock and fused see the same. panels, made: whether some gradients, of weights of this shape,
    went that way."""
    counting = Counting(script, shape)
    same(counting, mode, prove=False, **options)
    if promised is not None:
        assert (counting.total("promised") > 0) == promised
    for what, wanted in (("panels", panels), ("made", made)):
        if wanted is not None:
            assert (counting.total(what) > 0) == wanted, promises_of(counting.optimizers[-1])


def script_of(iteration, make=adamw, model=wide, steps=STEPS):
    """Trains by iteration(model, optimizer, i), which may yield what is to be compared."""

    def script(wrap):
        it = model()
        optimizer = wrap(make(it.parameters()))
        for i in range(steps):
            found = iteration(it, optimizer, i)
            if found is not None:
                yield from found
        yield from everything(it, optimizer)

    return script


def train(model, optimizer, i, before_step=lambda: None, loss=loss_of):
    optimizer.zero_grad()
    loss(model, i).backward()
    before_step()
    optimizer.step()


def first(model):
    return model[0].weight
