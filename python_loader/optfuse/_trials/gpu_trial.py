# SPDX-License-Identifier: BSD-3-Clause
"""Before the first update on a GPU: do its kernels give the bits of fused=True there? The library
takes the trial (shim/doors/gpu_trial.h), as for programs in C++."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from optfuse._arguments.check import label
from optfuse._gpu import is_gpu
from optfuse._library.releases import release_of, takes_mixed
from optfuse._rules import Group, Rule

States = Mapping[Tensor, Mapping[str, Any]]


def gpu_bits_differ(rule: Rule, groups: list[Group], states: States) -> list[str]:
    """The kinds of parameters whose updates on a GPU have other bits than those of fused=True.
    Raises optfuse.Error if they are wrong."""
    differ = set()
    for g, group in enumerate(groups):
        one_of = {
            (p.dtype, p.device, is_mixed(rule, p, map(states.get(p, {}).get, rule.state))): i
            for i, p in enumerate(group["params"])
        }
        for (_, device, mixed), i in one_of.items():
            if is_gpu(device):
                differ |= differing_kind(rule, group, i, label(group, g, i), mixed)
    return sorted(differ)


def is_mixed(rule: Rule, param: Tensor, state: Iterable[Any]) -> bool:
    """Whether the state is bfloat16 and the parameter float32, where this release of torch takes
    that."""
    return (
        rule.takes_mixed
        and param.dtype is torch.float32
        and is_gpu(param.device)
        and any(isinstance(t, Tensor) and t.dtype is torch.bfloat16 for t in state)
        and takes_mixed(release_of(torch.__version__))
    )


def differing_kind(rule: Rule, group: Group, i: int, what: str, mixed: bool) -> set[str]:
    """The kind of a group's i-th parameter, if its update has other bits."""
    param = group["params"][i]
    kind = str(param.dtype).removeprefix("torch.") + " with bfloat16 state" * mixed
    tried = rule.name, rule.hyper(group), param.dtype, param.device, what, mixed
    return {f"{kind} on {param.device}"} if torch.ops.optfuse.gpu_bits_differ(*tried) else set()


def said_of(differ: Iterable[str]) -> str:
    """A warning."""
    return (
        f"updates of {', '.join(differ)} round differently from fused=True there, so results "
        "will be close to stock's and not equal; strict=True refuses that"
    )


def refused(differ: Iterable[str]) -> str:
    """An error, with strict=True."""
    return (
        f"optfuse: strict=True, but updates of {', '.join(differ)} have other bits than "
        "fused=True there (docs/numerics.md names the releases and chips where they are "
        "equal). Pass strict=False, or keep the optimizer as it is"
    )
