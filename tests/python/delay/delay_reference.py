# SPDX-License-Identifier: BSD-3-Clause
"""Delayed training as an explicit loop over events, in plain torch: nothing of optfuse, no hooks,
every version of every weight kept."""

import torch
from torch import nn
from torch.func import functional_call


def is_product(module):
    return isinstance(module, nn.Linear | nn.Conv2d)


class Reference:
    """A sequence of layers, each with a delay. make: an optimizer of a list of parameters.
    weights: as in optfuse.fuse(). groups: of each layer, how many batches share an update.
    behind: of each layer, how many updates "latest" is behind the newest in dX. split: of layers
    whose dX has two parts, (where the input channels are cut, how many the second is behind)."""

    def __init__(self, layers, delays, make, weights="stash", groups=None, behind=None, split=None):
        self.layers, self.delays, self.weights = list(layers), list(delays), weights
        self.groups = groups or [1] * len(self.layers)
        self.behind = behind or [0] * len(self.layers)
        self.split = split or {}
        self.newest = [
            {name: p.detach().clone() for name, p in layer.named_parameters()} for layer in layers
        ]
        self.versions = [[self._copy(i)] for i in range(len(self.layers))]
        zeros = [{n: torch.zeros_like(p) for n, p in newest.items()} for newest in self.newest]
        self.moving = [[each] for each in zeros]  # after each update
        self.optimizers = []
        for newest in self.newest:
            leaves = [p.requires_grad_() for p in newest.values()]
            self.optimizers.append(make(leaves) if leaves else None)
        self.summed = [0] * len(self.layers)  # batches of the group that has not ended

    def _copy(self, i):
        return {name: p.detach().clone() for name, p in self.newest[i].items()}

    def _seen(self, i, late):
        groups = len(self.versions[i]) - 1
        return max(0, groups - late)

    def seen(self, i):
        """By the forward pass of this batch."""
        return self.versions[i][self._seen(i, self.delays[i])]

    def for_input_gradient(self, i, behind):
        """Weights of Linear and Conv2d by which dX of this batch is computed."""
        seen = self.seen(i)
        if self.weights == "stash":
            return seen
        late = self._seen(i, behind)
        changes = late - self._seen(i, self.delays[i])
        products = [n for n, m in self.layers[i].named_modules() if is_product(m)]
        found = dict(seen)
        for prefix in products:
            name = f"{prefix}.weight".lstrip(".")
            found[name] = self.versions[i][late][name]
            if self.weights == "average" and changes:
                moving = self.moving[i][late][name]
                found[name] = torch.sub(found[name], moving, alpha=changes)
        return found

    def step(self, x, target, loss_fn, before_update=lambda params: None):
        inputs = []
        for i, layer in enumerate(self.layers):
            inputs.append(x)
            with torch.no_grad():
                x = functional_call(layer, self.seen(i), (x.clone(),))  # with the layer's buffers
        out = x.detach().requires_grad_()
        loss = loss_fn(out, target)
        (g,) = torch.autograd.grad(loss, out)
        for i in reversed(range(len(self.layers))):
            g = self._backward(i, inputs[i], g)
        before_update([p for newest in self.newest for p in newest.values()])
        for i in range(len(self.layers)):
            self.summed[i] += 1
            if self.summed[i] == self.groups[i]:
                self._update(i)
        return loss.detach()

    def end_groups(self):
        """No batch of the groups so far comes any more."""
        for i in range(len(self.layers)):
            if self.summed[i]:
                self._update(i)

    def _again(self, i, version, x):
        """The forward pass once more, without a trace in buffers."""
        buffers = {name: b.clone() for name, b in self.layers[i].named_buffers()}
        return functional_call(self.layers[i], {**version, **buffers}, (x.clone(),))

    def _backward(self, i, x, g):
        """The gradients of the layer's weights are added up; returns that of its input."""
        seen = {name: p.detach().requires_grad_() for name, p in self.seen(i).items()}
        if seen:
            y = self._again(i, seen, x)
            gradients = torch.autograd.grad(y, list(seen.values()), g)
            for p, gradient in zip(self.newest[i].values(), gradients, strict=True):
                p.grad = gradient if p.grad is None else p.grad + gradient
        if i == 0:
            return None
        first = self._input_gradient(i, x, g, self.behind[i])
        if i not in self.split:
            return first
        channels, behind = self.split[i]
        axis = -3 if isinstance(self.layers[i], nn.Conv2d) else -1
        second = self._input_gradient(i, x, g, behind)
        sizes = [channels, x.shape[axis] - channels]
        return torch.cat([first.split(sizes, axis)[0], second.split(sizes, axis)[1]], axis)

    def _input_gradient(self, i, x, g, behind):
        leaf = x.detach().requires_grad_()
        y = self._again(i, self.for_input_gradient(i, behind), leaf)
        return torch.autograd.grad(y, leaf, g)[0]

    def _update(self, i):
        before, moving = self.versions[i][-1], self.moving[i][-1]
        if self.optimizers[i] is not None:
            self.optimizers[i].step()
        for p in self.newest[i].values():
            p.grad = None
        self.summed[i] = 0
        after = self._copy(i)
        window = max(1, min(len(self.versions[i]), self.delays[i]))
        beta = (window - 1) / (window + 1)
        self.versions[i].append(after)
        self.moving[i].append(
            {
                name: m.mul(beta).add_(after[name] - before[name], alpha=1 - beta)
                for name, m in moving.items()
            }
        )

    def shown(self):
        """The weights that the next forward pass sees, in the order of model.parameters()."""
        return [p for i in range(len(self.layers)) for p in self.seen(i).values()]

    def drained(self):
        return [p.detach() for newest in self.newest for p in newest.values()]
