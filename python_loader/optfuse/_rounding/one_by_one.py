# SPDX-License-Identifier: BSD-3-Clause
"""The step() that optimizers of optfuse.optim have in common."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._rounding import MOST_SEED, NARROW, store

Group = dict[str, Any]
Entry = dict[str, Any]
States = list[Tensor]


class OneByOne(Optimizer):
    """An optimizer that updates its parameters one by one, with _update()."""

    STATE: tuple[str, ...] = ()  # tensors of a parameter's shape and dtype, at first zeros
    COUNTS = False  # there is a "step", a 0-dim float32 tensor on the CPU

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)
        for entry in self.state.values() if self.COUNTS else ():
            entry["step"] = torch.as_tensor(entry["step"], dtype=torch.float32, device="cpu")

    def _init_group(self, group: Group, params: list[Tensor], states: list[Entry]) -> None:
        """Collects the parameters that have a gradient, and makes their state."""
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            state = self.state[param]
            if not state:
                self._make_state(group, param, state)
            params.append(param)
            states.append(state)

    def _make_state(self, group: Group, param: Tensor, state: Entry) -> None:
        if self.COUNTS:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        dtype = self._state_dtype(group, param)
        for name in self.STATE:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _state_dtype(self, group: Group, param: Tensor) -> torch.dtype:
        return param.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what closure
        returns, which is called first with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = chain.from_iterable(group["params"] for group in self.param_groups)
        numbers = {id(param): i for i, param in enumerate(every)}
        for group in self.param_groups:
            params: list[Tensor] = []
            states: list[Entry] = []
            self._init_group(group, params, states)
            for param, state in zip(params, states, strict=True):
                assert param.grad is not None
                grad = -param.grad if group.get("maximize") else param.grad
                self._update(group, param, grad, state, numbers[id(param)])
        return loss

    def _update(self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int) -> None:
        """grad: with the sign that descends. number: what state_dict() calls the parameter."""
        raise NotImplementedError


class Rounding(OneByOne):
    """Computes in float32, whatever is in memory, and rounds once: parameters of 16 bits to nearest
    or, by their group's stochastic_rounding, stochastically. Their state is float32; with
    stochastic_state it is of their dtype, and rounded so, too."""

    COUNTS = True

    def _state_dtype(self, group: Group, param: Tensor) -> torch.dtype:
        is_wide = param.dtype in NARROW and not group["stochastic_state"]
        return torch.float32 if is_wide else param.dtype

    def _update(self, group: Group, param: Tensor, grad: Tensor, state: Entry, number: int) -> None:
        state["step"] += 1
        step = int(state["step"].item())
        stored = [param, *(state[name] for name in self.STATE)]
        wide = [tensor.float() if tensor.dtype in NARROW else tensor for tensor in stored]
        self._compute(
            group, wide[0], grad.float() if grad.dtype in NARROW else grad, wide[1:], step
        )
        for stream, (to, numbers) in enumerate(zip(stored, wide, strict=True)):
            if to is numbers:
                continue  # it was computed in place
            if group["stochastic_rounding"] and (stream == 0 or group["stochastic_state"]):
                store(to, numbers, int(group["seed"]), step, number, stream)
            else:
                to.copy_(numbers)

    def _compute(self, group: Group, param: Tensor, grad: Tensor, state: States, step: int) -> None:
        """The update in place, of param and of state, in the order of STATE."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim, but state keeps its dtype, which PyTorch makes the parameter's."""
        found: list[dict[str, Any]] = []  # as hooks have left it, which run before this one
        look = self.register_load_state_dict_pre_hook(lambda _, given: found.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            look.remove()
        ((given),) = found
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(numbers, params, strict=True):
            for name, saved in given["state"].get(number, {}).items():
                now = self.state[param][name]
                if name in self.STATE and saved.dtype is not now.dtype:
                    self.state[param][name] = saved.to(device=now.device, copy=True)


def rounding_options(rounding: bool, state: bool, seed: int) -> Group:
    """The options of a group."""
    if state and not rounding:
        raise ValueError("Invalid stochastic_state=True without stochastic_rounding=True")
    if not (isinstance(seed, int) and 0 <= seed <= MOST_SEED):
        raise ValueError(f"Invalid seed, a whole number from 0 to 2**53 - 1: {seed}")
    return {"stochastic_rounding": rounding, "stochastic_state": state, "seed": seed}


def check_numbers(lr: Any, betas: Any, n_betas: int, weight_decay: float, eps: float = 0.0) -> None:
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if len(betas) != n_betas:
        raise ValueError(f"Invalid betas, which are {n_betas} numbers: {betas}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
