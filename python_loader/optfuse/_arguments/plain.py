# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that calls of the library may take in the place of PyTorch's operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from optfuse._library.bindings import lib_with_gil

_are_of = lib_with_gil.of_shim_are_of


def are_plain(tensors: list[Tensor]) -> bool:
    """Whether nobody but PyTorch's own operators would see what is done to them."""
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace
        return False
    return bool(_are_of(tensors, Tensor, Parameter))
