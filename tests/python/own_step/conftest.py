# SPDX-License-Identifier: BSD-3-Clause
import pytest


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch):
    """fuse() takes the road that is tested here in forward mode, too."""
    monkeypatch.setenv("OPTFUSE_RECORDED", "0")
