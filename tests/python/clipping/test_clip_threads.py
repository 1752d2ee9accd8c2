# SPDX-License-Identifier: BSD-3-Clause
"""Clipping while another thread lets go of the optimizer."""

from common import python_ok

CODE = """
import gc, threading, time, weakref
import torch, optfuse
from torch import nn

torch.set_num_threads(1)
params = [nn.Parameter(torch.ones(1 << 20)) for _ in range(8)]
grads = [torch.randn(1 << 20) for _ in params]
optimizers = [optfuse.fuse(torch.optim.SGD(params, lr=0.1, fused=True))]
for p, g in zip(params, grads):
    p.grad = g.clone()

def let_go():
    time.sleep(0.01)
    optimizers.clear()
    gc.collect()

gone = []
weakref.finalize(optimizers[0], lambda: gone.append(time.monotonic()))
gc.collect()
gc.freeze()
thread = threading.Thread(target=let_go)
thread.start()
norm, waits = torch.ops.optfuse.clip(params, 0.1, 3.0, False)
print("gone in the middle" if gone and gone[0] < time.monotonic() else "gone later")
thread.join()
stock = [nn.Parameter(torch.ones(1 << 20)) for _ in range(8)]
for p, g in zip(stock, grads):
    p.grad = g
theirs = nn.utils.clip_grad_norm_(stock, 0.1, 3.0)
assert torch.equal(norm, theirs)
assert all(torch.equal(a.grad, b.grad) for a, b in zip(params, stock))
"""


def test_the_optimizer_dies_while_its_gradients_are_clipped():
    """Freed memory is overwritten."""
    out = python_ok(CODE, fresh=True, MALLOC_PERTURB_="165")
    assert "gone in the middle" in out
