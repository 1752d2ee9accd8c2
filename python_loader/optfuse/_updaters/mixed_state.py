# SPDX-License-Identifier: BSD-3-Clause
"""Float32 parameters on a GPU whose state is bfloat16, as fused=True of Adam and AdamW takes them.
No class makes such state by itself: a hook of the script does, before the first step(), or the
script puts it into `state`. So it is met after fuse(), and tried when it is."""

from __future__ import annotations

from torch.optim import Optimizer

from optfuse._library.bindings import Error, lib
from optfuse._library.caller import levels_to_caller
from optfuse._library.log import warn
from optfuse._rules import Rule
from optfuse._trials.gpu_trial import differing_kind, is_mixed, refused, said_of
from optfuse._updaters.slots import Slots, Tensors


class MixedState:
    """The trials of one plan."""

    def __init__(self, plan: int, rule: Rule, strict: bool) -> None:
        self._plan = plan
        self._rule = rule
        self._strict = strict
        self.new: dict[int, str] = {}  # labels by parameters' ids: those to try
        self.differ: tuple[str, ...] = ()  # kinds of parameters whose bits differ

    def look(self, slots: Slots, slot: int, state: Tensors) -> None:
        """At the state of a slot, which is another one than before."""
        if is_mixed(self._rule, slots.params[slot], state):
            self.new[id(slots.params[slot])] = slots.labels[slot]

    def try_new(self, optimizer: Optimizer) -> None:
        """Raises optfuse.Error if their update is wrong, or has other bits and strict=True was
        given."""
        if not self.new:
            return
        differ = set()
        for group in optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if what := self.new.get(id(param)):
                    differ |= differing_kind(self._rule, group, i, what, mixed=True)
        if self._strict and differ:
            raise Error(refused(sorted(differ)))
        lib.of_shim_take_mixed(self._plan)
        self.new.clear()
        if differ - {*self.differ}:
            warn(said_of(sorted(differ)), UserWarning, stacklevel=levels_to_caller())
        self.differ = tuple(sorted({*self.differ, *differ}))
