# SPDX-License-Identifier: BSD-3-Clause
"""Shapes and dtypes of what goes from layer to layer, without computing it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from optfuse._library.bindings import Error


class Spec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def spec_of(tensor: Tensor) -> Spec:
    return Spec(tensor.shape, tensor.dtype)


def infer(module: nn.Sequential, first: Spec) -> list[Spec]:
    """Shapes of each layer's input, and of the last one's output. Runs the layers on the meta
    device, so each process finds the same without a message. Raises optfuse.Error where a layer
    can't run there, or does not give one tensor."""
    found = [first]
    for number, layer in enumerate(module):
        x = torch.empty(found[-1].shape, dtype=found[-1].dtype, device="meta")
        try:
            with torch.no_grad():
                y = functional_call(layer, _on_meta(layer), (x,))
        except Exception as error:
            raise Error(
                f"optfuse: Pipeline can't find the shape that layer {number} "
                f"({type(layer).__name__}) makes of {tuple(x.shape)}: {error}; it has to run on "
                "tensors of the meta device, so its shapes may not depend on values"
            ) from error
        if not isinstance(y, Tensor):
            raise Error(
                f"optfuse: layer {number} ({type(layer).__name__}) of a pipeline returns a "
                f"{type(y).__name__}; make it return one tensor"
            )
        found.append(spec_of(y))
    return found


def _on_meta(layer: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}
