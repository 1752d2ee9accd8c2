# SPDX-License-Identifier: BSD-3-Clause
"""Comparisons of bits."""

from __future__ import annotations

import pytest
import torch

from optfuse._bits import same_bits


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_bits(dtype: torch.dtype) -> None:
    a = torch.tensor([[1.0, 0.0, float("nan")], [2.0, -0.0, float("inf")]]).to(dtype)
    assert (
        same_bits(a, a.clone()) and same_bits(a.T, a.T.contiguous()) and same_bits(a[0, 0], a[0, 0])
    )
    zero, other = a.clone(), a.clone()
    zero[1, 1], other[0, 2] = 0.0, 1.0
    assert not same_bits(a, zero) and not same_bits(a, other) and not same_bits(other, a)
    assert not same_bits(a, a.T) and not same_bits(a, a.to(torch.complex128))


def test_any_nan_equals_any_nan() -> None:
    quiet, signed = (torch.tensor([n], dtype=torch.int32) for n in (0x7FC00000, -0x400001 + 1))
    a, b = quiet.view(torch.float32), signed.view(torch.float32)
    assert a.isnan() and b.isnan() and same_bits(a, b)
    assert not same_bits(quiet, signed)
