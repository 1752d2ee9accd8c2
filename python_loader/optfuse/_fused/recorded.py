# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of classes without kernels whose own step() is recorded (shim/recorded): step() runs
once, on the optimizer itself, and the operators that it calls run together at its end.
With OPTFUSE_RECORDED=0, or fuse(recorded=False), it is called as it is."""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._class_code import Own
from optfuse._clipping.torch_functions import stock_clip_grad_norm_
from optfuse._library.bindings import Error, lib, lib_with_gil
from optfuse._options import RECORDED, Options
from optfuse._patches import raw_memory
from optfuse._patches.profiling import addresses_are_noted
from optfuse._registered import has_counted_draws
from optfuse._updaters import shared_state
from optfuse._updaters.one_parameter import step_alone

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_STEP = "step"
_OURS = (_STEP, RECORDED, "__getstate__", "__deepcopy__")  # attributes of the optimizer
_OF_TRAINERS = ("step_parameter", "step_param", "supports_fused_back_pass")  # if its class has none
_COUNTS = ("lines", "plays", "at_once", "programs", "operators")


_dynamo_skips = functools.partial(torch._dynamo.disable, recursive=False)


@torch._dynamo.disable
def _untraced(step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return lib_with_gil.of_shim_recorded_step(None, step, args, kwargs)


@Optimizer.profile_hook_step
def _each_parameter(optimizer: Optimizer, own: Own) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(list(group["params"])):
            if param.grad is not None:
                step_alone(optimizer, own, param, number, place)


class Step:
    """Takes the place of the method on the optimizer, whose class stays as it is."""

    unasked: Callable[[], None] | None = None  # run fused it: whom to tell

    def __init__(self, optimizer: Optimizer, options: Options, because: tuple[str, ...]) -> None:
        self.before = optimizer.__dict__.get(_STEP)  # a scheduler's, which counts calls
        functools.update_wrapper(self, self.before or type(optimizer).step)
        self.owner = weakref.ref(optimizer)
        self.options, self.because = options, because
        self.counts = (ctypes.c_int64 * len(_COUNTS))()  # of the last one
        self.is_fused = True
        self.given: list[str] = []  # of _OF_TRAINERS, to the optimizer
        self.alone = threading.RLock()  # in one step() at a time
        self._own = Own(type(optimizer), {} if self.before is None else {_STEP: self.before})

        def function(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self.__func__ = function  # a scheduler takes it, as of a method

    @_dynamo_skips
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.before
        if step is None:
            optimizer = self._living_owner()
            step, args = type(optimizer).step, (optimizer, *args)
        if not self.is_fused:
            return step(*args, **kwargs)
        if has_counted_draws(type(self.owner())):
            return self._step_by_parameters(*args[1:] if self.before is None else args, **kwargs)
        if self.options.max_grad_norm is not None or self.options.eager:
            step = functools.partial(self._prepare_and_step, step)
        if (
            not self.options.recorded or addresses_are_noted()
        ):  # which tensors without numbers don't have
            return step(*args, **kwargs)
        if get_eval_frame_callback() is not None:
            return _untraced(step, args, kwargs)
        with self.alone:
            made = lib_with_gil.of_shim_recorded_step(None, step, args, kwargs)
            lib.of_shim_recorded_counts(self.counts)
            return made

    def step_parameter(self, p: Tensor, group: dict[str, Any], i: int | None = None) -> None:
        """See _fused/final.py."""
        optimizer = self._living_owner()
        groups = enumerate(optimizer.param_groups)
        number = next((n for n, its in groups if its is group), None)
        places = (n for n, its in enumerate(group["params"]) if its is p)
        place = next(places, None)
        if number is None or place is None:
            raise Error(
                "optfuse: step_parameter() got a parameter and a group that is none of "
                "optimizer.param_groups, or does not have it now: load_state_dict() makes new ones"
            )
        if p.grad is not None:
            with self.alone:
                step_alone(optimizer, self._own, p, number, place)

    def _step_by_parameters(self, closure: Callable[[], Any] | None = None) -> Any:
        """step() of a class whose draws a counter answers."""
        optimizer = self._living_owner()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._clip()
        with self.alone:
            _each_parameter(optimizer, self._own)
        return loss

    def step_param(self, p: Tensor, group: dict[str, Any]) -> None:
        self.step_parameter(p, group)

    def _living_owner(self) -> Optimizer:
        if (optimizer := self.owner()) is None:  # a cycle would keep its state
            raise Error(
                "optfuse: step() was called of an optimizer that is gone: unlike a method, "
                "`optimizer.step` doesn't keep it; keep the optimizer itself"
            )
        return optimizer

    def _prepare_and_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for param in self.options.eager:
            torch.ops.optfuse.access(param)  # whose address is known: it is on no line
        closure = kwargs.get("closure", next(filter(callable, args), None))
        if closure is None:
            return self._clip_and_step(step, args, kwargs)

        def clipped(*its: Any, **named: Any) -> Any:
            loss = closure(*its, **named)
            self._clip()
            return loss

        if kwargs.get("closure") is closure:
            kwargs["closure"] = clipped
        return step(*(clipped if arg is closure else arg for arg in args), **kwargs)

    def _clip_and_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Clips what hooks before step() have left, as it is with kernels."""
        optimizer = self._living_owner()
        if self.options.max_grad_norm is None or not getattr(type(optimizer).step, "hooked", False):
            self._clip()
            return step(*args, **kwargs)
        to_do = [self._clip]  # a step() that calls that of its base runs hooks twice
        last = optimizer.register_step_pre_hook(lambda *_: to_do.pop()() if to_do else None)
        try:
            return step(*args, **kwargs)
        finally:
            last.remove()

    def _clip(self) -> None:
        max_norm = self.options.max_grad_norm
        if max_norm is None:
            return
        params = parameters_of(self._living_owner())
        # PyTorch's operators on lists can't write negated ones.
        negated = any(p.grad is not None and p.grad.is_neg() for p in params)
        stock_clip_grad_norm_(params, max_norm, foreach=False if negated else None)

    def state_of_owner(self) -> Any:
        """The attributes that are pickled, or copied: stock's."""
        optimizer = self.owner()
        state = type(optimizer).__getstate__(optimizer)  # type: ignore[attr-defined]
        if state is not None and RECORDED in state:  # all attributes
            state = {k: v for k, v in state.items() if k not in (*_OURS, *self.given)}
            if self.before is not None:
                state[_STEP] = self.before
        return state

    def copy_of_owner(self, memo: dict[int, Any]) -> Optimizer:
        optimizer: Any = self.owner()
        if (copies := getattr(type(optimizer), "__deepcopy__", None)) is not None:
            return copies(optimizer, memo)  # type: ignore[no-any-return]
        make, its, state, *_ = optimizer.__reduce_ex__(4)
        twin = memo[id(optimizer)] = make(*its)
        twin.__setstate__(copy.deepcopy(state, memo))
        eager = copy.deepcopy(self.options.eager, memo)
        return record(twin, replace(self.options, eager=eager), self.because)

    def described(self) -> str:
        because = f", because {', '.join(self.because)}" if self.because else ""
        if not self.options.recorded:
            return f"its own step() is called as it is{because}"
        counts = last_counts(self)
        return (
            f"its own step() is recorded{because}: in the last one {counts['lines']} operators ran "
            f"as {counts['programs']} programs and {counts['operators']} operators, and "
            f"{counts['at_once']} at once"
        )


def is_asked(recorded: bool | None) -> bool:
    return os.environ.get("OPTFUSE_RECORDED") != "0" if recorded is None else recorded


def record(optimizer: OptimizerT, options: Options, because: tuple[str, ...]) -> OptimizerT:
    """None of the class's code runs. because: why its class's kernels do not update."""
    raw_memory.watch_recorded()
    step = Step(optimizer, options, because)
    ours = step, step, step.state_of_owner, step.copy_of_owner
    optimizer.__dict__.update(zip(_OURS, ours, strict=True))
    protocol = step.step_parameter, step.step_param, True
    for name, value in zip(_OF_TRAINERS, protocol, strict=True):
        if not hasattr(type(optimizer), name) and name not in optimizer.__dict__:
            optimizer.__dict__[name] = value
            step.given.append(name)
    shared_state.fused[id(optimizer)] = optimizer
    return optimizer


def unfuse_recorded(optimizer: Optimizer) -> None:
    step = optimizer.__dict__[RECORDED]
    for name in (*_OURS[1:], *step.given):
        optimizer.__dict__.pop(name, None)
    step.is_fused = False  # somebody may have it
    if optimizer.__dict__.get(_STEP) is step:
        del optimizer.__dict__[_STEP]
        if step.before is not None:
            optimizer.__dict__[_STEP] = step.before


def last_counts(step: Step | None = None) -> dict[str, int]:
    """Those of an optimizer's last step(), or of this thread's."""
    counts = (ctypes.c_int64 * len(_COUNTS))()
    if step is None:
        lib.of_shim_recorded_counts(counts)
    return dict(zip(_COUNTS, counts if step is None else step.counts, strict=True))
