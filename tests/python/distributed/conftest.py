# SPDX-License-Identifier: BSD-3-Clause
import pytest
import ranks


@pytest.fixture(scope="session")
def outcomes():
    return {}


@pytest.fixture
def played(request, outcomes, world, scenario):
    """None, or why the scenario failed. All that were selected are played at once."""
    if world not in outcomes:
        params = [getattr(item, "callspec", request.node.callspec).params
                  for item in request.session.items]  # fmt: skip
        names = [found["scenario"] for found in params if found.get("world") == world]
        outcomes[world] = ranks.play(world, dict.fromkeys(names))
    return outcomes[world][scenario]
