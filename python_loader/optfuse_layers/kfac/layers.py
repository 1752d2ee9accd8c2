# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a model that have Kronecker factors, and why others have none."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from optfuse_layers.layer import Layer, is_in, layers_of

#: The two factors of a weight's inverse Fisher block, in the order of their slots.
FACTORS = ("A", "G")


@dataclass(frozen=True)
class Preconditioned:
    """A layer whose gradient is multiplied by the inverses of its factors."""

    name: str
    module: weakref.ref[nn.Module]
    attribute: str  # of the module
    weight: Tensor
    bias: Tensor | None  # the last column of the layer's matrix; None: has none that is trained
    inputs: int  # of the matrix, without the bias
    outputs: int

    @property
    def sizes(self) -> tuple[int, int]:
        """d of A and of G, which are d x d."""
        return self.inputs + (self.bias is not None), self.outputs

    def parameters(self) -> list[Tensor]:
        return [p for p in (self.weight, self.bias) if p is not None]


def _bias_of(layer: Layer) -> Tensor | None:
    module = layer.module()
    assert module is not None
    if layer.attribute == "weight":
        return module._parameters.get("bias")
    # Separate projections get a part of MultiheadAttention's bias, which is left alone.
    return module._parameters.get("in_proj_bias") if layer.attribute == "in_proj_weight" else None


def _why_not(model: nn.Module, layer: Layer, bias: Tensor | None) -> str:
    if layer.is_shared:
        return "its weight is used by another kind of layer, too"
    for module in model.modules() if bias is not None else ():
        own = list(map(id, module._parameters.values()))
        if id(bias) in own and id(layer.weight) not in own:
            return "its bias is used by another layer, too"
    module = layer.module()
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"Conv2d with groups={module.groups}"
    return ""


def _others(model: nn.Module, known: set[int], skip: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Modules with parameters of their own that no layer has."""
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if not own or all(id(p) in known for p in own):
            continue
        if is_in(name, skip):
            yield name, "in skip="
        elif not any(p.requires_grad for p in own):
            yield name, "frozen"
        elif isinstance(module, nn.MultiheadAttention) and any(id(p) in known for p in own):
            yield name, "the bias of separate projections"
        elif isinstance(module, nn.Conv2d) and isinstance(module.padding, str):
            yield name, f"Conv2d with padding={module.padding!r}"
        else:
            yield name, type(module).__name__


def sorted_layers(
    model: nn.Module, skip: frozenset[str]
) -> tuple[list[Preconditioned], dict[str, str]]:
    """The layers that are preconditioned, in the order of the modules, and of all others why not.
    Raises optfuse.Error as layers_of() does."""
    found: list[Preconditioned] = []
    reasons: dict[str, str] = {}
    known: set[int] = set()
    for layer in layers_of(model, skip, "kfac()"):
        bias = _bias_of(layer)
        trained = bias if bias is not None and bias.requires_grad else None
        known |= {id(p) for p in (layer.weight, bias) if p is not None}
        reason = _why_not(model, layer, bias)
        if reason:
            reasons[layer.name] = reason
            continue
        outputs = layer.weight.shape[0]
        inputs = layer.weight.numel() // outputs
        found.append(
            Preconditioned(
                layer.name, layer.module, layer.attribute, layer.weight, trained, inputs, outputs
            )
        )
    reasons.update(_others(model, known, skip))
    return found, reasons
