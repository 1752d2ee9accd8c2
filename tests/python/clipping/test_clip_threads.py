# SPDX-License-Identifier: BSD-3-Clause
"""Clipping while another thread lets go of the optimizer."""

from common import python_ok

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
