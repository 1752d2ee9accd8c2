# SPDX-License-Identifier: BSD-3-Clause
"""Guards of clipping and of loss scaling."""

import torch
from common import assert_same, loss_of, python, snapshot, train
from torch import nn

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise
from optfuse._library.bindings import lib


@guards("factors")
def a_clipped_gradient_is_applied_clipped():
    lib.of_shim_wait_from(0)  # small gradients, too
    pair = Pair()
    for i in range(2):
        for model, optimizer, clip in (
            (pair.theirs, pair.stock, nn.utils.clip_grad_norm_),
            (pair.ours, pair.fused, optfuse.clip_grad_norm_),
        ):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            clip(model.parameters(), 0.01)
            optimizer.step()
    pair.assert_pending()
    pair.assert_same()


@guards("unread", "seal")
def a_gradient_is_seen_clipped():
    lib.of_shim_wait_from(0)
    pair = Pair()
    loss_of(pair.ours, 0).backward()
    before = pair.ours[0].weight.grad.clone()
    norm = optfuse.clip_grad_norm_(pair.fused, 0.01)
    factor = torch.clamp(0.01 / (norm + 1e-6), max=1.0)
    assert_same("gradient", snapshot(pair.ours[0].weight.grad), before * factor)


@guards("clip")
def clipping_waits_for_no_backward_fusion():
    """Here all gradients are there, but in general some have been applied."""
    pair = Pair(mode="backward")
    with optfuse.accumulate(pair.fused):
        loss_of(pair.ours, 0).backward()
    must_raise(lambda: optfuse.clip_grad_norm_(pair.fused, 0.01), "clipping in backward mode")


@guards("nonfinite")
def a_gradient_with_an_infinity_skips_the_step():
    pair = Pair()
    scaler = torch.amp.GradScaler("cpu")
    train(pair.theirs, pair.stock, 0)
    train(pair.ours, pair.fused, 0)
    pair.fused.zero_grad()
    scaler.scale(loss_of(pair.ours, 1)).backward()
    pair.ours[0].weight.grad[0, 0] = float("inf")
    scaler.step(pair.fused)
    scaler.update()
    pair.assert_same()


@guards("norm")
def a_norm_that_is_added_up_otherwise_is_torchs():
    """On a CPU without AVX2 PyTorch's operator has other roundings."""
    code = """
import torch, optfuse
torch.manual_seed(0)
bad = 0
for n in range(1, 1000):
    p = torch.nn.Parameter(torch.zeros(n))
    optimizer = optfuse.fuse(torch.optim.SGD([p]))
    p.grad = torch.randn(n)
    stock = torch.linalg.vector_norm(p.grad)
    bad += bool(optfuse.clip_grad_norm_([p], 1.0) != stock)
print(bad)
"""
    out = python(code, ATEN_CPU_CAPABILITY="default")  # read at the first operator
    if out.returncode != 0:
        raise RuntimeError(out.stderr)
    assert int(out.stdout) == 0, f"{out.stdout.strip()} of 999 norms differ"
