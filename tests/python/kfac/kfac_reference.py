# SPDX-License-Identifier: BSD-3-Clause
"""K-FAC in plain torch, the second opinion on optfuse.kfac(): one process, module hooks, whole
matrices, float64 inside, and no care for speed.

With g the gradient of the mean loss over the batch, a Linear of N rows has A = X'X / N and
G = N sum g g'. A Conv2d of B images and S positions with patches P has A = P'P / B and
G = (B / S) sum g g'. These are the formulas of SPD-KFAC (arXiv 2107.06533) and of KFC (arXiv
1602.01407) for the gradient of a mean. A bias is one more column of A, the last."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Layer:
    """A weight, and what its uses have contributed since the last step."""

    name: str
    weight: Tensor
    bias: Tensor | None  # None, too, if it needs no gradient
    A: Tensor
    G: Tensor
    uses: list[tuple[float, Tensor, Tensor]] = field(default_factory=list)  # count, X'X, g g'
    damped: tuple[Tensor, Tensor] | None = None  # A and G as they are inverted

    def parameters(self):
        return [p for p in (self.weight, self.bias) if p is not None]

    def gradient(self):
        """(outputs, inputs [+ 1])."""
        columns = [p.grad.reshape(len(self.weight), -1) for p in self.parameters()]
        return torch.cat(columns, 1).double()


class Reference:
    """The options are those of optfuse.kfac(). step() preconditions the gradients and calls
    the optimizer's step()."""

    def __init__(
        self,
        model,
        optimizer,
        damping=1e-3,
        decay=0.95,
        kl_clip=1e-3,
        factors_every=10,
        inverses_every=100,
        skip=(),
        split=None,
        missing="error",
    ):
        self.optimizer, self.decay, self.kl_clip = optimizer, decay, kl_clip
        self.damping, self.split, self.missing = damping, split, missing
        self.factors_every, self.inverses_every = factors_every, inverses_every
        self.t = 0
        self.layers = {}  # by the weight's id: tied modules are one layer
        self.names = {}
        self.clips = []  # nu of each step
        places = [p for m in model.modules() for p in m._parameters.values() if p is not None]
        uses = Counter(map(id, places))
        for name, module in model.named_modules():
            if name not in skip:
                self._watch(name, module, uses)

    def factors(self, name):
        """(A, G): the running ones, without damping."""
        layer = self.names[name]
        return layer.A, layer.G

    def step(self):
        self.precondition()
        self.optimizer.step()

    def discard(self):
        for layer in self.layers.values():
            layer.uses.clear()

    def precondition(self):
        left = set()  # layers whose gradients stay as they are in this step
        if self.t % at(self.factors_every, self.t) == 0:
            for layer in self.layers.values():
                if layer.uses:
                    self._merge(layer)
                elif self.missing == "skip":
                    left.add(layer.name)
                else:
                    raise RuntimeError(f"layer {layer.name!r} has contributed nothing")
        self.discard()
        layers = [layer for layer in self.layers.values() if layer.name not in left]
        layers = [layer for layer in layers if layer.weight.grad is not None]
        if self.t % at(self.inverses_every, self.t) == 0:
            damping = at(self.damping, self.t)
            for layer in self.layers.values():
                layer.damped = damped(layer.A, layer.G, damping, self.split)
        self._replace_gradients(layers)
        self.t += 1

    def _watch(self, name, module, uses):
        if isinstance(module, nn.MultiheadAttention):
            self._watch_attention(name, module)
        elif type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1):
            if uses[id(module.weight)] > 1 and not self._only_tied(module, uses):
                raise ValueError(f"{name}: tied in a way this reference does not know")
            layer = self._layer(name, module.weight, module.bias)
            if layer is None:
                return
            inputs = []
            module.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()))
            module.register_forward_hook(lambda m, args, y: tapped(layer, m, inputs.pop(), y))

    def _only_tied(self, module, uses):
        """Whether all that has the weight has the bias, too."""
        return module.bias is None or uses[id(module.bias)] == uses[id(module.weight)]

    def _watch_attention(self, name, mha):
        """Self attention without masks or dropout, computed here in place of the module's."""
        into = self._layer(
            f"{name}.in_proj_weight".lstrip("."), mha.in_proj_weight, mha.in_proj_bias
        )
        out = self._layer(f"{name}.out_proj".lstrip("."), mha.out_proj.weight, mha.out_proj.bias)

        def forward(query, key, value, need_weights=False):
            assert query is key is value and not need_weights and mha.dropout == 0.0
            x = query if mha.batch_first else query.transpose(0, 1)
            y = nn.functional.linear(x, mha.in_proj_weight, mha.in_proj_bias)
            y = tapped(into, mha, x.detach(), y)
            heads = y.unflatten(-1, (3, mha.num_heads, -1)).permute(2, 0, 3, 1, 4)
            z = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            y = nn.functional.linear(z, mha.out_proj.weight, mha.out_proj.bias)
            y = tapped(out, mha.out_proj, z.detach(), y)
            return y if mha.batch_first else y.transpose(0, 1), None

        mha.forward = forward

    def _layer(self, name, weight, bias):
        if not weight.requires_grad:
            return None
        if id(weight) not in self.layers:
            bias = bias if bias is not None and bias.requires_grad else None
            inputs = weight[0].numel() + (bias is not None)
            eyes = (identity(n, weight) for n in (inputs, len(weight)))
            self.layers[id(weight)] = Layer(name, weight, bias, *eyes)
        self.names[name] = self.layers[id(weight)]
        return self.layers[id(weight)]

    def _merge(self, layer):
        n = sum(count for count, _, _ in layer.uses)
        new_a = sum(a for _, a, _ in layer.uses) / n
        new_g = sum(g for _, _, g in layer.uses) * n
        layer.A = self.decay * layer.A + (1 - self.decay) * new_a
        layer.G = self.decay * layer.G + (1 - self.decay) * new_g

    def _replace_gradients(self, layers):
        rates = {
            id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]
        }
        found, total = [], 0.0
        for layer in layers:
            a, g = layer.damped
            dw = layer.gradient()
            v = torch.linalg.solve(a, torch.linalg.solve(g, dw).T).T
            inputs = layer.weight[0].numel()
            lr = torch.full_like(v, float(rates[id(layer.weight)]))
            if layer.bias is not None:
                lr[:, inputs:] = float(rates[id(layer.bias)])
            total += float((lr**2 * v * dw).sum())
            found.append((layer, v, inputs))
        clips = self.kl_clip is not None and total != 0.0
        nu = min(1.0, (self.kl_clip / abs(total)) ** 0.5) if clips else 1.0
        self.clips.append(nu)
        for layer, v, inputs in found:
            layer.weight.grad.copy_((nu * v[:, :inputs]).view_as(layer.weight))
            if layer.bias is not None:
                layer.bias.grad.copy_(nu * v[:, inputs])


def at(value, step):
    return value(step) if callable(value) else value


def damped(a, g, damping, split):
    """The damped factors: the same damping for both, or the factored Tikhonov split."""
    of_a = of_g = damping
    if split == "pi":
        pi = ((a.trace() / len(a)) / (g.trace() / len(g))) ** 0.5
        of_a, of_g = pi * damping**0.5, damping**0.5 / pi
    return a + of_a * identity(len(a), a), g + of_g * identity(len(g), g)


def identity(n, like):
    return torch.eye(n, dtype=torch.float64, device=like.device)


def tapped(layer, module, x, y):
    """y, whose gradient will be seen once; a copy, so that what changes y in place, or a view
    of it, can't displace the hook."""
    if not y.requires_grad:
        return y
    if torch.is_autocast_enabled("cpu") and x.dtype == torch.float32:
        x = x.to(torch.get_autocast_dtype("cpu"))
    x = x.clone()  # it may be changed in place, too
    y.register_hook(lambda g: layer.uses.append(statistics(layer, module, x, g.detach())))
    return y.clone()


def statistics(layer, module, x, g):
    """The statistics of one use: how many rows or images, X'X and sum g g' (of a Conv2d: divided by
    S)."""
    x, g = (t.float() if t.dtype in HALF else t for t in (x, g))
    x, g = x.double(), g.double()
    positions = 1
    if isinstance(module, nn.Conv2d):
        x, g = rows_of_conv(module, x, g)
        positions = x.shape[1]
        count = x.shape[0]
    else:
        count = x.numel() // x.shape[-1]
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if layer.bias is not None:
        x = torch.cat([x, torch.ones(len(x), 1).to(x)], 1)
    return count, x.T @ x, g.T @ g / positions


def rows_of_conv(conv, x, g):
    """Patches, in the order of weight.view(outputs, -1), and gradients, a row for each position:
    (images, positions, ...)."""
    if x.dim() == 3:
        x, g = x[None], g[None]
    padding = conv.padding
    if conv.padding_mode != "zeros":
        edges = conv._reversed_padding_repeated_twice
        x, padding = nn.functional.pad(x, edges, mode=conv.padding_mode), 0
    patches = nn.functional.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)
    return patches.transpose(1, 2), g.flatten(2).transpose(1, 2)
