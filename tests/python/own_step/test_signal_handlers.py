# SPDX-License-Identifier: BSD-3-Clause
"""A handler of a signal (SIGTERM, say) that runs while a registered class's own step() makes an
update. What needs the lock of that update raises at once, and training goes on."""

import pytest
from common import python_ok

CODE = """
import faulthandler, signal, torch, optfuse
from common import assert_same, net, snapshot, batch
from torch import nn

faulthandler.dump_traceback_later(60, exit=True)  # where it waits, if it does
signalled = []

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        total = self.state[p].setdefault("total", torch.zeros_like(p))
                        total.mul_(0.5).add_(p.grad)
                        if signalled == ["now"]:
                            signalled.clear()
                            signal.raise_signal(signal.SIGUSR1)
                        p.sub_(total * group["lr"])

optfuse.register(Plain, per_parameter=True)
torch.manual_seed(0)
theirs, ours = net(), net()
ours.load_state_dict(theirs.state_dict())
stock = Plain(theirs.parameters())
fused = optfuse.fuse(Plain(ours.parameters()), MODE)
more = nn.Parameter(torch.ones(2))
CALLS = {
    "step": lambda: fused.step(),
    "zero_grad": lambda: fused.zero_grad(),
    "summary": lambda: optfuse.summary(fused),
    "add_param_group": lambda: fused.add_param_group({"params": [more]}),
    "unfuse": lambda: optfuse.unfuse(fused),
    "state_dict": lambda: fused.state_dict(),
    "flush": lambda: optfuse.flush(),
}
said = []

def handler(*_):
    try:
        CALLS[CALL]()
        said.append("nothing")
    except optfuse.Error as error:
        said.append(str(error))

signal.signal(signal.SIGUSR1, handler)

def train(model, optimizer, i):
    x, y = batch(i)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

for i in range(4):
    train(theirs, stock, i)
    if i == 2:
        signalled.append("now")
    train(ours, fused, i)
list(map(torch.Tensor.sum, ours.parameters()))
print(said)
assert_same("weights", snapshot(dict(ours.state_dict())), dict(theirs.state_dict()))
"""


IN_AN_UPDATE = "in the middle of one of its updates"
SAID = {
    ("forward", "step"): IN_AN_UPDATE,
    ("forward", "zero_grad"): "nothing",
    ("forward", "summary"): IN_AN_UPDATE,
    ("forward", "add_param_group"): "could not be tried",
    ("forward", "unfuse"): IN_AN_UPDATE,
    ("forward", "state_dict"): "nothing",
    ("forward", "flush"): "nothing",
    ("backward", "step"): IN_AN_UPDATE,
    ("backward", "zero_grad"): "zero_grad() before step()",
    ("backward", "summary"): IN_AN_UPDATE,
    ("backward", "add_param_group"): "inside backward()",
    ("backward", "unfuse"): "inside backward()",
    ("backward", "state_dict"): "nothing",
    ("backward", "flush"): "nothing",
}


@pytest.mark.parametrize(("mode", "call"), SAID)
def test_a_handler_that_calls_the_optimizer_in_an_update_does_not_wait(mode, call):
    said = python_ok(f"MODE, CALL = {mode!r}, {call!r}\n{CODE}", timeout=90)
    assert said.count(SAID[mode, call]) == 1, said
