# SPDX-License-Identifier: BSD-3-Clause
"""Other processes: forked children, data loader workers, shared memory. All in a
subprocess: forking is left to an interpreter that has no other threads and that may be
killed when it hangs."""

import pytest
from common import python_ok

FORKING = """
import os, torch, optfuse, numpy as np
from common import *
torch.manual_seed(0)
def weights(model): return b''.join(p.detach().numpy().tobytes() for p in model.parameters())
def child(work):
    'What work() returns in a forked child.'
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try: os.write(write, work())
        finally: os._exit(0)
    os.close(write)
    with os.fdopen(read, 'rb') as pipe: out = pipe.read()
    os.waitpid(pid, 0)
    return out
stock, ours = net(), net()
ours.load_state_dict(stock.state_dict())
pairs = [(stock, adamw(stock.parameters())), (ours, optfuse.fuse(adamw(ours.parameters())))]
def both(i):
    for model, optimizer in pairs: train(model, optimizer, i)
both(0)
assert optfuse.summary(pairs[1][1]).pending > 0
"""


def test_parent_and_child_go_on_training_after_a_fork():
    python_ok(
        FORKING + "def work():\n"
        "    both(1); both(2)\n"
        "    return b'equal' if weights(ours) == weights(stock) else b'different'\n"
        "assert child(work) == b'equal'\n"
        "both(5); both(6)\n"
        "assert weights(ours) == weights(stock)\n"
    )


def test_a_data_loader_worker_sees_the_updates():
    python_ok(
        FORKING + "class Weights(torch.utils.data.Dataset):\n"
        "    def __init__(self, model): self.model = model\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, i):\n"
        "        return torch.cat([p.detach().view(-1) for p in self.model.parameters()])\n"
        "def loaded(model):\n"
        "    loader = torch.utils.data.DataLoader(Weights(model), num_workers=1,\n"
        "                                         multiprocessing_context='fork', timeout=60)\n"
        "    return next(iter(loader))\n"
        "assert_same('weights', loaded(ours), loaded(stock))\n"
        "both(1)\n"
        "assert weights(ours) == weights(stock)\n"
    )


@pytest.mark.parametrize("when", ("before training", "while pending"))
def test_shared_memory_is_always_up_to_date_for_another_process(when):
    """A child that maps the weights reads them, while the parent trains."""
    share = "stock.share_memory(); ours.share_memory()\n"
    python_ok(
        (
            FORKING.replace("pairs = [", share + "pairs = [")
            if when != "while pending"
            else FORKING
        ).replace("assert optfuse.summary(pairs[1][1]).pending > 0", "")
        + (share if when == "while pending" else "")
        + "go, ready = os.pipe()\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.read(go, 1)\n"
        "    os.write(write, b'equal' if weights(ours) == weights(stock) else b'different')\n"
        "    os._exit(0)\n"
        "before = weights(ours)\n"
        "both(1)\n"
        "os.write(ready, b'x')\n"
        "assert os.read(read, 99) == b'equal', 'the other process sees old weights'\n"
        "assert weights(ours) != before\n"
    )


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_small_updates_in_a_forked_child(mode):
    """Together they would be worth the threads, which did not survive the fork."""
    out = python_ok(
        "import os, sys, torch, optfuse\n"
        "from torch import nn\n"
        "torch.set_num_threads(2)\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = threads()\n"
        "torch.randn(4_000_000).mul_(2).sum()\n"
        "assert threads() > before, 'there is nothing to lose'\n"
        "def train(wrap):\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(80)))\n"
        "    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))\n"
        "    for _ in range(3):\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(1, 16)).sum().backward()\n"
        "        optimizer.step()\n"
        "    return [p.tolist() for p in model.parameters()]\n"
        f"fused = lambda optimizer: optfuse.fuse(optimizer, {mode!r})\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(train(fused) != train(lambda optimizer: optimizer))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
        timeout=300,
    )
    assert out.strip() == "0"
