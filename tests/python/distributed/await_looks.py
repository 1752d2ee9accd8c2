# SPDX-License-Identifier: BSD-3-Clause
"""Actions of a script while gradients are on their way, by names. Each is given the model and the
optimizer, and returns what it has seen."""

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


def gradients(model, optimizer=None):
    return [p.grad for p in model.parameters()]


def norms(model, optimizer):
    return [*(p.grad.norm() for p in model.parameters()), torch._foreach_norm(gradients(model))]


def our_clipping(model, optimizer):
    ours = "Adam" in type(optimizer).__name__ and hasattr(optimizer, "_optfuse_link")
    clip = optfuse.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
    return clip(model.parameters(), 0.1, foreach=False)


def writing(model, optimizer):
    for p in model.parameters():
        p.grad.mul_(0.5)
    model.head.bias.grad.copy_(torch.ones(3))


def another_gradient(model, optimizer):
    model.head.weight.grad = model.head.weight.grad * 2
    model.hidden.bias.grad = None


def raw_memory(model, optimizer):
    storage = bytes(model.head.weight.grad.untyped_storage())[:8] != b""
    return [storage, *(torch.from_numpy(p.grad.numpy().copy()) for p in model.parameters())]


def flushed(model, optimizer):
    if hasattr(optimizer, "_optfuse_link"):
        optfuse.flush()
    return gradients(model)


def a_checkpoint(model, optimizer):
    file = io.BytesIO()
    torch.save([{"model": model.state_dict()}, gradients(model)], file)
    file.seek(0)
    return torch.load(file)[1]


def a_thread(model, optimizer):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(model.head.weight.grad.clone()))
    thread.start()
    thread.join()
    return seen


def a_fork(model, optimizer):
    if os.fork() == 0:
        os._exit(int(any(not p.grad.isfinite().all() for p in model.parameters())))
    return os.wait()[1]


def zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    return gradients(model)


def zeros_before(model, optimizer):
    optimizer.zero_grad()
    return [p.grad is None for p in model.parameters()]


def sums_over_ranks(model, optimizer):
    """A collective of the script's own."""
    total = torch.stack([p.grad.sum() for p in model.parameters()])
    dist.all_reduce(total)
    return total


BOTH = {
    look.__name__: look for look in (gradients, norms, our_clipping, writing, raw_memory, flushed)
} | {
    "a_copy": lambda model, optimizer: gradients(copy.deepcopy(model)),
    "a_fork": a_fork,
    "zeros": zeros,
}
LOOKS = BOTH | {
    "one_number": lambda model, optimizer: model.head.weight.grad[0, 0].item(),
    "clipping": lambda model, optimizer: nn.utils.clip_grad_norm_(
        model.parameters(), 0.1, foreach=False
    ),
    "clipping_values": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "another_gradient": another_gradient,
    "data_of_a_gradient": lambda model, optimizer: [p.grad.data for p in model.parameters()],
    "a_checkpoint": a_checkpoint,
    "sums_over_ranks": sums_over_ranks,
    "nothing": lambda model, optimizer: None,
}
LEAVE_NOTHING = {"a_thread": a_thread, "zeros_before": zeros_before}  # to defer


# After step()


def an_evaluation(model, optimizer):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, 100)
    model.train()
    return loss


def overwritten(model, optimizer):
    with torch.no_grad():
        model.head.weight.copy_(torch.ones(3, 16))
        model.hidden.weight.mul_(0.5)


def loaded(model, optimizer):
    model.load_state_dict(snapshot(dict(model.state_dict())))
    optimizer.load_state_dict(optimizer.state_dict())


def compared_across_ranks(model, optimizer):
    for p in model.parameters():
        others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(others, p.detach())
        for other in others:
            assert_same("a parameter of another rank", other, p.detach())


def a_new_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1e-3})


AFTER = BOTH | {
    "parameters": lambda model, optimizer: list(model.parameters()),
    "one_parameter": lambda model, optimizer: model.conv.weight[0, 0, 0, 0].item(),
    "state": lambda model, optimizer: optimizer.state_dict(),
    "a_second_step": lambda model, optimizer: optimizer.step(),
    **{
        look.__name__: look
        for look in (an_evaluation, overwritten, loaded, compared_across_ranks, a_new_group)
    },
}
