# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() is traced."""

from typing import Any

from common import net
from torch import Tensor
from traced_classes import Base

import optfuse
from guard_scenarios.registry import guards, must_raise


class ByType(Base):
    """Takes a tensor that is none of PyTorch's own for something else."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        is_own = type(p).__module__.startswith("torch")
        p.add_(grad, alpha=-group["lr"] * (1 if is_own else 2))


@guards("traced_bits")
def a_step_that_is_another_one_without_data_is_refused():
    optimizer = ByType(net().parameters())
    must_raise(lambda: optfuse.fuse(optimizer), "fusing a class that sees through stand-ins")
