# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in tests are small, and clipping multiplies small ones at once. For folders whose tests
are mostly about those that wait: their conftest.py imports these fixtures."""

import pytest

from optfuse._library.bindings import lib

ALWAYS = 0


@pytest.fixture(autouse=True)
def small_gradients_wait():
    usual = lib.of_shim_wait_from(ALWAYS)
    yield usual
    lib.of_shim_wait_from(usual)


@pytest.fixture
def small_gradients_go_at_once(small_gradients_wait):
    lib.of_shim_wait_from(small_gradients_wait)
