# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps that are compiled, beside stock's and ours: torch.compile over forward,
backward and step(), and JAX with optax on the same network, from the same weights. JAX is found
where --packages says: pip install --target DIR "jax[cpu]" optax."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from models import Block
from torch import Tensor, nn
from torch.optim import Optimizer

from optfuse_tools.ab.variants import Iteration, NoOptimizer, Wrap, with_flags

COMPILED, JAX = "compiled whole step", "JAX, jitted step"
ALIKE = 1e-3  # of the first loss: it is summed in another order
_threads: list[int] = []  # JAX's, once it runs


class Compiled(Optimizer):
    """Step and zero_grad() are stock's, foreach=True, which torch.compile traces best."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.stock = with_flags(optimizer, foreach=True, fused=None)


def compiled(iterate: Callable[[], Tensor]) -> Iteration:
    """The iteration, backward() included, as PyTorch compiles it. It must return a loss that is
    detached: a graph that went through backward() can't leave a compiled function."""
    torch._dynamo.reset()
    torch._dynamo.config.trace_autograd_ops = True
    return torch.compile(iterate)


def stock_of(optimizer: Optimizer) -> tuple[Optimizer, Callable[[Callable[[], Tensor]], Iteration]]:
    """The optimizer that an iteration calls, and the function that makes it whole."""
    if isinstance(optimizer, Compiled):
        return optimizer.stock, compiled
    return optimizer, lambda iterate: iterate


class Jitted(NoOptimizer):
    """Stands for an optimizer whose training runs in JAX; PyTorch's weights stay as they are."""


def jitted(
    optimizer: Jitted,
    model: nn.Module,
    loss_of: Callable[[Any], Any],
    first_loss: float,
    max_norm: float | None = None,
    decay: float | None = None,
) -> Iteration:
    """An iteration in JAX that returns its loss: loss_of(run), run(x) being the model. With
    max_norm gradients are clipped by their global norm; with decay an exponential average of the
    weights is kept. RuntimeError if the first loss is not the one that PyTorch has."""
    jax = started()
    import optax

    weights = {name: array(p) for name, p in model.named_parameters()}
    rule = rule_of(optax, optimizer)
    if max_norm is not None:
        rule = optax.chain(optax.clip_by_global_norm(max_norm), rule)

    def step(weights: Any, state: Any, average: Any) -> Any:
        def loss(weights: Any) -> Any:
            return loss_of(lambda x: applied(model, "", weights, x))

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, state = rule.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        if decay is not None:
            average = jax.tree.map(lambda a, w: a + (1 - decay) * (w - a), average, weights)
        return (weights, state, average), value

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    average = jax.tree.map(lambda w: w.copy(), weights) if decay is not None else None
    carried, found = step(weights, rule.init(weights), average)
    if not math.isclose(float(found), first_loss, rel_tol=ALIKE):
        raise RuntimeError(f"JAX's first loss is {float(found)}, PyTorch's {first_loss}")

    def iterate() -> float:
        nonlocal carried
        carried, loss = step(*carried)
        return float(loss)

    return iterate


def started() -> Any:
    """The module jax, whose threads are as many as PyTorch has now: it makes them once."""
    import jax

    if not _threads:
        may_use = os.sched_getaffinity(0)
        wanted = torch.get_num_threads()
        os.sched_setaffinity(0, sorted(may_use)[:wanted])
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        # Its own threads for each call cost more than these calls take.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.devices()
        os.sched_setaffinity(0, may_use)
        _threads.append(wanted)
    return jax


def array(tensor: Tensor) -> Any:
    return started().numpy.array(tensor.detach().numpy())


def rule_of(optax: Any, optimizer: Optimizer) -> Any:
    """The optimizer of optax with the options of the first group of AdamW, Adam or SGD."""
    options = optimizer.param_groups[0]
    if "betas" not in options:
        return optax.sgd(options["lr"], options["momentum"] or None)
    (b1, b2), decay = options["betas"], options["weight_decay"]
    return optax.adamw(options["lr"], b1, b2, options["eps"], weight_decay=decay)


def applied(module: nn.Module, prefix: str, weights: Mapping[str, Any], x: Any) -> Any:
    """The module in JAX, for the modules that the benchmark's stacks and blocks are made of."""
    jax = started()
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            x = applied(child, f"{prefix}{name}.", weights, x)
        return x
    if isinstance(module, nn.Linear):
        return x @ weights[prefix + "weight"].T + weights[prefix + "bias"]
    if isinstance(module, nn.LayerNorm):
        centred = x - x.mean(-1, keepdims=True)
        spread = jax.numpy.sqrt((centred * centred).mean(-1, keepdims=True) + module.eps)
        return centred / spread * weights[prefix + "weight"] + weights[prefix + "bias"]
    if isinstance(module, Block):
        return block(module, prefix, weights, x)
    activations = {
        nn.Tanh: jax.numpy.tanh,
        nn.ReLU: jax.nn.relu,
        nn.GELU: lambda x: jax.nn.gelu(x, approximate=False),
    }
    return activations[type(module)](x)


def block(module: Block, prefix: str, weights: Mapping[str, Any], x: Any) -> Any:
    def part(name: str, x: Any) -> Any:
        return applied(getattr(module, name), f"{prefix}{name}.", weights, x)

    batch, length, width = x.shape
    qkv = part("qkv", part("norm1", x)).reshape(batch, length, 3, module.heads, -1)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    y = started().nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + part("out", y.reshape(batch, length, width))
    return x + part("feed", part("norm2", x))


def peers(compiles: bool) -> Mapping[str, Wrap]:
    """Those that can run here; JAX on as many threads as it began with."""
    found: dict[str, Wrap] = {COMPILED: Compiled} if compiles else {}
    both = all(importlib.util.find_spec(name) for name in ("jax", "optax"))
    if both and _threads in ([], [torch.get_num_threads()]):
        found[JAX] = Jitted
    return found
