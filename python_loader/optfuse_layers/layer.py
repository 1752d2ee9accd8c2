# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a model whose weight gradients can be tasks of their own: those whose weights
get to aten::linear and aten::conv2d."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin

from optfuse._library.bindings import Error

_IN_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Layer:
    name: str  # of the module, with the weight's if it has several
    module: weakref.ref[nn.Module]
    attribute: str  # of the module
    weight: Tensor
    fixed: str  # why its dW never waits; "": it may
    is_shared: bool  # its weight, with another kind of layer


def own_weight(module: nn.Module, attribute: str) -> Tensor | None:
    """The parameter of that name. None: something makes the weight anew for each forward pass (a
    parametrization, weight_norm(), pruning), and a look at the attribute could run it, which
    moves the buffers of spectral_norm()."""
    return module._parameters.get(attribute)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for attribute in _IN_PROJECTIONS:
                yield f"{name}.{attribute}".lstrip("."), module, attribute
        elif isinstance(module, nn.Linear) or (
            isinstance(module, nn.Conv2d) and not isinstance(module.padding, str)
        ):
            yield name, module, "weight"


def _uses(model: nn.Module) -> Counter[int]:
    """How many places of modules each parameter has."""
    places = (p for m in model.modules() for p in m._parameters.values() if p is not None)
    return Counter(map(id, places))


def _why_fixed(is_shared: bool, bias: Tensor | None, uses: Counter[int]) -> str:
    """Stock adds the gradients of a parameter up in the order in which they come."""
    if is_shared:
        return "its weight is used by another kind of layer, too"
    if bias is not None and uses[id(bias)] > 1:
        return "its bias is used by another layer, too"
    return ""


def is_in(name: str, skip: frozenset[str]) -> bool:
    """Whether a layer is one of these, or in a module that is."""
    return any(name == other or name.startswith(f"{other}.") for other in skip)


def check_skip(model: nn.Module, skip: frozenset[str], by: str) -> None:
    """Raises optfuse.Error for what skips nothing."""
    layers = [name for name, _, _ in _candidates(model)]
    own = [name for name, module in model.named_modules() if module._parameters]
    for other in skip:
        if not any(is_in(name, frozenset([other])) for name in (*layers, *own)):
            raise Error(
                f"optfuse: {by} got {other!r} in skip=, which is no module with parameters; the "
                f"layers are {', '.join(layers)}"
            )


def layers_of(model: nn.Module, skip: frozenset[str], by: str) -> list[Layer]:
    """In the order of the model's modules; one for each weight. Raises optfuse.Error, in the name
    of the function `by`, for a model that FSDP2 or tensor parallelism shards, or has no
    parameters yet."""
    found: list[Layer] = []
    known, uses = set(), _uses(model)
    candidates = [c for c in _candidates(model) if not is_in(c[0], skip)]
    ways = Counter(id(own_weight(m, a)) for _, m, a in candidates)
    for name, module, attribute in candidates:
        weight = own_weight(module, attribute)
        if weight is None or id(weight) in known or not weight.requires_grad:
            continue  # made by something else, known, or frozen
        if isinstance(weight, UninitializedTensorMixin):
            raise Error(f"optfuse: layer {name!r} has no weight yet; run the model once first")
        if isinstance(weight, DTensor):
            raise Error(
                f"optfuse: the weight of layer {name!r} is a DTensor, and fully_shard and tensor "
                f"parallelism compute with other tensors; {by} works on one process and "
                "under DistributedDataParallel"
            )
        known.add(id(weight))
        bias = module._parameters.get("bias" if attribute == "weight" else "in_proj_bias")
        is_shared = uses[id(weight)] > ways[id(weight)]
        fixed = _why_fixed(is_shared, bias, uses)
        found.append(Layer(name, weakref.ref(module), attribute, weight, fixed, is_shared))
    return found


def check_weights(layers: Iterable[Any], since: str) -> None:
    """since: when they were looked at, and what to do."""
    for layer in layers:
        module = layer.module()
        if module and module._parameters.get(layer.attribute) is not layer.weight:
            raise Error(f"optfuse: layer {layer.name!r} has got another weight since {since}")
