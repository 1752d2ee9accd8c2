# SPDX-License-Identifier: BSD-3-Clause
"""Stock optimizers as the reference, made right where stock is wrong.

PyTorch's fused CPU kernels go through memory as if parameter, gradient and
state all lay there in the same order without holes. Where they don't, stock
mixes elements up or writes past the end. So such tensors are laid out densely
for the time of a stock step(), by hooks around it.

Stock's fused SGD fails with a TypeError where some parameters have a momentum
buffer and others not yet. There each is updated by itself, and the state is put into
the order that step() gives it.

They also leave the version counters of parameters as they are, so that autograd
does not notice a backward through weights which have changed since. It does with
stock's other implementations and with optfuse.

GradScaler hands its scale to stock's fused kernels, which leave the gradients
of a skipped step scaled; stock's other implementations unscale them before, and
so does optfuse. The reference is made to do that too."""

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense

OPTIM = torch.optim
FUSED = (OPTIM.SGD, OPTIM.Adam, OPTIM.AdamW, OPTIM.Adagrad)  # where fused=True is the reference


class Dense:
    """On a stock optimizer until taken off."""

    def __init__(self, optimizer, max_norm=None):
        self.optimizer = optimizer
        self.max_norm = max_norm  # as Forward(max_grad_norm=)
        self.is_fused = type(optimizer) in FUSED  # other classes are their own reference
        self.updated = []
        self.known = set()  # parameters that had state
        self.swapped = []  # (tensor to write back to, what took its place, how to put it back)
        self.before_step = optimizer.register_step_pre_hook(self.before)
        self.after_step = optimizer.register_step_post_hook(self.after)

    def last(self):
        """After the hooks that were registered later, which change gradients."""
        self.before_step.remove()
        self.before_step = self.optimizer.register_step_pre_hook(self.before)

    def before(self, optimizer, args, kwargs):
        closure = (*args[1:], *kwargs.values(), None)[0]
        if closure is None:
            self.prepare()
            return None

        def evaluate():
            loss = closure()
            self.prepare()
            return loss

        return (args[:1], {"closure": evaluate})

    def prepare(self):
        groups = self.optimizer.param_groups
        self.updated = [p for group in groups for p in group["params"] if p.grad is not None]
        if self.max_norm is not None:
            # PyTorch's foreach operators can't write to negated gradients.
            negated = any(p.grad.is_neg() for p in self.updated)
            foreach = False if negated else None
            torch.nn.utils.clip_grad_norm_(self.updated, self.max_norm, foreach=foreach)
        if not self.is_fused:
            return
        self.swapped.extend(map(made_fused, groups))
        self.swapped.extend(lay_out(self.optimizer))
        if isinstance(self.optimizer, torch.optim.SGD):
            self.known = set(self.optimizer.state)
            for group in groups:
                self.swapped.extend(one_by_one(self.optimizer, group))

    def after(self, *_):
        self.put_back()
        for p in self.updated if self.is_fused else ():
            torch.autograd.graph.increment_version(p)
        if self.is_fused and isinstance(self.optimizer, torch.optim.SGD):
            state = self.optimizer.state
            for p in self.updated:
                if p in state and p not in self.known:
                    state[p] = state.pop(p)
        self.updated = []

    @torch.no_grad()
    def put_back(self):
        while self.swapped:
            old, dense, restore = self.swapped.pop()
            if dense is not None and torch._debug_has_internal_overlap(old) != 1:
                old.copy_(dense)
            restore(old)

    def take_off(self):
        self.before_step.remove()
        self.after_step.remove()


def made_fused(group):
    """It may have been made with foreach=True."""
    was = {name: group[name] for name in ("fused", "foreach")}
    group.update(fused=True, foreach=None)
    return group, None, lambda g: g.update(was)


def lay_out(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None or p.grad.layout != torch.strided:
                continue
            entry = optimizer.state.get(p, {})
            state = {k: v for k, v in entry.items() if k != "step" and torch.is_tensor(v)}
            if not is_dense(p) or not all(v.stride() == p.stride() for v in state.values()):
                yield from take_all(p, entry, state)
            elif p.grad.stride() != p.stride() or p.grad.is_neg():
                yield take_gradient(p, torch.empty_strided(p.shape, p.stride(), dtype=p.dtype))


def take_all(p, entry, state):
    for key, value in state.items():
        dense = value.clone(memory_format=torch.contiguous_format)
        entry[key] = dense
        yield value, dense, lambda v, key=key: entry.__setitem__(key, v)
    yield take_gradient(p, torch.empty(p.shape, dtype=p.dtype))
    old = p.data
    p.data = old.clone(memory_format=torch.contiguous_format)
    yield old, p.data, lambda v: setattr(p, "data", v)


def take_gradient(p, dense):
    old = p.grad
    p.grad = dense.copy_(old.detach())
    return old, None, lambda v: setattr(p, "grad", v)


@torch.no_grad()
def one_by_one(sgd, group):
    """Where some parameters have a momentum buffer and others not."""
    used = [p for p in group["params"] if p.grad is not None]
    buffers = [sgd.state.get(p, {}).get("momentum_buffer") for p in used]
    if group["momentum"] == 0 or all(b is None for b in buffers) or None not in buffers:
        return
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    options = {name: group[name] for name in names}
    for p, buffer in zip(used, buffers, strict=True):
        first = buffer is None
        if first:
            buffer = sgd.state[p]["momentum_buffer"] = torch.empty_like(p)
        torch._fused_sgd_([p], [p.grad], [buffer], is_first_step=first, **options)
        grad, p.grad = p.grad, None
        yield grad, None, lambda v, p=p: setattr(p, "grad", v)
