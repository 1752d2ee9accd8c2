# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode frees gradients one by one; the process keeps the memory for the next
ones and does not take it from the system again, page fault by page fault."""

import ast
import itertools
import platform
import statistics

import pytest
from common import python_ok

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")


def test_gradients_come_and_go_without_page_faults():
    """In each process: without a word to malloc there are none in one of three."""
    pages_of_a_gradient = 512 * 512 * 4 // 4096
    for _ in range(3):
        faults, _, _ = trained(layers=20, width=512, batch=8)
        assert statistics.median(faults[4:]) < pages_of_a_gradient, faults


def test_the_end_of_the_heap_stays_where_activations_have_been():
    """They are more than malloc keeps at the end of its heap. Without the bytes that keep it the
    end falls by 64 to 96 MB some 3 times in each process; with them in one process of ten."""
    falls = []
    for _ in range(3):
        _, before, after = trained(layers=12, width=256, batch=16384, iterations=20)
        ends = [end for both in zip(before, after, strict=True) for end in both][8:]
        falls.append(sum(a - b >= 8 << 20 for a, b in itertools.pairwise(ends)))
        if falls[-1] == 0:
            return
    raise AssertionError(falls)


def trained(layers, width, batch, iterations=16):
    """Page faults of each iteration, and where the heap ended before backward and after."""
    out = python_ok(
        "import ctypes, resource, torch, optfuse\n"
        "from torch import nn\n"
        f"model = nn.Sequential(*(nn.Linear({width}, {width}) for _ in range({layers})))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "optfuse.fuse(optimizer, mode='backward', products='off')\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "sbrk = ctypes.CDLL(None).sbrk\n"
        "sbrk.restype, sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]\n"
        "found = []\n"
        f"for _ in range({iterations}):\n"
        "    before = faults()\n"
        "    optimizer.zero_grad()\n"
        f"    loss = model(torch.ones({batch}, {width})).square().sum()\n"
        "    end = sbrk(0)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    found.append((faults() - before, end, sbrk(0)))\n"
        "print(found)\n",
        fresh=True,
    )
    return zip(*ast.literal_eval(out), strict=True)


@pytest.mark.parametrize("keeps", (True, False))
def test_memory_is_kept(keeps):
    """A gradient of 64 MiB, 16,384 pages, is in the same memory in each iteration."""
    out = python_ok(
        "import resource, torch, optfuse\n"
        "from torch import nn\n"
        f"optfuse.keep_memory() if {keeps} else None\n"
        "model = nn.Linear(4096, 4096, bias=False)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optfuse.fuse(optimizer, products='off')\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "found = []\n"
        "for _ in range(8):\n"
        "    before = faults()\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(4, 4096)).sum().backward()\n"
        "    optimizer.step()\n"
        "    found.append(faults() - before)\n"
        "print(found[2:])\n"
    )
    faults = min(ast.literal_eval(out))
    assert faults < 1000 if keeps else faults > 10_000
