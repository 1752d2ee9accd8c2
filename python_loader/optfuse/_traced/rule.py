# SPDX-License-Identifier: BSD-3-Clause
"""The rule of an optimizer whose step() is traced."""

from __future__ import annotations

from dataclasses import dataclass

from optfuse._own_step.settings import Promise
from optfuse._rules import ROWS, Group, Rule


@dataclass(frozen=True)
class TracedRule(Rule):
    """Options, state and formula are those of any class, and come with each step's programs."""

    promise: Promise = Promise()  # what the class does beside updating parameters

    def hyper(self, group: Group) -> tuple[float, ...]:
        return ()

    def difference(self, group: Group) -> str:
        return ""


def traced_rule(promise: Promise) -> TracedRule:
    return TracedRule("traced", **ROWS["traced"], reference="own step()", promise=promise)
