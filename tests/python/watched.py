# SPDX-License-Identifier: BSD-3-Clause
"""Who updates: a fixture for the tests here and of tests/device."""

import pytest


@pytest.fixture
def python_updates(monkeypatch):
    """The slots that the class's own step() has updated in backward mode."""
    from optfuse._updaters.registered import (
        Registered,  # here, for the conftests first say what stands in for a GPU
    )

    seen = []
    apply = Registered.apply

    def counted(updater, optimizer, slot, param):
        seen.append(slot)
        return apply(updater, optimizer, slot, param)

    monkeypatch.setattr(Registered, "apply", counted)
    return seen
