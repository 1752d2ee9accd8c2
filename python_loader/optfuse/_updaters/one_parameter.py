# SPDX-License-Identifier: BSD-3-Clause
"""A class's own step(), of one parameter alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._backward.consumed_gradients import aside
from optfuse._class_code import Own, without_hooks
from optfuse._late import Settings, no_parameters
from optfuse._library.bindings import Error, guard
from optfuse._registered import has_counted_draws, is_registered
from optfuse._updaters.counted import counted

_COUPLED = (
    "optfuse: the step() of {}, called for one parameter, has changed {}: its updates are not "
    "those of single parameters, as a fused back pass makes them; use optfuse.fuse(optimizer) in "
    'forward mode, or mode="backward"'
)


def step_alone(
    optimizer: Optimizer,
    own: Own,
    param: Tensor,
    group: int,
    place: int,
    run: Callable[[Any], Any] | None = None,
) -> None:
    """group, place: of the parameter in the groups. If the class has a step_parameter(), that is
    called, else step(), which finds no other gradient. run: calls step(optimizer) so; None: the
    others are put aside. Of a registered class the groups have no other parameter meanwhile, so
    that nobody goes through all of them each time. Raises optfuse.Error, when that is done, if
    step() has changed anything of the optimizer but this parameter's state, unless it was its
    first."""
    if (one := own.method("step_parameter")) is not None:
        with own.seen(optimizer), draws_of(optimizer, own, param, group, place):
            one(optimizer, param, optimizer.param_groups[group], place)
        return
    state = optimizer.state
    before = Settings(optimizer, keys=no_parameters(state))
    n_others = len(state) - (param in state)
    step: Any = own.method("step")
    draws = draws_of(optimizer, own, param, group, place)
    with own.seen(optimizer), without_hooks(optimizer), draws:
        if is_registered(own.stock):
            with _narrowed(optimizer, param, group):
                step(optimizer)
        elif run is not None:
            run(step)
        else:
            with aside([p for p in parameters_of(optimizer) if p is not param], others=True):
                step(optimizer)
    changed = before.changed(optimizer)
    if changed is None and len(state) - (param in state) != n_others:
        changed = "the state of another parameter"
    is_first, own.has_run = not own.has_run, True
    if changed is not None and not is_first and guard("coupled"):
        raise Error(_COUPLED.format(own.stock.__name__, changed))


def draws_of(
    optimizer: Optimizer, own: Own, param: Tensor, group: int, place: int
) -> contextlib.AbstractContextManager[None]:
    """Around step() of one parameter: who answers its draws."""
    if not has_counted_draws(own.stock):
        return contextlib.nullcontext()
    number = place + sum(len(one["params"]) for one in optimizer.param_groups[:group])
    return counted(optimizer, own.stock.__name__, param, group, number)


@contextlib.contextmanager
def _narrowed(optimizer: Optimizer, param: Tensor, group: int) -> Iterator[None]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    lists = [one["params"] for one in groups]
    for i, one in enumerate(groups):
        one["params"] = [param] if i == group else []
    try:
        yield
    finally:
        for one, params in zip(groups, lists, strict=True):
            one["params"] = params
