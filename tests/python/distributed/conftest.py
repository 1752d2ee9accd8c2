# SPDX-License-Identifier: BSD-3-Clause
import pytest
import ranks


@pytest.fixture(scope="session")
def outcomes():
    return {}


@pytest.fixture
def played(request, outcomes, world, scenario):
    """None, or why the scenario failed. The test's module names the module of its scenarios:
    SCRIPTS; all of them that were selected are played at once."""
    scripts = request.module.SCRIPTS

    def selected(item):
        params = getattr(item, "callspec", None) and item.callspec.params
        wanted = params and params.get("world") == world and "scenario" in params
        return wanted and getattr(item.module, "SCRIPTS", None) == scripts

    if (scripts, world) not in outcomes:
        items = filter(selected, request.session.items)
        names = dict.fromkeys(item.callspec.params["scenario"] for item in items)
        outcomes[scripts, world] = ranks.play(scripts, world, names)
    return outcomes[scripts, world][scenario]
