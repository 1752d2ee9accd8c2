# SPDX-License-Identifier: BSD-3-Clause
"""Before the first update on a GPU: do its kernels give the bits of fused=True there? The library
takes the trial (shim/gpu/trial.h), as for programs in C++."""

from __future__ import annotations

import torch

from optfuse._arguments.check import label
from optfuse._gpu import is_gpu
from optfuse._rules import Group, Rule


def gpu_bits_differ(rule: Rule, groups: list[Group]) -> list[str]:
    """The kinds of parameters whose updates on a GPU have other bits than those of fused=True.
    Raises optfuse.Error if they are wrong."""
    differ = set()
    for g, group in enumerate(groups):
        one_of = {(p.dtype, p.device): i for i, p in enumerate(group["params"])}
        for (dtype, device), i in one_of.items():
            if is_gpu(device) and torch.ops.optfuse.gpu_bits_differ(
                rule.name, rule.hyper(group), dtype, device, label(group, g, i)
            ):
                differ.add(f"{str(dtype).removeprefix('torch.')} on {device}")
    return sorted(differ)
