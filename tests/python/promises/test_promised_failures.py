# SPDX-License-Identifier: BSD-3-Clause
"""A promised gradient that can't be computed now."""

from common import python_ok

CODE = """
import resource
import torch, optfuse
from torch import nn

def trained(wrap):
    torch.manual_seed(0)
    model = nn.Linear(4096, 8192, bias=False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    model(torch.randn(4, 4096)).sum().backward()
    yield model, optimizer
    optimizer.step()
    yield model.weight.detach().clone()

_, stock = trained(lambda optimizer: optimizer)
ours = trained(lambda optimizer: optfuse.fuse(optimizer))
model, optimizer = next(ours)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (in_use + (32 << 20), before[1]))
try:
    model.weight.grad.sum()
except optfuse.Error as error:
    print(error)
else:
    raise SystemExit("a gradient of 128 MB had memory")
finally:
    resource.setrlimit(resource.RLIMIT_AS, before)
weight = next(ours)
assert optfuse.summary(optimizer).promised[0].panels == 1
assert torch.equal(weight, stock)
"""


def test_the_error_names_cause_and_parameter_and_nothing_is_lost():
    """There is no memory for all of it, and the update needs a panel of it only."""
    out = python_ok(CODE, fresh=True, OPTFUSE_PRODUCTS="force")
    assert "the gradient of parameter 0 of group 0" in out, out
    assert "can't allocate memory: you tried to allocate 134217728 bytes" in out, out
    assert 'products="off"' in out, out
