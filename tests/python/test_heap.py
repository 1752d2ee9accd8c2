# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode frees gradients one by one; the process keeps the memory for the next
ones and does not take it from the system again, page fault by page fault."""

import platform

import pytest
from common import python_ok


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_gradients_come_and_go_without_page_faults():
    """In each process: without a word to malloc there are none in one of three."""
    pages_of_a_gradient = 512 * 512 * 4 // 4096
    for _ in range(3):
        assert faults() < pages_of_a_gradient


def faults():
    """The median of an iteration."""
    out = python_ok(
        "import resource, statistics, torch, optfuse\n"
        "from torch import nn\n"
        "torch.set_num_threads(1)\n"
        "model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(20)))\n"
        "optimizer = optfuse.fuse(torch.optim.AdamW(model.parameters()), mode='backward')\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def train():\n"
        "    before = faults()\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(8, 512)).square().sum().backward()\n"
        "    optimizer.step()\n"
        "    return faults() - before\n"
        "for _ in range(4): train()\n"
        "print(int(statistics.median(train() for _ in range(9))))\n",
        fresh=True,
    )
    return int(out)
