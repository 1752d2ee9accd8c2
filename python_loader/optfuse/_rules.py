# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer classes that fuse, and where their numbers are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor, Muon, Optimizer

# Imported from the modules that define them: a script may have put a class of its own into
# torch.optim.
from torch.optim.adadelta import Adadelta
from torch.optim.adagrad import Adagrad
from torch.optim.adam import Adam
from torch.optim.adamax import Adamax
from torch.optim.adamw import AdamW
from torch.optim.asgd import ASGD
from torch.optim.nadam import NAdam
from torch.optim.radam import RAdam
from torch.optim.rmsprop import RMSprop
from torch.optim.rprop import Rprop
from torch.optim.sgd import SGD

from optfuse._arguments.check import shown
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._gpu import lr_of
from optfuse._library.bindings import Error, lib
from optfuse._library.loader import REBUILD
from optfuse.optim import CLASSES, ROUNDING

Group = dict[str, Any]
MakeState = Callable[[Optimizer, type[Optimizer], Group, Tensor], None]


@functools.cache
def _n_lists(stock: type[Optimizer]) -> int:
    """How many lists _init_group() fills."""
    return len(inspect.signature(stock._init_group).parameters) - 2  # type: ignore[attr-defined]


def _stock_state(optimizer: Optimizer, stock: type[Optimizer], group: Group, param: Tensor) -> None:
    """Stock's own lazy initialisation, for one parameter."""
    init: Any = stock._init_group  # type: ignore[attr-defined]
    lists: list[list[Tensor]] = [[] for _ in range(_n_lists(stock))]  # type: ignore[arg-type]
    init(optimizer, {**group, "params": [param]}, *lists)


def _sgd_state(optimizer: Optimizer, stock: type[Optimizer], group: Group, param: Tensor) -> None:
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(
        param, memory_format=torch.preserve_format, requires_grad=False
    )


#: References that compute with options in Python, in whatever precision these have.
_IN_PYTHON = ("foreach=False", "own step()")


def _is_of_other_precision(value: object) -> bool:
    """A tensor, or a number of NumPy's in less or more bits than a float."""
    if isinstance(value, Tensor):
        return True
    dtype = getattr(value, "dtype", None)
    return getattr(dtype, "kind", "") == "f" and dtype.itemsize != 8


#: Where in a group an option of the C rules is, if not under its own name.
_PLACES = {
    "beta1": "betas.0",
    "beta2": "betas.1",
    "beta3": "betas.2",
    "etaminus": "etas.0",
    "etaplus": "etas.1",
    "step_size_min": "step_sizes.0",
    "step_size_max": "step_sizes.1",
}


def _rows(text: str) -> dict[str, dict[str, Any]]:
    """The fields of Rule that the C library's table of rules has (kernels/rules/lists.h)."""
    rows = {}
    for line in text.splitlines():
        name, kind, steps, *lists = line.split(":")
        state, options, counters = (tuple(words.split()) for words in lists)
        rows[name] = {
            "options": tuple(_PLACES.get(option, option) for option in options),
            "state": state,
            "counters": counters,
            "counts_on_gpu": steps == "COUNTED_ON_GPU",
            "counts_steps": steps != "UNCOUNTED",
            "rounds": kind == "ROUNDED",
        }
    return rows


ROWS = _rows(lib.of_shim_rules().decode())


@dataclass(frozen=True)
class Rule:
    """One row for each stock class: what the C library's row has, and more."""

    name: str  # of the C rule
    options: tuple[str, ...]  # its hyper-parameters in the C rule's order; "betas.0": the first
    state: tuple[str, ...]  # its state tensors in the C rule's order
    counters: tuple[str, ...]  # 0-dim tensors other than "step" that count updates
    counts_on_gpu: bool  # of a parameter on a GPU all of these are there, too
    counts_steps: bool  # there is a "step"
    # It computes in float32 and rounds once: parameters of 16 bits may have float32 state. It has
    # no kernels for float64.
    rounds: bool
    # The implementation of PyTorch on the CPU whose bits are reproduced, and the
    # flag of a group that selects it.
    reference: str = "fused=True"
    make_state: MakeState = _stock_state
    # The reference computes its scalars in the dtype of a learning rate that is a
    # tensor; we always do in float64.
    lr_makes_scalars: bool = False
    # Whether updates on a GPU have to pass a trial there against the class's own step() ...
    tried: bool = False
    as_made: bool = False  # ... and has: its bits are the class's, with its own flags
    fuses_dtensors: bool = False  # PyTorch's fused=True takes DTensors
    takes_mixed: bool = False  # and, on GPUs, float32 parameters whose state is bfloat16
    scales: bool = False  # step() reads the optimizer's grad_scale and found_inf
    because: tuple[str, ...] = ()  # why step() is recorded, where kernels might update
    _where: list[tuple[str, int | None]] = field(init=False, repr=False, compare=False)
    _lengths: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        split = [name.partition(".") for name in self.options]
        where = [(key, int(index) if index else None) for key, _, index in split]
        object.__setattr__(self, "_where", where)
        lengths = {key: 1 + index for key, index in where if index is not None}
        object.__setattr__(self, "_lengths", lengths)

    def hyper(self, group: Group) -> tuple[float, ...]:
        """A group's numbers, as the C rule wants them."""
        try:
            numbers = tuple(
                [
                    lr_of(group)
                    if key == "lr"
                    else float(group[key] if i is None else group[key][i])
                    for key, i in self._where
                ]
            )
        except (TypeError, ValueError, LookupError) as error:
            raise type(error)(self._named(group)) from None
        if self.reference in _IN_PYTHON:
            self._refuse_other_precisions(group)
        return numbers

    def _refuse_other_precisions(self, group: Group) -> None:
        """Raises optfuse.Error for an option that is no double. (docs/numerics.md has tensors as
        learning rates.)"""
        is_negated_alone = not (self.lr_makes_scalars or self.as_made)
        for key, i in self._where:
            value = group[key] if i is None else group[key][i]
            if key == "lr" and (isinstance(value, Tensor) or is_negated_alone):
                continue
            if _is_of_other_precision(value):
                raise Error(
                    f"optfuse: option {key!r} of a parameter group is {value!r}, with which "
                    "PyTorch's step() computes its scalars in that precision, and optfuse in "
                    "double; make it a float, as by float(...)"
                )

    def changed_option(self, known: tuple[float, ...], group: Group) -> str | None:
        """The first option of a group that is no longer as hyper() has found it."""
        pairs = zip(self.options, known, self.hyper(group), strict=True)
        changed = (name for name, a, b in pairs if a is not b and a != b)
        return next((name.partition(".")[0] for name in changed), None)

    def _named(self, group: Group) -> str:
        """Says which option is no number."""
        for key, i in self._where:
            try:
                float(group[key] if i is None else group[key][i])
            except Exception:
                wanted = "a number" if i is None else f"{self._lengths[key]} numbers"
                found = shown(group[key]) if key in group else "missing"
                return f"option {key!r} of a parameter group is {found}, and must be {wanted}"
        return "an option of a parameter group is no number"

    def flags(self, group: Group) -> Group:
        """The options of a group that select the reference on the CPU, and on GPUs of
        rules that are not tried there, where the group selects another one."""
        is_fused = self.reference == "fused=True"
        wanted = {"capturable": False, "fused": is_fused, "foreach": False}
        return {flag: value for flag, value in wanted.items() if flag in group}

    def on_gpus(self) -> Rule:
        """Where the trial was passed."""
        return replace(self, reference="own step()", as_made=True)

    def bucket_bytes(self, asked: int) -> int:
        """How many bytes of updates wait for each other; 0: the library's own number."""
        return asked

    def numbers_on_gpu(self) -> tuple[str, ...]:
        """Keys of the state whose tensors are where the parameter is."""
        return ("step", *self.counters) if self.counts_on_gpu else ()

    def difference(self, group: Group) -> str:
        """The option of the group that selects an implementation other than the one whose bits
        are reproduced; empty if nothing does."""
        if self.as_made:
            return ""
        lr = group.get("lr")
        if self.lr_makes_scalars and isinstance(lr, Tensor) and lr.dtype != torch.float64:
            return f"a tensor of {lr.dtype} as lr"
        is_fused = self.reference == "fused=True"
        if is_fused and not self.fuses_dtensors and any(map(is_dtensor, group["params"])):
            return "DTensor parameters, for which this class has no fused=True"
        if group.get("fused") if is_fused else not group.get("foreach"):
            return ""
        return ", ".join(f"{flag}={group.get(flag)}" for flag in ("fused", "foreach"))


@dataclass(frozen=True)
class AnyRule(Rule):
    """Options, state and formula are those of any class, and come with each step's programs."""

    def hyper(self, group: Group) -> tuple[float, ...]:
        return ()

    def difference(self, group: Group) -> str:
        return ""


@dataclass(frozen=True)
class RecordedRule(AnyRule):
    """That of an optimizer whose own step() is recorded."""


@dataclass(frozen=True)
class RegisteredRule(AnyRule):
    """That of an optimizer whose own step() runs on one parameter at a time, in backward mode."""

    native: str = ""  # of an update by torch's operators in its place (_updaters/native.py)

    def bucket_bytes(self, asked: int) -> int:
        return 1  # they don't wait


RECORDED = RecordedRule("programs", **ROWS["programs"], reference="own step()")
RECORDED_OBJECT = replace(RECORDED, because=("step() was replaced on this object",))
REGISTERED = RegisteredRule("programs", **ROWS["programs"], reference="own step()")


def _rule(name: str, **more: Any) -> Rule:
    return Rule(name, **ROWS[name], **more)


_ADAM = _rule("adam", fuses_dtensors=True, takes_mixed=True, scales=True)
_loop = functools.partial(_rule, reference="foreach=False", tried=True)

RULES: dict[type[Optimizer], Rule] = {
    SGD: _rule("sgd", make_state=_sgd_state, scales=True),
    Adam: _ADAM,
    AdamW: _ADAM,
    Adagrad: _rule("adagrad", tried=True, scales=True),
    RMSprop: _loop("rmsprop"),
    Adadelta: _loop("adadelta"),
    NAdam: _loop("nadam", lr_makes_scalars=True),
    RAdam: _loop("radam", lr_makes_scalars=True),
    Adamax: _loop("adamax", lr_makes_scalars=True),
    Rprop: _loop("rprop"),
    ASGD: _loop("asgd", lr_makes_scalars=True),
}
# Those of optfuse.optim have the name of their rule.
RULES |= {cls: _rule(cls.__name__.lower(), reference="step()", tried=True) for cls in CLASSES}
RULES |= {cls: _rule(name, reference="step()", tried=True) for cls, name in ROUNDING.items()}

# In backward mode. They look at numbers of gradients, or call many operators on small matrices.
NATIVE: dict[type[Optimizer], RegisteredRule] = {
    Adafactor: replace(REGISTERED, native="adafactor"),
    Muon: replace(REGISTERED, native="muon"),
}


def _check_table() -> None:
    """Raises ImportError if an option of a C rule is none of the class that it updates."""
    for stock, rule in RULES.items():
        makers = {cls.__init__ for cls in stock.__mro__}
        known = {name for make in makers for name in inspect.signature(make).parameters}
        for option in rule.options:
            if option.partition(".")[0] not in known:
                raise ImportError(
                    f"optfuse: the library's rule {rule.name!r} has an option {option!r}, which "
                    f"{stock.__name__} of this torch has not: {REBUILD}"
                )


_check_table()
