# SPDX-License-Identifier: BSD-3-Clause
"""torch.manual_seed() without what it does for devices that are not there: for each of three kinds
it formats the stack of its caller, 500 times the work of seeding the CPU's generator. Tests seed
all the time. The generators of the CPU and of a device of the tests' own are seeded as ever."""

import torch


def use() -> None:
    """Not where PyTorch is built for GPUs: asking whether there is one would begin with it, and
    forked children could no longer."""
    if not torch.backends.cuda.is_built():
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None


use()
