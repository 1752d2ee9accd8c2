# SPDX-License-Identifier: BSD-3-Clause
"""Clips generated sets of gradients, by our functions and PyTorch's on parameters of a fused
optimizer, and by PyTorch's on others, and compares every bit. "generated_gradients.py SETS" prints
how many sets differ; ATEN_CPU_CAPABILITY chooses PyTorch's instructions."""

import math
import random
import sys

import torch
from torch import nn

import optfuse
from optfuse._clipping.torch_functions import (
    stock_clip_grad_norm_,
    stock_clip_grads_with_norm_,
    stock_get_total_norm,
)
from optfuse._library.bindings import lib

SETS_A_MODEL = 40
USUAL = 16384
# Around vectors, tails, blocks, what waits, and what PyTorch shares among threads.
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 1000, 1003, 4096)
LARGE = (USUAL - 1, USUAL, USUAL + 1, 32767, 32768, 32769, 33333)
DTYPES = (torch.float32,) * 3 + (torch.float64, torch.bfloat16, torch.float16)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def shape_of(chance):
    if chance.random() < 0.1:
        return ()
    n = chance.choice(LARGE if chance.random() < 0.02 else SIZES)
    return (n // 4, 4) if n % 4 == 0 and chance.random() < 0.4 else (n,)


def shapes_and_dtypes(chance):
    dtype = chance.choice(DTYPES)
    mixed = chance.random() < 0.2
    count = chance.randint(1, 9)
    return [(shape_of(chance), chance.choice(DTYPES) if mixed else dtype) for _ in range(count)]


def values(shape, dtype, chance, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = chance.choice(("usual",) * 6 + ("small", "denormal", "huge", "zero", "inf", "nan"))
    x *= {"small": 1e-20, "denormal": 1e-40, "huge": 1e25, "zero": -0.0}.get(kind, 1.0)
    x = x.to(dtype)
    if kind in ("inf", "nan") and x.numel():
        x.view(-1)[chance.randrange(x.numel())] = float(kind)
    return x


def gradient(shape, dtype, chance, generator):
    x = values(shape, dtype, chance, generator)
    layout = chance.choice(("dense",) * 8 + ("transposed", "with holes"))
    if layout == "transposed" and x.dim() == 2:
        return x.t().contiguous().t()
    if layout == "with holes" and x.dim():
        wide = torch.zeros(2 * x.shape[0], *x.shape[1:], dtype=dtype)
        wide[::2] = x
        return wide[::2]
    return x


def gradients(shapes, seed):
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    made = [gradient(*which, chance, generator) for which in shapes]
    return [None if chance.random() < 0.03 else g for g in made]


def reference(params, max_norm, norm_type, foreach):
    grads = [p.grad for p in params if p.grad is not None]
    norm = stock_get_total_norm(grads, norm_type, False, foreach)
    stock_clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def in_two_calls(params, max_norm, norm_type, foreach):
    grads = [p.grad for p in params if p.grad is not None]
    norm = nn.utils.get_total_norm(grads, norm_type, False, foreach)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def by(function):
    return lambda params, max_norm, norm_type, foreach: function(
        params, max_norm, norm_type, False, foreach
    )


def roads():
    """PyTorch's function as it is now, and as a script has imported it before; ours; two calls."""
    functions = nn.utils.clip_grad_norm_, stock_clip_grad_norm_, optfuse.clip_grad_norm_
    return [*map(by, functions), in_two_calls]


def is_same(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (tensor.detach().reshape(-1) for tensor in (a, b))
    integer = INTEGER[a.element_size()]
    differ = a.contiguous().view(integer) != b.contiguous().view(integer)
    return not (differ & ~(a.isnan() & b.isnan())).any()


def set_differs(ours, theirs, shapes, seed):
    chance = random.Random(seed + 1)
    for params in (ours, theirs):
        for p, g in zip(params, gradients(shapes, seed), strict=True):
            p.grad = g
    max_norm = chance.choice((0.5,) * 4 + (1e9, 0.0, math.inf))
    norm_type = chance.choice((2.0,) * 5 + (1.0, 1.0, math.inf))
    if any(0 in shape for shape, _ in shapes):
        norm_type = 2.0  # stock refuses infinity
    arguments = max_norm, norm_type, chance.choice((None, False))
    lib.of_shim_wait_from(chance.choice((0, USUAL, USUAL)))
    clip = chance.choice(roads())
    norms = clip(ours, *arguments), reference(theirs, *arguments)
    pairs = [(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True) if q.grad is not None]
    return not all(is_same(a, b) for a, b in (norms, *pairs))


def differing(sets):
    """The seeds of sets that differ."""
    found = []
    for first in range(0, sets, SETS_A_MODEL):
        chance = random.Random(first)
        shapes = shapes_and_dtypes(chance)
        ours, theirs = (
            [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
            for _ in range(2)
        )
        torch.set_num_threads(chance.choice((1, 2, 3)))
        optimizer = optfuse.fuse(torch.optim.SGD(ours, lr=0.1, foreach=False))
        seeds = range(first, min(first + SETS_A_MODEL, sets))
        found += [seed for seed in seeds if set_differs(ours, theirs, shapes, seed)]
        optfuse.unfuse(optimizer)
    lib.of_shim_wait_from(USUAL)
    torch.set_num_threads(1)
    return found


if __name__ == "__main__":
    wrong = differing(int(sys.argv[1]))
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{capability}: {len(wrong)} of {sys.argv[1]} sets differ: {wrong[:9]}")
    sys.exit(bool(wrong))
