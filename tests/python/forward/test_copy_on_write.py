# SPDX-License-Identifier: BSD-3-Clause
"""Memory that copies on write (torch._lazy_clone): an update writes to the optimizer's own."""

import pytest
import torch
from common import adamw, assert_same, net, train

import optfuse


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("what", ["parameter", "state", "counter", "gradient"])
def test_clones_keep_their_values(what, mode):
    model, stock = net(), net()
    stock.load_state_dict(model.state_dict())
    opt, reference = optfuse.fuse(adamw(model.parameters()), mode=mode), adamw(stock.parameters())
    for i in range(6):
        if i > 1:
            tensors = [
                {
                    "parameter": p.detach(),
                    "state": opt.state[p]["exp_avg"],
                    "counter": opt.state[p]["step"],
                    "gradient": p.detach(),
                }[what]
                for p in model.parameters()
            ]
            kept = [torch._lazy_clone(t) for t in tensors]
            values = [t.clone() for t in kept]
        train(model, opt, i)
        train(stock, reference, i)
        if what == "gradient" and mode == "forward":
            kept = [torch._lazy_clone(p.grad) for p in model.parameters()]
            values = [t.clone() for t in kept]
            optfuse.clip_grad_norm_(opt, 0.01)
            torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.01, foreach=False)
        if i > 1:
            assert_same("clones", kept, values)
    assert_same("weights", list(model.parameters()), list(stock.parameters()))
