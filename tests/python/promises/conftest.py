# SPDX-License-Identifier: BSD-3-Clause
import pytest


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Promises of layers of any size, at their first use."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")
