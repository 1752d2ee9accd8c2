# SPDX-License-Identifier: BSD-3-Clause
"""Scalars of an optimizer that are on a GPU: learning rates that are tensors, and what GradScaler
or a script hands over. They are copied there when updates are created, for updates that run
later."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from optfuse._gpu import is_on_gpu


class DeviceScalars:
    """The numbers of one plan that are on devices, as the library has them."""

    def __init__(self, plan: int, scales: bool) -> None:
        """scales: the class reads grad_scale and found_inf."""
        self.plan = plan
        self._scales = scales
        self._some = False  # the library has some
        self._rates: list[tuple[int, int]] = []  # of the groups

    def tell(self, optimizer: Optimizer, same_groups: bool) -> bool:
        """same_groups: they were found as they had been. Whether the library has some now."""
        attributes = optimizer.__dict__ if self._scales else {}
        scale, inf = attributes.get("grad_scale"), attributes.get("found_inf")
        if same_groups and scale is None and inf is None and not self._some:
            return False  # groups that can be found the same have no tensors in them
        rates = [g["lr"] if is_on_gpu(g.get("lr")) else None for g in optimizer.param_groups]
        self._rates = list(map(_identity, optimizer.param_groups))
        some = scale is not None or inf is not None or any(r is not None for r in rates)
        if some or self._some:
            torch.ops.optfuse.set_device_scalars(self.plan, rates, scale, inf)
            self._some = some
        return some

    def changed_option(self, number: int, group: dict[str, Any]) -> str | None:
        """In which a group differs from what was told of group `number`."""
        same = [_identity(group)] == self._rates[number : number + 1] or not self._rates
        return None if same else "lr"


def _identity(group: dict[str, Any]) -> tuple[int, int]:
    """The identity of a learning rate on a GPU; it differs if the rate was changed, without a look
    at it."""
    rate = group.get("lr")  # a class of other packages may have none
    return (id(rate), rate._version) if is_on_gpu(rate) else (0, 0)
