# SPDX-License-Identifier: BSD-3-Clause
"""Who updates: a fixture for the tests here and of tests/device."""

import pytest

from optfuse import _own


@pytest.fixture
def python_updates(monkeypatch):
    """The slots that the class's own step() has updated; clear() it after fuse()."""
    seen = []
    run = _own.Own.run

    def counted(own, slot, param):
        seen.append(slot)
        return run(own, slot, param)

    monkeypatch.setattr(_own.Own, "run", counted)
    return seen
