# SPDX-License-Identifier: BSD-3-Clause
"""The options of parameter groups, as the library was told of them."""

from __future__ import annotations

import ctypes
from typing import Any

from optfuse._library.bindings import Error, check, lib
from optfuse._rules import Rule
from optfuse._snapshot import Groups, GroupsSnapshot
from optfuse._trials.stock_trial import flags_of

_FLAGS = (
    "optfuse: foreach, capturable or fused of a parameter group was changed after fuse(), or its "
    "lr has become a tensor or its alpha negative: its step() would now go another way, whose bits "
    "the kernels on the GPU do not have. Call optfuse.unfuse() and fuse it again"
)


class ToldOptions:
    """The numbers of each group of one plan."""

    def __init__(self, plan: int, rule: Rule) -> None:
        self.plan = plan
        self.rule = rule
        self._numbers: list[tuple[float, ...]] = []  # of each group
        self._flags: list[tuple[Any, ...]] = []  # of each group, when it was fused
        self.snapshot = GroupsSnapshot()

    def tell_all(self, groups: Groups) -> None:
        """The library has forgotten all groups."""
        self._numbers = []
        self._flags += map(flags_of, groups[len(self._flags) :])
        self.tell(groups)

    def tell(self, groups: Groups) -> None:
        """Tells the library what has changed."""
        known, numbers_of = self._numbers, self.rule.hyper
        if self.rule.as_made and list(map(flags_of, groups)) != self._flags[: len(groups)]:
            raise Error(_FLAGS)
        self.snapshot.forget_options()  # half of them are told if this fails
        for i, group in enumerate(groups):
            numbers = numbers_of(group)
            if i < len(known) and known[i] == numbers:
                continue
            values = (ctypes.c_double * len(numbers))(*numbers)
            check(lib.of_shim_group(self.plan, i, values, len(numbers)))
            known[i : i + 1] = [numbers]
        if not self.rule.external:  # the class's own step() takes over all options each time
            self.snapshot.remember(groups)

    def changed(self, number: int, group: dict[str, Any]) -> str | None:
        """The first option in which a group differs from what was told of group `number`."""
        return self.rule.changed_option(self._numbers[number], group)
