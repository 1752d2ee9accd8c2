# SPDX-License-Identifier: BSD-3-Clause
"""The updater of an optimizer, by its rule."""

from __future__ import annotations

from torch.optim import Optimizer

from optfuse._library.bindings import BACKWARD
from optfuse._options import Options
from optfuse._own_step.register import check_promise
from optfuse._own_step.settings import Promise
from optfuse._rules import Rule
from optfuse._traced.rule import TracedRule
from optfuse._updaters.kernels import Kernels
from optfuse._updaters.own_step import OwnStep
from optfuse._updaters.traced import Traced
from optfuse._updaters.updater import Updater


def promise_of(optimizer: Optimizer, stock: type[Optimizer], rule: Rule) -> Promise | None:
    """The changes that the class's own step() makes beside updating parameters; None: it is not
    taken. Raises optfuse.Error for what no update could do."""
    return check_promise(optimizer, stock) if rule.external else None


def updater_for(
    stock: type[Optimizer], plan: int, rule: Rule, promise: Promise | None, options: Options
) -> Updater:
    """promise: as promise_of() says."""
    in_backward = options.mode == BACKWARD
    if isinstance(rule, TracedRule):
        return Traced(stock, plan, rule, in_backward)
    if promise is not None:
        return OwnStep(stock, plan, rule, promise, in_backward)
    return Kernels(stock, plan, rule, options.strict)
