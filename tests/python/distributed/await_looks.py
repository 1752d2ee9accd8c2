# SPDX-License-Identifier: BSD-3-Clause
"""Actions of a script while gradients are on their way. Each is given the model and the
optimizer, and yields what it has seen."""

import copy
import io
import os
import threading

import torch
import torch.distributed as dist
from common import assert_same, snapshot
from ddp_models import loss_of
from torch import nn

import optfuse

# Between backward() and step()


def gradients(model, optimizer):
    yield "gradients", [p.grad for p in model.parameters()]


def norms(model, optimizer):
    for p in model.parameters():
        yield "norm", p.grad.norm()
    yield "norms", torch._foreach_norm([p.grad for p in model.parameters()])


def one_number(model, optimizer):
    yield "number", model.head.weight.grad[0, 0].item()


def clipping(model, optimizer):
    yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def our_clipping(model, optimizer):
    ours = "Adam" in type(optimizer).__name__ and hasattr(optimizer, "_optfuse_link")
    clip = optfuse.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
    yield "norm", clip(model.parameters(), 0.1, foreach=False)


def clipping_values(model, optimizer):
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    yield "done", True


def writing(model, optimizer):
    for p in model.parameters():
        p.grad.mul_(0.5)
    model.head.bias.grad.copy_(torch.ones(3))
    yield "done", True


def another_gradient(model, optimizer):
    model.head.weight.grad = model.head.weight.grad * 2
    model.hidden.bias.grad = None
    yield "done", True


def data_of_a_gradient(model, optimizer):
    yield "data", [p.grad.data for p in model.parameters()]


def raw_memory(model, optimizer):
    yield "arrays", [torch.from_numpy(p.grad.numpy().copy()) for p in model.parameters()]
    yield "storage", bytes(model.head.weight.grad.untyped_storage())[:8] != b""


def flushed(model, optimizer):
    if hasattr(optimizer, "_optfuse_link"):
        optfuse.flush()
    yield "gradients", [p.grad for p in model.parameters()]


def a_checkpoint(model, optimizer):
    file = io.BytesIO()
    torch.save([{"model": model.state_dict()}, [p.grad for p in model.parameters()]], file)
    file.seek(0)
    yield "loaded", torch.load(file)[1]


def a_copy(model, optimizer):
    yield "copy", [p.grad for p in copy.deepcopy(model).parameters()]


def a_thread(model, optimizer):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(model.head.weight.grad.clone()))
    thread.start()
    thread.join()
    yield "seen", seen


def a_fork(model, optimizer):
    if os.fork() == 0:
        os._exit(int(any(not p.grad.isfinite().all() for p in model.parameters())))
    _, status = os.wait()
    yield "status", status


def zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    yield "gradients", [p.grad for p in model.parameters()]


def zeros_before(model, optimizer):
    optimizer.zero_grad()
    yield "gradients", [p.grad is None for p in model.parameters()]


def sums_over_ranks(model, optimizer):
    """A collective of the script's own."""
    total = torch.stack([p.grad.sum() for p in model.parameters()])
    dist.all_reduce(total)
    yield "sum", total


def nothing(model, optimizer):
    yield "nothing", True


LOOKS = (
    gradients, norms, one_number, clipping, our_clipping, clipping_values, writing,
    another_gradient, data_of_a_gradient, raw_memory, flushed, a_checkpoint, a_copy, a_thread,
    a_fork, zeros, zeros_before, sums_over_ranks, nothing,
)  # fmt: skip


# After step()


def parameters(model, optimizer):
    yield "parameters", list(model.parameters())


def one_parameter(model, optimizer):
    yield "number", model.conv.weight[0, 0, 0, 0].item()


def state(model, optimizer):
    yield "state", optimizer.state_dict()


def an_evaluation(model, optimizer):
    model.eval()
    with torch.no_grad():
        yield "loss", loss_of(model, 100)
    model.train()


def overwritten(model, optimizer):
    with torch.no_grad():
        model.head.weight.copy_(torch.ones(3, 16))
        model.hidden.weight.mul_(0.5)
    yield "done", True


def loaded(model, optimizer):
    model.load_state_dict(snapshot(dict(model.state_dict())))
    optimizer.load_state_dict(optimizer.state_dict())
    yield "done", True


def compared_across_ranks(model, optimizer):
    for p in model.parameters():
        others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(others, p.detach())
        for other in others:
            assert_same("a parameter of another rank", other, p.detach())
    yield "done", True


def a_second_step(model, optimizer):
    optimizer.step()
    yield "done", True


def a_new_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-3})
    yield "done", True


AFTER = (
    parameters, one_parameter, state, an_evaluation, overwritten, loaded, compared_across_ranks,
    a_second_step, a_new_group, gradients, norms, writing, our_clipping, zeros, flushed, a_copy,
    a_fork, raw_memory,
)  # fmt: skip
