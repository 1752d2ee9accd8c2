# SPDX-License-Identifier: BSD-3-Clause
"""Copies of options, attributes and state for trials, and comparisons of their bits."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from optfuse._trials.compare import deep_copy, same_bits


def test_a_copy_shares_nothing_that_can_be_written_into() -> None:
    value: dict[Any, Any] = {"list": [1, {"a": (1.0, [2])}], "ordered": OrderedDict(b=[3])}
    made = deep_copy(value, "it")
    assert made == value and type(made["ordered"]) is OrderedDict
    value["list"][1]["a"][1].append(4)
    value["ordered"]["b"].append(5)
    assert made == {"list": [1, {"a": (1.0, [2])}], "ordered": OrderedDict(b=[3])}


def test_a_copy_has_one_object_for_one_object() -> None:
    shared: list[Any] = [torch.zeros(2)]
    shared.append(shared)
    pair = (shared, 1)
    made = deep_copy({"a": shared, "b": pair, "c": pair, 0: shared[0]}, "it")
    assert made["a"][1] is made["a"] is made["b"][0] is not shared
    assert made["b"] is made["c"]
    assert made["a"][0] is made[0] is not shared[0]


def test_a_copy_keeps_what_is_said_to_be_shared() -> None:
    kept = [1]
    made = deep_copy(({"a": kept}, [kept]), "it", {id(kept): kept})
    assert made[0]["a"] is made[1][0] is kept


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
