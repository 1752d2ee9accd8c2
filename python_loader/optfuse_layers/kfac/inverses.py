# SPDX-License-Identifier: BSD-3-Clause
"""Inverses of factors, each computed by one process and sent to the others while the next one is
computed, or by all (arXiv 2107.06533)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from optfuse._library.bindings import Error

#: of_placement of plugin/planners/kfac/messages.h, in its order.
PLACEMENTS = ("balanced", "round_robin", "everywhere")
#: Inverses of fewer rows take less time than their messages: all processes make them. The
#: paper's; "round_robin" places all, as MPD-KFAC does.
_EVERYWHERE_BELOW = 1024


@dataclass(frozen=True)
class Factor:
    """One to be inverted."""

    name: str  # for errors
    packed: Tensor
    size: int
    damping: float  # added to its diagonal


def inverse(factor: Factor) -> Tensor:
    """Symmetric up to rounding. Of a factor that is not positive definite the eigenvalues are
    raised to `damping`."""
    matrix = torch.ops.optfuse.unpack_factor(factor.packed, factor.size, factor.damping)
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if not failed.item():
        return torch.cholesky_inverse(lower)
    if not matrix.isfinite().all().item():
        raise Error(
            f"optfuse: factor {factor.name} has infinities or NaN, as the gradients of an earlier "
            "step had; go back to a checkpoint (KFAC.load_state_dict), and look for what made "
            "them"
        )
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors / values.clamp_min(factor.damping)) @ vectors.mT


def factored(a: Tensor, g: Tensor, damping: float) -> tuple[float, float]:
    """The damping added to the diagonals of A and of G (arXiv 1503.05671, section 6.3)."""
    ratio = (a.diagonal().mean() / g.diagonal().mean()).item()
    pi = ratio**0.5 if 0 < ratio < float("inf") else 1.0
    return pi * damping**0.5, damping**0.5 / pi


def owners(placement: str, sizes: Sequence[int], processes: int) -> list[int]:
    """The process that inverts each; -1: every process."""
    small = _EVERYWHERE_BELOW if placement == "balanced" else 0
    number = PLACEMENTS.index(placement if processes > 1 else "everywhere")
    found: list[int] = torch.ops.optfuse.place_inverses(number, list(sizes), processes, small)
    return found


def invert(
    factors: Sequence[Factor], owner: Sequence[int], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """The inverses of all, on every process of the group, which all call it. They are exactly
    symmetric, so that a packed one is as good."""
    found: dict[int, Tensor] = {}
    sent: list[tuple[int, Tensor, dist.Work]] = []
    rank = dist.get_rank(group) if group else 0
    # The smallest first: its message is on its way while the next one is computed.
    for n in sorted(range(len(factors)), key=lambda n: (factors[n].size, n)):
        message = torch.empty_like(factors[n].packed)
        if owner[n] in (-1, rank):
            message = torch.ops.optfuse.pack_factor(inverse(factors[n]))
        if owner[n] == -1 or group is None:
            found[n] = torch.ops.optfuse.unpack_factor(message, factors[n].size, 0.0)
            continue
        source = dist.get_global_rank(group, owner[n])
        sent.append((n, message, dist.broadcast(message, source, group, async_op=True)))
    for n, message, work in sent:
        work.wait()
        found[n] = torch.ops.optfuse.unpack_factor(message, factors[n].size, 0.0)
    return [found[n] for n in range(len(factors))]
