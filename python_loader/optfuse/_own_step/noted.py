# SPDX-License-Identifier: BSD-3-Clause
"""Tells, between backward() and step(), whether options of a group or attributes of an optimizer
are still those that a class's updates used. A name that its code does not have belongs to the
script, which may keep notes there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import guard
from optfuse._own_step.looks import names_read, reads_option
from optfuse._own_step.settings import differing
from optfuse._own_step.twin import (
    SHARED,
    Group,
    own_attributes,
    own_options,
    shared_state,
    unbound,
)

_FEW = 1024  # numbers in a tensor
_LISTS = (list, tuple, deque)
_DEFAULTS = "defaults"  # of groups that are still to come


class Noted:
    """The options and attributes of an optimizer at one time."""

    def __init__(
        self,
        optimizer: Optimizer,
        stock: type[Optimizer],
        is_written: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        """is_written: whether updates make or change a tensor, which is only told by its identity
        then."""
        self._is_written = is_written
        self._read = names_read(stock)
        self._reads_option = reads_option(stock, optimizer)
        self._options = [self._options_of(group) for group in optimizer.param_groups]
        self._attributes = self._attributes_of(optimizer)

    def changed_option(self, number: int, group: Group) -> str | None:
        """The first in which a group differs from what group `number` was."""
        return next(differing(self._options[number], self._options_of(group)), None)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        return next(differing(self._attributes, self._attributes_of(optimizer)), None)

    def _options_of(self, group: Group) -> dict[str, Any]:
        own = own_options(group).items()
        return {name: self._noted(value) for name, value in own if self._reads_option(name)}

    def _attributes_of(self, optimizer: Optimizer) -> dict[str, Any]:
        own = own_attributes(unbound(optimizer.__dict__, optimizer)) | shared_state(optimizer)
        read = self._read
        return {
            name: self._noted(value)
            for name, value in own.items()
            if name != _DEFAULTS and (read is None or name in read or name == SHARED)
        }

    def _noted(self, value: Any) -> Any:
        """Numbers and the like can't change, and other objects are told by their identity."""
        if isinstance(value, Tensor):
            return id(value) if self._is_written(value) else _noted_tensor(value)
        if type(value) in _LISTS:
            return type(value)(map(self._noted, value))
        if isinstance(value, dict):
            return {key: self._noted(item) for key, item in value.items()}
        return value


def _noted_tensor(tensor: Tensor) -> Any:
    """A write through .data or NumPy leaves a tensor's version as it is. But values on a GPU would
    have to be waited for, and many numbers copied."""
    if tensor.device.type == "cpu" and tensor.numel() <= _FEW and guard("late_values"):
        return tensor.detach().clone()
    return id(tensor), tensor._version
