# SPDX-License-Identifier: BSD-3-Clause
"""Inverses of factors that rounding has spoilt, and what is sent between processes."""

import pytest
import torch
from common import refused
from kfac_cases import conv_net, mlp, sgd

import optfuse
from optfuse_layers.kfac.inverses import Factor, inverse


def packed(matrix):
    return torch.ops.optfuse.pack_factor(matrix)


def test_packing_keeps_the_upper_triangle_by_rows():
    matrix = torch.arange(9.0).view(3, 3)
    assert packed(matrix).tolist() == [0, 1, 2, 4, 5, 8]
    whole = torch.ops.optfuse.unpack_factor(packed(matrix), 3, 10.0)
    assert whole.tolist() == [[10, 1, 2], [1, 14, 5], [2, 5, 18]]


@pytest.mark.parametrize("size", (1, 5, 40))
def test_an_inverse_is_that_of_the_damped_factor(size):
    x = torch.randn(3 * size, size, dtype=torch.float64)
    found = inverse(Factor("A", packed(x.T @ x), size, 0.5))
    wanted = torch.linalg.inv(x.T @ x + 0.5 * torch.eye(size, dtype=torch.float64))
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-12


def test_eigenvalues_below_the_damping_are_raised_to_it():
    q, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    values = torch.tensor([3.0, 1.0, 1e-5, -2.0], dtype=torch.float64)
    found = inverse(Factor("A", packed(q @ torch.diag(values) @ q.T), 4, 0.1))
    wanted = q @ torch.diag(1 / torch.tensor([3.1, 1.1, 0.10001, 0.1]).double()) @ q.T
    assert (found - wanted).abs().max().item() < 1e-6


def test_a_factor_that_is_not_finite_is_named():
    matrix = torch.eye(3)
    matrix[0, 1] = torch.nan
    refused(
        lambda: inverse(Factor("G of layer 'head'", packed(matrix), 3, 0.1)),
        "G of layer 'head'",
        way_out="checkpoint",
    )


@pytest.mark.parametrize("build", (mlp, conv_net))
def test_a_collection_is_all_upper_triangles_and_nothing_else(build):
    """Sizes of messages: d (d + 1) / 2 elements a factor, beside four numbers a layer."""
    model = build()
    kfac = optfuse.kfac(model, sgd(model.parameters()))
    sizes = [d for both in kfac.summary().preconditioned.values() for d in both]
    sums = torch.ops.optfuse.sums_of_factors(kfac._factors.handle)
    assert sums.numel() == sum(d * (d + 1) // 2 for d in sizes)
    assert kfac.summary().factor_bytes == 2 * sums.nbytes
    kfac.remove()
