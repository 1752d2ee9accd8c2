# SPDX-License-Identifier: BSD-3-Clause
"""The updater of an optimizer, by its rule."""

from __future__ import annotations

from torch.optim import Optimizer

from optfuse._rules import RULES, RecordedRule, Rule
from optfuse._updaters.kernels import Kernels
from optfuse._updaters.own_step import OwnStep
from optfuse._updaters.recorded import Recorded
from optfuse._updaters.updater import Updater


def updater_of(stock: type[Optimizer]) -> type[Updater]:
    """For a class whose rule is not known yet."""
    return Kernels if stock in RULES else OwnStep


def updater_class(rule: Rule) -> type[Updater]:
    if isinstance(rule, RecordedRule):
        return Recorded
    return OwnStep if rule.external else Kernels
