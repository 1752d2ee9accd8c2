# SPDX-License-Identifier: BSD-3-Clause
"""The step() of an optimizer's class."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

_HOOKED = Optimizer.profile_hook_step(lambda _: None).__code__


def step_of(stock: type[Optimizer]) -> Callable[..., Any]:
    """The class's own step() without the profiler's and the hooks' wrapper, but with a script's, to
    which functools.wraps() gives the attributes of that one."""
    step: Any = stock.step
    is_hooked = getattr(step, "__code__", None) is _HOOKED
    return step.__wrapped__ if is_hooked else step  # type: ignore[no-any-return]


@contextlib.contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Those of step() run around that of the optimizer, and not around one that it calls."""
    own = optimizer.__dict__
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    hooks = {name: own[name] for name in names if own.get(name)}
    own.update((name, OrderedDict()) for name in hooks)
    try:
        yield
    finally:
        own.update(hooks)
