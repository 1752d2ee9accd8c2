# SPDX-License-Identifier: BSD-3-Clause
"""Delayed training as an explicit loop over events, in plain torch: nothing of optfuse, no hooks,
every version of every weight kept."""

import torch
from torch import nn
from torch.func import functional_call


class Reference:
    """A sequence of layers, each with a delay. make: an optimizer of a list of parameters.
    weights: as in optfuse.fuse()."""

    def __init__(self, layers, delays, make, weights="stash"):
        self.layers, self.delays, self.weights = list(layers), list(delays), weights
        self.newest = [
            {name: p.detach().clone() for name, p in layer.named_parameters()} for layer in layers
        ]
        self.versions = [[self._copy(i)] for i in range(len(self.layers))]
        self.moving = [
            {name: torch.zeros_like(p) for name, p in newest.items()} for newest in self.newest
        ]
        leaves = [p.requires_grad_() for newest in self.newest for p in newest.values()]
        self.optimizer = make(leaves)
        self.batch = 0

    def _copy(self, i):
        return {name: p.detach().clone() for name, p in self.newest[i].items()}

    def seen(self, i):
        """By the forward pass of this batch."""
        return self.versions[i][max(0, self.batch - self.delays[i])]

    def for_input_gradient(self, i):
        seen, newest = self.seen(i), self.versions[i][-1]
        if self.weights == "stash" or not isinstance(self.layers[i], nn.Linear | nn.Conv2d):
            return seen
        weight = newest["weight"]
        if self.weights == "average" and self.delays[i]:
            updates = min(self.batch, self.delays[i])
            weight = torch.sub(weight, self.moving[i]["weight"], alpha=updates)
        return {**seen, "weight": weight}

    def step(self, x, target, loss_fn, before_update=lambda params: None):
        inputs = []
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                inputs.append(x)
                x = functional_call(layer, self.seen(i), (x,))
        out = x.detach().requires_grad_()
        loss = loss_fn(out, target)
        (g,) = torch.autograd.grad(loss, out)
        for i in reversed(range(len(self.layers))):
            g = self._backward(i, inputs[i], g)
        before_update([p for newest in self.newest for p in newest.values()])
        self.optimizer.step()
        self._keep()
        return loss.detach()

    def _backward(self, i, x, g):
        """The gradients of the layer's weights, and of its input."""
        seen = {name: p.detach().requires_grad_() for name, p in self.seen(i).items()}
        if seen:
            y = functional_call(self.layers[i], seen, (x,))
            gradients = torch.autograd.grad(y, list(seen.values()), g)
            for p, gradient in zip(self.newest[i].values(), gradients, strict=True):
                p.grad = gradient
        if i == 0:
            return None
        leaf = x.detach().requires_grad_()
        y = functional_call(self.layers[i], self.for_input_gradient(i), (leaf,))
        return torch.autograd.grad(y, leaf, g)[0]

    def _keep(self):
        self.batch += 1
        for i, versions in enumerate(self.versions):
            before = versions[-1]
            versions.append(self._copy(i))
            for name, change in self.moving[i].items():
                window = max(1, min(self.batch, self.delays[i]))
                beta = (window - 1) / (window + 1)
                change.mul_(beta).add_(versions[-1][name] - before[name], alpha=1 - beta)

    def shown(self):
        """The weights that the next forward pass sees, in the order of model.parameters()."""
        return [p for i in range(len(self.layers)) for p in self.seen(i).values()]

    def drained(self):
        return [p.detach() for newest in self.newest for p in newest.values()]
