# SPDX-License-Identifier: BSD-3-Clause
"""The updater of an optimizer, by its rule."""

from __future__ import annotations

from optfuse._rules import RecordedRule, RegisteredRule, Rule
from optfuse._updaters.kernels import Kernels
from optfuse._updaters.recorded import Recorded
from optfuse._updaters.registered import Registered
from optfuse._updaters.updater import Updater


def updater_class(rule: Rule) -> type[Updater]:
    if isinstance(rule, RecordedRule):
        return Recorded
    return Registered if isinstance(rule, RegisteredRule) else Kernels
