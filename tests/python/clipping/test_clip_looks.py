# SPDX-License-Identifier: BSD-3-Clause
"""Who looks at a gradient that optfuse.clip_grad_norm_ has clipped finds what torch's
function leaves, whatever happens to it before step() and after it."""

import os
import threading

import pytest
import torch
from clip_scripts import TIGHT, gradients, model_to_clip, twin_of
from common import assert_same_tensor
from torch import nn

import optfuse


@pytest.mark.parametrize("stepped", (False, True))
def test_another_thread_looks(stepped):
    model, optimizer = model_to_clip()
    stock = twin_of(model)
    nn.utils.clip_grad_norm_(stock.parameters(), TIGHT)
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    if stepped:
        optimizer.step()
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(gradients(model)))
    thread.start()
    thread.join()
    for ours, p in zip(seen, stock.parameters(), strict=True):
        assert_same_tensor("gradient", ours, p.grad)


def test_a_forked_child_looks():
    model, optimizer = model_to_clip()
    stock = twin_of(model)
    nn.utils.clip_grad_norm_(stock.parameters(), TIGHT)
    optfuse.clip_grad_norm_(optimizer, TIGHT)
    child = os.fork()
    if child == 0:
        pairs = zip(model.parameters(), stock.parameters(), strict=True)
        os._exit(0 if all(torch.equal(p.grad, q.grad) for p, q in pairs) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child sees other gradients"
