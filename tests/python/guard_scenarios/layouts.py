# SPDX-License-Identifier: BSD-3-Clause
"""Guards of how tensors lie in memory."""

import torch
from common import adamw, assert_same, batch, loss_of, net, sgd, snapshot, train
from torch import nn

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise


@guards("lazy")
def a_lazily_negated_gradient_has_its_sign():
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(torch.optim.SGD([p], lr=0.5))
    p.grad = torch._neg_view(torch.ones(4))
    optimizer.step()
    assert p.tolist() == [1.5] * 4, f"1 - 0.5 * -1 is {p[0].item()}"


@guards("dense")
def a_gradient_of_other_strides_is_read_in_order():
    pair = Pair(build=lambda: nn.Linear(5, 7, bias=False), make=sgd)
    gradient = torch.arange(35.0).view(5, 7)
    pair.theirs.weight.grad = gradient.t().contiguous()
    pair.ours.weight.grad = gradient.t()
    pair.stock.step()
    pair.fused.step()
    pair.assert_same()


@guards("apart")
def a_gradient_that_is_the_weight_is_refused():
    """Stock has decayed the weight, and with it the gradient, when it adds the gradient."""
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(torch.optim.ASGD([p], lr=0.1, lambd=0.5))
    p.grad = p.detach()
    must_raise(optimizer.step, "a gradient in the memory of its weight")


@guards("strides")
def sixteen_bits_are_rounded_as_their_strides_have_it():
    p = nn.Parameter(torch.ones(5, 4, dtype=torch.bfloat16))
    optimizer = optfuse.fuse(torch.optim.RMSprop([p], foreach=False))
    p.grad = torch.ones(4, 5, dtype=torch.bfloat16).t()
    must_raise(optimizer.step, "a gradient of 16 bits with other strides")


@guards("copyback")
def a_parameter_with_holes_is_updated():
    wide = torch.ones(5, 8)
    p, q = nn.Parameter(wide[:, ::2]), nn.Parameter(torch.ones(5, 4))
    ours, stock = optfuse.fuse(sgd([p])), sgd([q])
    p.grad, q.grad = torch.ones(5, 4), torch.ones(5, 4)
    ours.step()
    stock.step()
    assert_same("weights", snapshot(p.detach()), q.detach())


@guards("postpone", "written")
def parameters_that_overlap_are_updated_in_order():
    def build():
        model = nn.Module()
        flat = torch.randn(20)
        model.first = nn.Parameter(flat[:16].view(4, 4))
        model.second = nn.Parameter(flat[4:].view(4, 4))
        model.forward = lambda x: torch.tanh(x[:, :4] @ model.first) @ model.second
        return model

    pair = Pair(mode="backward", build=build)
    for model, optimizer in ((pair.theirs, pair.stock), (pair.ours, pair.fused)):
        model(batch(0)[0]).square().sum().backward()
        optimizer.step()
    pair.assert_same()


@guards("buffer")
def gradients_in_a_buffer_that_is_scaled_are_scaled():
    pair = Pair(mode="backward")
    for model, optimizer in ((pair.theirs, pair.stock), (pair.ours, pair.fused)):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        end = 0
        for p in model.parameters():
            begin, end = end, end + p.numel()
            p.grad = flat[begin:end].view_as(p)
        loss_of(model, 0).backward()
        flat.mul_(1e-3)
        optimizer.step()
    pair.assert_same()


@guards("copy_on_write")
def a_lazy_clone_keeps_its_values():
    model = net()
    opt = optfuse.fuse(adamw(model.parameters()))
    train(model, opt, 0)
    kept = torch._lazy_clone(model[0].weight.detach())
    values = kept.clone()
    train(model, opt, 1)
    optfuse.flush(opt)
    assert torch.equal(kept, values), "the clone has the update, too"
