# SPDX-License-Identifier: BSD-3-Clause
"""Clipping while another thread lets go of the optimizer, or changes its groups."""

import gc
import threading
from itertools import cycle, islice

import pytest
import torch
from common import assert_same, python_ok
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import optfuse

CODE = """
import gc, threading, time, weakref
import torch, optfuse
from torch import nn

torch.set_num_threads(1)
grads = [torch.randn(1 << 20) for _ in range(8)]
stock = [nn.Parameter(torch.ones(1 << 20)) for _ in grads]
for p, g in zip(stock, grads):
    p.grad = g.clone()
theirs = nn.utils.clip_grad_norm_(stock, 0.1, 3.0)

def clips_meanwhile():
    params = [nn.Parameter(torch.ones(1 << 20)) for _ in grads]
    optimizers = [optfuse.fuse(torch.optim.SGD(params, lr=0.1, fused=True))]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    gone = []
    weakref.finalize(optimizers[0], lambda: gone.append(True))
    gc.collect()
    gc.freeze()

    def let_go():
        time.sleep(0.01)
        optimizers.clear()
        gc.collect()

    thread = threading.Thread(target=let_go)
    thread.start()
    clipped = torch.ops.optfuse.clip(params, 0.1, 3.0, False)
    in_the_middle = bool(gone) and clipped[0] is not None  # else gone before, or later
    thread.join()
    if in_the_middle:
        assert torch.equal(clipped[0], theirs)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(params, stock))
    return in_the_middle

print("gone in the middle" if any(clips_meanwhile() for _ in range(30)) else "never")
"""


def test_the_optimizer_dies_while_its_gradients_are_clipped():
    """Freed memory is overwritten."""
    out = python_ok(CODE, fresh=True, MALLOC_PERTURB_="165")
    assert "gone in the middle" in out


# Slots are looked up before the norm is found.

SIZE = 20_000  # so large that the update multiplies


def parameters(n, dtypes):
    generator = torch.Generator().manual_seed(0)
    made = []
    for dtype in islice(cycle(dtypes), n):
        p = nn.Parameter(torch.ones(SIZE, dtype=dtype))
        p.grad = torch.randn(SIZE, generator=generator, dtype=dtype)
        made.append(p)
    return made


class Meanwhile(TorchDispatchMode):
    """Lets another thread work at the first norm of an operator."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm" in func.name() and self.work is not None:
            thread = threading.Thread(target=self.work)
            self.work = None
            thread.start()
            thread.join()
        if isinstance(args[0], float):  # the factor: modes see a tensor for a number as a number
            return args[0]
        return func(*args, **(kwargs or {}))


def first_is_moved_to_the_end(optimizers):
    """add_param_group() tells the library of all parameters."""
    (optimizer,) = optimizers
    params = optimizer.param_groups[0]["params"]
    params.append(params.pop(0))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(SIZE))]})


def a_group_is_added(optimizers):
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(SIZE))]})


def all_is_let_go_of(optimizers):
    optimizers.clear()
    gc.collect()


def by_the_operator(params, max_norm, norm_type):
    """As one call; Python keeps the optimizers meanwhile, and here it does not."""
    norm, _ = torch.ops.optfuse.clip(params, max_norm, norm_type, False)
    return norm


WAYS = {
    "one call": (by_the_operator, (torch.float32,)),
    "the function": (optfuse.clip_grad_norm_, (torch.float32,)),
    "two dtypes": (optfuse.clip_grad_norm_, (torch.float32, torch.float64)),
}
WORKS = (a_group_is_added, first_is_moved_to_the_end, all_is_let_go_of)


@pytest.mark.parametrize("clip, dtypes", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("work", WORKS)
def test_another_thread_changes_the_optimizer_while_its_gradients_are_clipped(work, clip, dtypes):
    ours, stock = parameters(4, dtypes), parameters(4, dtypes)
    optimizers = [optfuse.fuse(torch.optim.SGD(ours, lr=0.1, fused=True))]
    clipped, left = ours[:2], ours[2:]
    with Meanwhile(lambda: work(optimizers)) as mode:
        norm = clip(clipped, 0.1, 3.0)
    assert mode.work is None, "no norm was found by an operator"
    assert_same("norm", norm, nn.utils.clip_grad_norm_(stock[:2], 0.1, 3.0))
    for p, q in zip(clipped + left, stock, strict=True):
        assert_same("gradients", p.grad, q.grad)
    for optimizer in optimizers:
        optimizer.step()
        torch.optim.SGD(stock, lr=0.1, fused=True).step()
        assert_same("weights", ours, stock)
