# SPDX-License-Identifier: BSD-3-Clause
"""Trains in processes of its own: children.py METHOD, of multiprocessing, or "exec"."""

import multiprocessing
import subprocess
import sys

import torch
from common_net import Net, show, train


def work(seed):
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    train(net, optimizer)
    show(net, optimizer)


if __name__ == "__main__":
    work(0)
    if sys.argv[1] == "exec":
        code = "import children; children.work(1)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    else:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(1,))
        child.start()
        child.join()
        assert child.exitcode == 0
