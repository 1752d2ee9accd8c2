# SPDX-License-Identifier: BSD-3-Clause
"""Every deed of the programs where gradients are promises: whoever looks at one, changes it or
leaves it finds what stock has."""

import random

import pytest
from programs.cases import failures
from programs.deed import ALONE, DEEDS
from programs.draw import LAST, Program
from programs.models import MODELS, words
from programs.optimizers import KINDS as OF_NAME
from programs.play import MODES, check
from programs.world import World
from torch import nn

import optfuse

KINDS = ("AdamW", "SGD")
MODELS["an embedding"] = lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)), words


AT_NODES = [deed for deed in DEEDS.values() if deed.function.__module__ == "programs.deeds.nodes"]


@pytest.fixture
def promised(monkeypatch):
    """Numbers of gradients: promised, computed when their update was, and made by a look."""
    counts = {"promised": 0, "panels": 0, "made": 0}
    created = World.created

    def counted(world):
        for optimizer in filter(None, world.optimizers if world.is_begun and world.fused else ()):
            for layer in optfuse.summary(optimizer).promised:
                for what in counts:
                    counts[what] += getattr(layer, what)
        return created(world)

    monkeypatch.setattr(World, "created", counted)
    return counts


#: Where a layer may have promises.
PROMISING = [
    name
    for name, deed in DEEDS.items()
    if deed in AT_NODES or ("mlp" in deed.models and deed.proves)
    if deed.where != ALONE and deed.takes(OF_NAME[KINDS[0]]) and not (deed.make or deed.setup)
]
#: While a profiler notes addresses gradients are computed.
NOTING = ("profiler_that_is_switched_on_again", "train_under_an_execution_trace")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROMISING)
def test_deeds(name, mode, promised):
    found = failures(name, mode, KINDS if DEEDS[name] in AT_NODES else KINDS[:1])
    assert not found, f"{len(found)} cases fail, such as\n" + "\n".join(found[:3])
    assert promised["panels"] > 0 or name in NOTING, "no gradient was a promise until its update"


OF_ANY = [name for name in PROMISING if DEEDS[name].weight and DEEDS[name].models == ("mlp",)]


@pytest.mark.parametrize("name", OF_ANY)
def test_deeds_beside_an_embedding(name):
    """Its gradient is a promise in forward mode."""
    found = failures(name, "forward", KINDS[:1], models=("an embedding",))
    assert not found, f"{len(found)} cases fail, such as\n" + "\n".join(found[:3])


@pytest.mark.parametrize("seed", range(40))
def test_deeds_at_nodes_in_a_row(seed):
    rng = random.Random(seed)
    actions = [("iteration", {"model": 0, "batch": 0, "set_to_none": True})]
    for deed in rng.choices(AT_NODES, k=4):
        actions.append((deed.name, deed.draw(rng)))
    spec = {"kind": rng.choice(KINDS), "options": {"lr": 0.01}}
    setup = {"models": [rng.choice(AT_NODES[0].models)], "optimizers": [spec]}
    check(Program(seed, setup, [*actions, LAST]))
