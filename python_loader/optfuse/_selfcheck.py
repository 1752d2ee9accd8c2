# SPDX-License-Identifier: BSD-3-Clause
"""Before the first update on a GPU: do its kernels give the bits of stock's?

PyTorch's fused kernels round as its compiler happened to contract them for each
chip and release (docs/numerics.md), so equal bits are not assumed but looked
at, on this very GPU, once for each set of options, in a few small steps, the last
of them with clipped gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._clipping.clip_norm import clip_grad_norm_
from optfuse._gpu import is_gpu
from optfuse._library.bindings import Error

STEPS = 3
SIZES = (1, 7, 64, 1003, 8196, 9001)  # in fours and not; all threads of a block, several times
# Far above what other roundings of the same formula give, far below an error.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_LEFT_OUT = ("params", "param_names", "lr", "initial_lr", "fused", "foreach", "capturable")
_known: dict[tuple[Any, ...], bool] = {}  # whether the bits are equal
Fuse = Callable[[Optimizer], Optimizer]


def gpu_bits_differ(optimizer: Optimizer, fuse: Fuse) -> list[str]:
    """The kinds of parameters of this optimizer whose updates on a GPU have other
    bits than those of fused=True. Raises optfuse.Error if they are wrong."""
    differ = []
    for group in optimizer.param_groups:
        for dtype, device in {(p.dtype, p.device) for p in group["params"] if is_gpu(p.device)}:
            options = {k: v for k, v in group.items() if k not in _LEFT_OUT}
            key = (type(optimizer), dtype, device, repr(sorted(options.items())))
            if key not in _known:
                _known[key] = _compare(type(optimizer), options, dtype, device, fuse)
            if not _known[key]:
                differ.append(f"{str(dtype).removeprefix('torch.')} on {device}")
    return sorted(set(differ))


def _compare(
    stock: type[Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    fuse: Fuse,
) -> bool:
    theirs = _train(stock, options, dtype, device, lambda optimizer: optimizer)
    ours = _train(stock, options, dtype, device, fuse)
    worst = max(_distance(a, b) for a, b in zip(ours, theirs, strict=True))
    if not worst <= TOLERANCE[dtype]:
        raise Error(
            f"optfuse: on {device} the update of {stock.__name__} for {dtype} is off by a "
            f"relative {worst:.1e} from PyTorch's own with fused=True, far more than rounding; "
            "nothing was fused. Keep the optimizer as it is, and please report the GPU, the "
            f"driver and torch {torch.__version__}"
        )
    return worst == 0.0


def _train(
    stock: type[Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    wrap: Fuse,
) -> list[Tensor]:
    random = torch.Generator("cpu").manual_seed(0)

    def numbers(size: int) -> Tensor:  # wherever new tensors go by default
        return torch.randn(size, generator=random, device="cpu").to(device, dtype)

    params = [numbers(size).requires_grad_() for size in SIZES]
    optimizer = stock(params, lr=1e-2, fused=True)  # type: ignore[call-arg]
    optimizer.param_groups[0].update(options)
    optimizer = wrap(optimizer)
    for step in range(STEPS):
        for param in params:
            param.grad = numbers(param.numel())
        if step == STEPS - 1:
            clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    return [param.detach().cpu() for param in params]


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest relative difference; 0 only for equal numbers."""
    a, b = a.double(), b.double()
    worst = ((a - b).abs() / b.abs().clamp_min(1e-3)).max()
    return float(worst)
