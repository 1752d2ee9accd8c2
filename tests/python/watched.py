# SPDX-License-Identifier: BSD-3-Clause
"""Who updates: a fixture for the tests here and of tests/device."""

import pytest


@pytest.fixture
def python_updates(monkeypatch):
    """The slots that the class's own step() has updated; clear() it after fuse()."""
    from optfuse._own_step import (
        updates,  # here, for the conftests first say what stands in for a GPU
    )

    seen = []
    run = updates.Own.run

    def counted(own, slot, param):
        seen.append(slot)
        return run(own, slot, param)

    monkeypatch.setattr(updates.Own, "run", counted)
    return seen
