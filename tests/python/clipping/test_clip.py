# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.clip_grad_norm_ writes no gradient that nobody looks at, and keeps no memory. Its bits
are deeds (programs/deeds/clipping.py)."""

import ctypes
import gc
import math
from pathlib import Path

import pytest
import torch
from clip_scripts import TIGHT, backward, long_net, model_to_clip
from common import adamw, assert_same_tensor, loss_of, sgd
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import optfuse
from optfuse._clipping import clip_norm


def raw(address, n):
    return ctypes.string_at(address, 4 * n)


def test_no_gradient_is_written():
    """Neither by the clipping nor by the update; its first reader sees it clipped."""
    model, optimizer = model_to_clip()
    weight = model[0].weight
    before = weight.grad.clone()
    address, n = weight.grad.data_ptr(), weight.numel()
    memory = raw(address, n)
    norm = optfuse.clip_grad_norm_(optimizer, TIGHT)
    assert raw(address, n) == memory, "clipping wrote the gradient"
    optimizer.step()
    weight.sum()
    assert raw(address, n) == memory, "the update wrote the gradient"
    factor = torch.clamp(TIGHT / (norm + 1e-6), max=1.0)
    assert_same_tensor("gradient", weight.grad, before * factor)
    assert raw(address, n) != memory


def test_without_folding_every_gradient_is_written():
    model = long_net()
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Forward(fold=False))
    backward(model, 0)
    grads = [p.grad for p in model.parameters()]
    memory = [raw(g.data_ptr(), g.numel()) for g in grads]
    addresses = [g.data_ptr() for g in grads]
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    for address, before, g in zip(addresses, memory, grads, strict=True):
        assert raw(address, g.numel()) != before, "clipping left the gradient to the update"


def test_a_clipped_gradient_is_freed_by_zero_grad():
    model, optimizer = model_to_clip()
    for _ in range(3):
        optfuse.clip_grad_norm_(optimizer, TIGHT)
        optimizer.step()
        grads = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
        optfuse.clip_grad_norm_(optimizer, TIGHT / 2)
        optimizer.step()
        loss_of(model, 1)  # launches
        optimizer.zero_grad()
        left = sum(not g.expired() for g in grads)
        assert left == 0, f"{left} of {len(grads)} gradients are still there"
        loss_of(model, 1).backward()


def test_one_scaling_a_gradient_and_no_more():
    """Records of gradients that are gone are swept; memory stays."""
    model, optimizer = model_to_clip()
    sizes = []
    for i in range(300):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optfuse.clip_grad_norm_(optimizer, TIGHT)
        optimizer.step()
        if i % 100 == 99:
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert sizes[-1] - sizes[0] < 100, f"resident pages grow: {sizes}"


def test_our_norms_are_those_of_torch(several_threads):
    """At every length of a tail, of several gradients at once, on one thread
    and on three, with infinities and NaN among them."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("PyTorch's norm has other roundings here; its operator is used")
    assert torch.ops.optfuse.norms_are_torchs()
    sizes = (*range(1, 130), 1000, 4095, 33_333, 400_001)
    for spread in (1.0, 1e-30, 1e25):
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        optimizer = optfuse.fuse(sgd(params))
        for p in params:
            p.grad = torch.randn(p.shape) * spread
        params[50].grad[3], params[60].grad[4] = math.inf, math.nan
        for threads in (1, 3):
            torch.set_num_threads(threads)
            ours = clip_norm.Gradients(params).norms()
            stock = torch.stack([torch.linalg.vector_norm(p.grad, 2.0) for p in params])
            assert_same_tensor(f"norms of {spread}", ours, stock)
            stock = torch.stack(torch._foreach_norm([p.grad for p in params], 2.0))
            assert_same_tensor(f"foreach norms of {spread}", ours, stock)
        optfuse.unfuse(optimizer)
