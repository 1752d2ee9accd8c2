# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that are views of DistributedDataParallel's buckets: whoever writes to an alias of one
that he got while its update is pending launches that first."""

import pytest
import torch
from common import one_process
from torch.nn.parallel import DistributedDataParallel

import optfuse

#: How to get the alias, and whether before step() or after it.
ALIASES = {
    "itself": (lambda g: g, False),
    "data": (lambda g: g.data, False),
    "detach": (lambda g: g.detach(), False),
    "flat": (lambda g: g.view(-1), False),
    "storage": (lambda g: torch.empty(0).set_(g.untyped_storage()), False),
    "itself, before": (lambda g: g, True),
}


def train(fused, alias_of, before, steps=3, flushes=False):
    torch.manual_seed(0)
    layers = torch.nn.Linear(40, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=True)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    if fused:
        optfuse.fuse(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().sum().backward()
        alias = alias_of(params[0].grad) if before else None
        optimizer.step()
        if flushes:
            optfuse.flush()
        alias = alias_of(params[0].grad) if alias is None else alias
        with torch.no_grad():
            alias.mul_(0.5)
        del alias
    return [p.detach().clone() for p in params], optfuse.summary(optimizer) if fused else None


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_of_a_bucket_that_is_written_while_updates_are_pending(name):
    with one_process():
        stock, _ = train(False, *ALIASES[name])
        ours, summary = train(True, *ALIASES[name])
    assert all(map(torch.equal, ours, stock))
    assert summary.at_use > 0


@pytest.mark.parametrize("of", (lambda g: g.data, lambda g: g._base), ids=("alias", "bucket"))
def test_an_older_alias_of_a_bucket_is_not_seen_but_for_flush(of):
    with one_process():
        stock, _ = train(False, of, True)
        flushed, _ = train(True, of, True, flushes=True)
        ours, _ = train(True, of, True)
    assert all(map(torch.equal, flushed, stock))
    assert not all(map(torch.equal, ours, stock)), "docs/hazards.md says that it differs"
