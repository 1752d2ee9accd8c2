# SPDX-License-Identifier: BSD-3-Clause
import pytest
import ranks


@pytest.fixture(scope="session")
def outcomes():
    return {}


def scenario_of(item, world):
    """The scenario of a test, if so many processes play it."""
    params = getattr(item, "callspec", None) and item.callspec.params
    if params and params.get("world") == world and "scenario" in params:
        return f"{item.module.SCRIPTS}:{params['scenario']}"
    return None


@pytest.fixture
def played(request, outcomes, world):
    """None, or why the scenario failed. The test's module names the module of its scenarios:
    SCRIPTS; all scenarios that were selected are played at once."""
    if world not in outcomes:
        names = (scenario_of(item, world) for item in request.session.items)
        outcomes[world] = ranks.play(world, dict.fromkeys(filter(None, names)))
    return outcomes[world][scenario_of(request.node, world)]
