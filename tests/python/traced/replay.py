# SPDX-License-Identifier: BSD-3-Clause
"""Steps of an optimizer by what the recorder says of its step(), computed by PyTorch's operators.
It shares no code with the kernels that run programs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._own_step.twin import (
    SHARED,
    Entry,
    Twin,
    attributes_of,
    own_attributes,
    own_options,
    put_shared_state,
)
from optfuse._traced.guide import Place, Recorded, like, record
from optfuse._traced.program import GRAD, PARAM, REGISTERS, STATE, inputs_of


def _comparisons(name: str) -> dict[str, Callable[..., Tensor]]:
    compare = getattr(torch, name)
    return {
        name: lambda a, b, s, t: compare(a, b).to(a.dtype),
        f"{name}_number": lambda a, s, t: compare(a, s).to(a.dtype),
    }


# Functions of the registers that an operator reads, and of s and t. Booleans are 0 and 1, as in
# programs.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "copy": lambda a, s, t: a.clone(),
    "neg": lambda a, s, t: a.neg(),
    "abs": lambda a, s, t: a.abs(),
    "sign": lambda a, s, t: a.sign(),
    "square": lambda a, s, t: a.square(),
    "cube": lambda a, s, t: a.pow(3),
    "invsquare": lambda a, s, t: a.pow(-2),
    "sqrt": lambda a, s, t: a.sqrt(),
    "rsqrt": lambda a, s, t: a.rsqrt(),
    "reciprocal": lambda a, s, t: a.reciprocal(),
    "logical_not": lambda a, s, t: (a == 0).to(a.dtype),
    "add": lambda a, b, s, t: a.add(b, alpha=s),
    "add_number": lambda a, s, t: a.add(s),
    "number_add": lambda a, s, t: torch.rsub(a, s, alpha=-t),
    "mul": lambda a, b, s, t: a.mul(b),
    "mul_number": lambda a, s, t: a.mul(s),
    "div": lambda a, b, s, t: a.div(b),
    "div_number": lambda a, s, t: a.div(s),
    "number_div": lambda a, s, t: torch.tensor(s, dtype=torch.float64).div(a),
    "addcmul": lambda a, b, c, s, t: a.addcmul(b, c, value=s),
    "addcdiv": lambda a, b, c, s, t: a.addcdiv(b, c, value=s),
    "lerp": lambda a, b, s, t: a.lerp(b, s),
    "maximum": lambda a, b, s, t: torch.maximum(a, b),
    "minimum": lambda a, b, s, t: torch.minimum(a, b),
    "clamp_min": lambda a, s, t: a.clamp(min=s),
    "clamp_max": lambda a, s, t: a.clamp(max=s),
    "clamp": lambda a, b, c, s, t: a.clamp(b, c),
    "where": lambda a, b, c, s, t: torch.where(a != 0, b, c),
    "where_number_first": lambda a, b, s, t: torch.where(a != 0, s, b),
    "where_number_second": lambda a, b, s, t: torch.where(a != 0, b, s),
    "logical_and": lambda a, b, s, t: ((a != 0) & (b != 0)).to(a.dtype),
    "logical_or": lambda a, b, s, t: ((a != 0) | (b != 0)).to(a.dtype),
}
for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    OPERATORS.update(_comparisons(_name))


def run(recorded: Recorded, param: Tensor, grad: Tensor, state: list[Tensor]) -> None:
    """The program, on tensors that it writes to. A register that nothing has written fails."""
    registers: dict[int, Tensor] = {PARAM: param, GRAD: grad}
    registers.update({STATE + i: tensor for i, tensor in enumerate(state)})
    given = dict(registers)
    for line in recorded.program.instructions:
        operator, to, *_, s, t = line
        assert to < REGISTERS
        if operator == "fill":
            made = torch.full_like(param, s)
        else:
            made = OPERATORS[operator](*(registers[r] for r in inputs_of(line)), s, t)
        assert made.dtype == param.dtype
        registers[to] = made
    with torch.no_grad():
        for register, tensor in given.items():
            tensor.copy_(registers[register])


class Replay:
    """step() of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.names: list[str] = []  # of state tensors
        self.recorded: list[Recorded] = []  # of the last step
        self._twin = Twin(type(optimizer))

    def step(self) -> None:
        optimizer = self.optimizer
        attributes = attributes_of(optimizer)
        before = own_attributes(attributes)
        self.recorded = []
        for group in optimizer.param_groups:
            options = own_options(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                given = {**attributes, **copy.deepcopy(before)}
                recorded = self._record(given, copy.deepcopy(options), param)
                self._update(param, recorded)
                self.recorded.append(recorded)
            group.update(self.recorded[-1].options)
        left = own_attributes(self.recorded[-1].attributes)
        put_shared_state(optimizer, left.pop(SHARED, {}))
        optimizer.__dict__.update(left)

    def _record(self, attributes: dict[str, Any], options: Any, param: Tensor) -> Recorded:
        entry = like(self.optimizer.state.get(param), param, self.names)
        shape = tuple(param.shape)
        recorded = record(
            self._twin, attributes, options, shape, param.dtype, entry, list(self.names)
        )
        self.names = list(recorded.names)
        return recorded

    def _update(self, param: Tensor, recorded: Recorded) -> None:
        if recorded.entry is not None:
            known = self.optimizer.state[param]
            entry = {k: _after(k, v, known, param) for k, v in recorded.entry.items()}
            known.clear()
            known.update(entry)
        entry = self.optimizer.state.get(param, {})
        unused = torch.full_like(param, math.nan)
        state = [entry[name] if name in entry else unused.clone() for name in recorded.names]
        assert param.grad is not None
        run(recorded, param.detach(), param.grad, state)


def _after(key: str, value: Any, known: Entry, param: Tensor) -> Any:
    if not isinstance(value, Place):
        return copy.deepcopy(value)
    return known[key] if key in known else torch.full_like(param.detach(), math.nan)
