# SPDX-License-Identifier: BSD-3-Clause
"""Random numbers of a class's own step(), answered by a counter: functions of the parameter, its
update and the draw's number in it, so that no order of parameters, thread or device changes them
(register(random="counter"))."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from optfuse._library.bindings import Error
from optfuse._random_bits import random_bits

SEED = "random_seed"  # an option of a group; 0 where there is none
_STEP, _OWN_STEP = "step", "random_step"  # keys of the state: the class's count of updates, or ours
_FRACTION = {torch.float32: 24, torch.float64: 32, torch.bfloat16: 8, torch.float16: 11}  # bits
_MOST = 1 << 31
_OTHER = (
    "optfuse: step() of {} draws random numbers by {}, which a counter does not answer: "
    "randint, randint_like, rand and rand_like are; leave random= of register() out"
)


class _Draws(TorchDispatchMode):
    """Each draw is a stream of its own."""

    def __init__(self, name: str, seed: int, step: int, parameter: int) -> None:
        super().__init__()
        self._name = name
        self._key = seed, step, parameter
        self._stream = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        match func._schema.name:
            case "aten::randint" | "aten::randint_like":
                return self._integers(given)
            case "aten::rand" | "aten::rand_like":
                return self._fractions(given)
        raise Error(_OTHER.format(self._name, func))

    def _words(self, given: dict[str, Any]) -> Tensor:
        """32 bits an element, in int64."""
        size = given["self"].shape if "self" in given else given["size"]
        bits = random_bits(*self._key, self._stream, size, torch.float16)
        self._stream += 1
        return bits.to(torch.int64).bitwise_and_(0xFFFFFFFF)

    def _integers(self, given: dict[str, Any]) -> Tensor:
        low, high = given.get("low", 0), given["high"]
        if not 0 < high - low <= _MOST:
            raise Error(_OTHER.format(self._name, f"randint() from {low} to {high}"))
        drawn = self._words(given).mul_(high - low).bitwise_right_shift_(32).add_(low)
        return _like(given, drawn, torch.int64)

    def _fractions(self, given: dict[str, Any]) -> Tensor:
        dtype = _dtype_of(given, torch.get_default_dtype())
        n = _FRACTION[dtype]
        drawn = self._words(given).bitwise_right_shift_(32 - n).to(torch.float64)
        return _like(given, drawn.mul_(2.0**-n), dtype)


def _dtype_of(given: dict[str, Any], default: torch.dtype) -> torch.dtype:
    like = given["self"].dtype if "self" in given else default
    return given.get("dtype") or like


def _like(given: dict[str, Any], drawn: Tensor, default: torch.dtype) -> Tensor:
    of = given.get("self")
    device = given.get("device") or (drawn.device if of is None else of.device)
    return drawn.to(device=device, dtype=_dtype_of(given, default))


@contextlib.contextmanager
def counted(
    optimizer: Optimizer, name: str, param: Tensor, group: int, number: int
) -> Iterator[None]:
    """Around step() of one parameter. number: that state_dict() has for it."""
    state = optimizer.state
    entry = state.get(param, {})
    step = int(entry.get(_STEP, entry.get(_OWN_STEP, 0))) + 1
    seed = optimizer.param_groups[group].get(SEED, 0)
    with _Draws(name, seed, step, number):
        yield
    if _STEP not in state[param]:
        state[param][_OWN_STEP] = step
