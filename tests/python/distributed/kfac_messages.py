# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios of what the processes of optfuse.kfac() send each other: how many messages, and in the
same order on every rank, whatever order contributions come in."""

import functools

from kfac_cases import OFTEN, SELDOM, through_a_file
from kfac_pair import FUSIONS, LAYERS, MODES, Pair, loss_of, share_of
from ranks import STEPS, scenario_of

from optfuse_layers.kfac import messages

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)


@scenario(*MODES, **{fusion: {"fusion": fusion} for fusion in FUSIONS})
def ranks_that_use_layers_in_another_order(mode, fusion):
    """Messages that were launched in the order of arrival would add up factors of different
    layers, which have the same size."""
    pair = Pair(mode, fusion=fusion, **SELDOM)
    for i in range(STEPS):
        pair.step(i, how=lambda rank: {"order": (1, 0) if rank == 0 else (0, 1)})
    pair.check()


# Over a link that is the slower the more a message has, messages that begin early pay, unless each
# of them takes the processor 10 seconds.
SLOW = (0.0, 1e-3)
MESSAGES = {
    "each": {"options": {"fusion": "each"}, "fewest": 10, "most": 10},
    "all": {"options": {"fusion": "all"}, "fewest": 1, "most": 1},
    "planned": {"options": {"network": (*SLOW, 0.0)}, "fewest": 2, "most": 10},
    "costly": {"options": {"network": (*SLOW, 10.0)}, "fewest": 1, "most": 1},
}


@scenario("stock", **MESSAGES)
def as_many_messages_as_the_fusion_says(mode, options, fewest, most):
    """From the fifth collection on, once they are planned."""
    pair = Pair(mode, **options, **OFTEN)
    for i in range(6):
        pair.step(i)
    pair.check()
    said = pair.ours.kfac.summary()
    assert fewest <= said.messages <= most, said


@scenario("stock")
def costs_that_are_given_are_not_measured(mode):
    factors = Pair(mode, **OFTEN).ours.kfac._factors
    for given in ((), (1.0, 2.0), (1.0, 2.0, 3.0)):
        factors._network = given
        found = factors._costs(factors.group, factors.running[0].device)
        assert found[: len(given)] == given and len(found) == 3, found
        assert all(0 <= seconds < 0.1 for seconds in found[len(given) :]), found
    factors._network = (1.0, 2.0)
    for fusion in ("paper", "all", 1000):
        factors._fusion = fusion
        found = factors._costs(factors.group, factors.running[0].device)
        assert found == (1.0, 2.0, 0.0), found


BYTES = {"1 byte": (1, 10), "1,000 bytes": (1000, 4), "20,000 bytes": (20_000, 1)}


@scenario("stock", **{name: {"fusion": n, "messages": m} for name, (n, m) in BYTES.items()})
def messages_of_so_many_bytes(mode, fusion, messages):
    """As A has 8,152 bytes (1,520, 5,624, 360, 360 and 288 in turn) and G 992. A state keeps it."""
    first = Pair(mode, fusion=fusion, **OFTEN)
    for i in range(STEPS):
        first.step(i)
    first.check()
    state = first.ours.kfac.state_dict()
    assert first.ours.kfac.summary().messages == messages == state["group"][-1] + 1, state
    second = Pair(mode, fusion=fusion, **OFTEN)
    second.ours.kfac.load_state_dict(through_a_file(state))
    loss_of(second.model, share_of(STEPS, second.rank)).backward()
    second.ours.step()
    assert second.ours.kfac.summary().messages == messages, second.ours.kfac.summary()
    assert second.ours.kfac.state_dict()["group"] == state["group"]


@scenario("stock")
def a_mutant_that_sends_in_the_order_of_arrival(mode):
    """The test above would find it."""
    pair = Pair(mode, fusion="each", **SELDOM)
    pair.step(0)
    kfac = pair.ours.kfac
    order = list(kfac._factors.arrangement.order)
    if pair.rank == 0:
        twins = [order.index(2 * LAYERS.index(name) + 1) for name in ("twin.0", "twin.1")]
        order[twins[0]], order[twins[1]] = order[twins[1]], order[twins[0]]
    kfac._factors.arrange(messages.Arrangement(order, kfac._factors.arrangement.group))
    for i in range(1, 4):
        pair.step(i)
    found, wanted = (k.factors("twin.0")[1] for k in (pair.ours, pair.reference))
    assert (found - wanted).abs().max() > 1e-6, "factors of two layers were added up unnoticed"


@scenario(*MODES, **{fusion: {"fusion": fusion} for fusion in FUSIONS})
def an_order_that_changes_later(mode, fusion):
    """The plan is of the first factor step."""
    pair = Pair(mode, fusion=fusion, **SELDOM)
    for i in range(STEPS):
        pair.step(i, how=lambda rank, i=i: {"order": (1, 0) if i > 3 and rank > 0 else (0, 1)})
    pair.check()


@scenario(*MODES, **{fusion: {"fusion": fusion} for fusion in FUSIONS})
def late_contributions_on_one_rank(mode, fusion):
    """As many rows come in two parts: the first part may be on its way already."""
    pair = Pair(mode, fusion=fusion, **SELDOM)
    for i in range(STEPS):
        pair.step(i, how=lambda rank, i=i: {"halves": i > 1 and rank == 0})
    pair.check()


@scenario(*MODES, **{fusion: {"fusion": fusion} for fusion in FUSIONS})
def late_contributions_on_all_ranks(mode, fusion):
    pair = Pair(mode, fusion=fusion, **SELDOM)
    for i in range(STEPS):
        pair.step(i, how=lambda rank, i=i: {"uses": 1 + (i > 1) + (i > 5)})
    pair.check()


@scenario(*MODES)
def contributions_that_no_longer_come(mode):
    """The first factor step has three uses of a layer, later ones have one."""
    pair = Pair(mode, **SELDOM)
    for i in range(STEPS):
        pair.step(i, how=lambda rank, i=i: {"uses": 3 if i < 2 else 1})
    pair.check()
