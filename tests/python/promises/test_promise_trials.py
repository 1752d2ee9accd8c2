# SPDX-License-Identifier: BSD-3-Clause
"""When a shape of a layer is tried, and the gradients meanwhile. A process tries a shape once, so
each test has one of its own."""

from common import python_ok

#: Two layers of one shape, and so two uses an iteration.
TRAINED = """
import torch, optfuse
from torch import nn

def train(wrap, sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 768))
    optimizer = wrap(torch.optim.AdamW(model.parameters(), fused=True))
    for rows in sizes:
        optimizer.zero_grad()
        model(torch.randn(rows, 768)).square().mean().backward()
        optimizer.step()
    return optimizer, [p.detach().clone().view(torch.int32) for p in model.parameters()]

def counts(optimizer):
    layers = optfuse.summary(optimizer).promised
    because = {layer.because for layer in layers}
    return sum(layer.promised for layer in layers), sum(layer.whole for layer in layers), because

def has_verdict(promised, because):
    return promised > 0 or because == {"panels are slower here"}
"""


def trained(code):
    python_ok(TRAINED + code, fresh=True, OPTFUSE_PRODUCTS="auto")


def test_a_shape_is_tried_at_its_ninth_use():
    """By a hundredth of the time alone the trial would wait for some hundred iterations."""
    trained("""
optimizer, _ = train(optfuse.fuse, [8] * 4)
assert counts(optimizer) == (0, 8, {"the shape waits for its trial"}), counts(optimizer)
optimizer, _ = train(optfuse.fuse, [8] * 30)
promised, whole, because = counts(optimizer)
assert whole > 0 and has_verdict(promised, because), counts(optimizer)
""")


def test_shapes_that_come_seldom_are_not_tried():
    trained("""
optimizer, _ = train(optfuse.fuse, list(range(1, 21)) * 4)
assert counts(optimizer) == (0, 160, {"the shape waits for its trial"}), counts(optimizer)
optimizer, _ = train(optfuse.fuse, [8] * 30)
promised, _, because = counts(optimizer)
assert has_verdict(promised, because), counts(optimizer)
""")


def test_bits_before_a_trial_and_behind_it():
    trained("""
_, stock = train(lambda optimizer: optimizer, [8] * 150)
for mode in (optfuse.Forward(), optfuse.Backward()):
    optimizer, ours = train(lambda optimizer: optfuse.fuse(optimizer, mode), [8] * 150)
    promised, whole, because = counts(optimizer)
    assert whole > 0 and has_verdict(promised, because), counts(optimizer)
    assert all(map(torch.equal, ours, stock))
""")
