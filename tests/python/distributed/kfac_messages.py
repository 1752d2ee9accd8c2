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


#: The input of a rank's forward pass in each step: layers in another order, which have factors of
#: the same shapes; contributions in parts or several times, whose messages have begun by then.
HOW = {
    "ranks_that_use_layers_in_another_order": (
        lambda i, rank: {"order": (1, 0) if rank == 0 else (0, 1)}
    ),
    "an_order_that_changes_later": (
        lambda i, rank: {"order": (1, 0) if i > 3 and rank > 0 else (0, 1)}
    ),
    "late_contributions_on_one_rank": lambda i, rank: {"halves": i > 1 and rank == 0},
    "late_contributions_on_all_ranks": lambda i, rank: {"uses": 1 + (i > 1) + (i > 5)},
    "contributions_that_no_longer_come": lambda i, rank: {"uses": 3 if i < 2 else 1},
}


def played(mode, how, fusion):
    """The plan of messages is of the first factor step. Messages in the order of arrival would add
    up factors of different layers."""
    Pair(mode, fusion=fusion, **SELDOM).run(how=how)


for played.__name__, how in HOW.items():
    cases = {fusion: {"how": how, "fusion": fusion} for fusion in FUSIONS}
    scenario(*MODES, **cases)(played)


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
