# SPDX-License-Identifier: BSD-3-Clause
"""The rule of an optimizer whose step() is traced."""

from __future__ import annotations

from dataclasses import dataclass

from optfuse._own_step.settings import Promise
from optfuse._rules import ROWS, AnyRule
from optfuse._traced.standin import Made


@dataclass(frozen=True)
class TracedRule(AnyRule):
    """That of a class whose step() is traced."""

    promise: Promise = Promise()  # what the class does beside updating parameters
    made: Made = "none"  # of the tensors that step() makes from nothing, which are traced


def traced_rule(promise: Promise, made: Made = "none") -> TracedRule:
    row = ROWS["traced"]
    return TracedRule("traced", **row, reference="own step()", promise=promise, made=made)
