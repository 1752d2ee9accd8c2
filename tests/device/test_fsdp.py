# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2: gradients are reduced on a stream of its own, for which backward() makes the others wait
when it ends. One process, whose collectives change nothing."""

import functools

import gpu
import pytest
import torch
import torch.distributed as dist
from common import Fused, Stock, adamw, assert_same, batch
from gpu import NAME
from legal import net, play
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module")
def mesh():
    module = getattr(torch, NAME)
    module.is_initialized = lambda: True
    module.get_rng_state = torch.get_rng_state
    module.set_rng_state = lambda *_: None
    module.current_stream = gpu.current
    module.stream = lambda stream: stream
    module.Stream = functools.partial(torch.Stream, torch.device(NAME))
    module.Event = functools.partial(torch.Event, torch.device(NAME))
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield dist.init_device_mesh(NAME, (1,))
    dist.destroy_process_group()


def races_of(found):
    """FSDP2 allocates a reduction behind a wait for whoever has read the one before."""
    return [race for race in found if not race.startswith("memory is freed")]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_an_update_waits_for_the_reduction(mode, mesh):
    def script(wrap):
        model = net()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(4):
            optimizer.zero_grad()
            x, y = (part.to(NAME) for part in batch(i))
            (model(x) - y).square().mean().backward()
            optimizer.step()
        yield "weights", [p.to_local() for p in model.parameters()]
        yield "averages", [optimizer.state[p]["exp_avg"].to_local() for p in model.parameters()]

    stock, found = play(script, Stock())
    assert not races_of(found), found
    wrap = Fused(mode)
    ours, found = play(script, wrap)
    assert not races_of(found), "only ours races:\n" + "\n".join(found)
    for a, b in zip(ours, stock, strict=True):
        assert_same(b[0], a[1], b[1])
    wrap.prove()
