# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of values that public functions take. checked() looks at the arguments before the
function begins, so nothing has changed when one of them is refused."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optfuse._arguments.wrappers import unwrapped
from optfuse._library.bindings import Error
from optfuse._options import is_disabled, owner_of

P = ParamSpec("P")
T = TypeVar("T")


#: Steps of a delay, each of which may keep another version of a parameter.
LONGEST = 1_000_000


class Unfit(Exception):
    """The argument is something else. Its text is a hint, or empty."""


@dataclass(frozen=True)
class Kind:
    """A kind of value that an argument must have."""

    expected: str
    take: Callable[[Any], Any]  # the argument as the function uses it; raises Unfit


def checked(**kinds: Kind) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Names a kind for every parameter but **keywords, which the function looks at. Arguments
    that are not given are not looked at."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        expected = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        if expected != list(kinds):
            raise TypeError(f"{function.__name__}() has {expected}, checked are {[*kinds]}")
        named = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        rest = [n for n, p in parameters.items() if p.kind is p.VAR_POSITIONAL]

        def taken(name: str, value: Any) -> Any:
            return argument(function.__name__, name, value, kinds[name]) if name in kinds else value

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            names = itertools.chain(named, itertools.cycle(rest)) if rest else named
            known = list(map(taken, names, args))  # too many are left to Python to refuse
            options = {name: taken(name, value) for name, value in kwargs.items()}
            return function(*known, *args[len(known) :], **options)  # type: ignore[arg-type]

        return call

    return decorate


def argument(function: str, name: str, value: Any, kind: Kind) -> Any:
    """The value as the function uses it. Raises optfuse.Error if it is of another kind."""
    try:
        return kind.take(value)
    except Unfit as unfit:
        hint = str(unfit)
    raise refusal(function, name, value, kind.expected, hint)


def refusal(function: str, name: str, value: Any, expected: str, hint: str = "") -> Error:
    found = f"optfuse: {function}() got {name}={shown(value)}"
    return Error("; ".join(filter(None, (found, f"{name} must be {expected}", hint))))


class _Shown(reprlib.Repr):
    """Short, and without the contents of tensors, which may be large or pending."""

    def repr_instance(self, value: Any, level: int) -> str:
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}, a class"
        if value is None or isinstance(value, bool | numbers.Number):
            return repr(value)
        if isinstance(value, Tensor) and (value.dim() or value.device.type != "cpu"):
            return f"<{type(value).__name__} of shape {tuple(value.shape)}>"
        if isinstance(value, Tensor):
            return f"tensor({value.item()})"
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


shown = _Shown().repr


def label(group: dict[str, Any], group_index: int, index: int) -> str:
    """How errors name a parameter."""
    param = group["params"][index]
    lazy = isinstance(param, nn.parameter.UninitializedTensorMixin)
    shape = "without a shape yet" if lazy else f"of shape {tuple(param.shape)}"
    names = group.get("param_names")
    if names is not None and index < len(names):
        return f"parameter {names[index]!r} {shape}"
    return f"parameter {index} of group {group_index} {shape}"


def need(fits: bool, hint: str = "") -> None:
    if not fits:
        raise Unfit(hint)


# Kinds


def whole(expected: str, least: int, most: int = sys.maxsize) -> Kind:
    """An integer of any type, as int."""

    def take(value: Any) -> int:
        try:
            found = operator.index(value)
        except Exception:
            raise Unfit from None
        need(not isinstance(value, bool) and least <= found <= most)
        return found

    return Kind(expected, take)


def number(
    expected: str, least: float = -math.inf, names: tuple[str, ...] = (), nan: bool = False
) -> Kind:
    """A number of any type, or a tensor with one element, as float. names: strings that are
    numbers here. nan: whether it may be none."""

    def take(value: Any) -> float:
        need(value in names if isinstance(value, str) else not isinstance(value, bool | bytes))
        try:
            found = float(value)
        except Exception:
            raise Unfit from None
        need(found >= least or (nan and math.isnan(found)))
        return found

    return Kind(expected, take)


def text(expected: str) -> Kind:
    def take(value: Any) -> str:
        need(isinstance(value, str))
        return str(value)

    return Kind(expected, take)


def one_of(*names: str) -> Kind:
    def take(value: Any) -> str:
        need(isinstance(value, str) and value in names)
        return str(value)

    return Kind(" or ".join(f'"{name}"' for name in names), take)


def optional(kind: Kind) -> Kind:
    return Kind(f"{kind.expected}, or None", lambda v: None if v is None else kind.take(v))


def _flag(value: Any) -> bool:
    numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    need(isinstance(value, bool) or numpys)
    return bool(value)


def _function(value: Any) -> Any:
    need(callable(value) and not isinstance(value, nn.Module | Optimizer))
    return value


def _build_fn(value: Any) -> Any:
    _function(value)
    try:
        inspect.signature(value).bind(None)
    except TypeError as error:
        raise Unfit(f"this one has {error}") from None
    except ValueError:  # it has no signature
        pass
    return value


def _optimizer(value: Any) -> Optimizer:
    if any(cls.__module__.partition(".")[0] == "deepspeed" for cls in type(value).__mro__):
        raise Unfit(
            "DeepSpeed's engines and optimizers step by themselves: keep them, or shard the model "
            "with torch.distributed.fsdp.fully_shard and fuse an optimizer of torch.optim"
        )
    if isinstance(value, Optimizer):
        return unwrapped(value)
    if isinstance(value, type) and issubclass(value, Optimizer):
        raise Unfit(f"make an instance first: {value.__name__}(model.parameters())")
    if isinstance(value, nn.Module):
        raise Unfit("pass the optimizer of this model, not the model")
    if isinstance(value, list | tuple) and any(isinstance(v, Optimizer) for v in value):
        raise Unfit("pass one optimizer at a time")
    raise Unfit


def _take_fused(value: Any) -> Optimizer:
    optimizer = _optimizer(value)
    if owner_of(optimizer) is None and not is_disabled():
        raise Unfit("this one is not fused, or was unfused")
    return optimizer


def _class(value: Any) -> type[Optimizer]:
    if isinstance(value, Optimizer):
        raise Unfit(f"pass the class itself: register({type(value).__name__})")
    need(isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer)
    return value  # type: ignore[no-any-return]


def tensors(value: Any) -> list[Tensor]:
    """The tensors of an iterable. Only their types are looked at, which takes no time."""
    hint = "pass model.parameters(), not the model" if isinstance(value, nn.Module) else ""
    need(isinstance(value, Iterable) and not isinstance(value, str | bytes), hint)
    listed = list(value)
    strange = [t.__name__ for t in set(map(type, listed)) if not issubclass(t, Tensor)]
    need(not strange, hint or f"an item of it is a {''.join(strange[:1])}")
    return listed


def _eager(value: Any) -> list[Tensor]:
    need(not isinstance(value, Tensor), "pass a list with this tensor")
    return tensors(value)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _parameters(value: Any) -> list[Tensor]:
    if isinstance(value, Optimizer):
        return parameters_of(value)
    return [value] if isinstance(value, Tensor) else tensors(value)


def _variants(value: Any) -> Any:
    need(isinstance(value, Mapping) and len(value) > 0)
    need(all(isinstance(name, str) and callable(wrap) for name, wrap in value.items()))
    return value


def _data_parallel(value: Any) -> DistributedDataParallel:
    if isinstance(value, nn.Module) and not isinstance(value, DistributedDataParallel):
        raise Unfit(f"pass the wrapper itself, not the {type(value).__name__} in it")
    need(isinstance(value, DistributedDataParallel))
    return value  # type: ignore[no-any-return]


def _model(value: Any) -> nn.Module:
    need(isinstance(value, nn.Module))
    return value  # type: ignore[no-any-return]


def _names(value: Any) -> list[str]:
    need(isinstance(value, Iterable) and not isinstance(value, str | bytes), "pass a list")
    listed = list(value)
    need(all(isinstance(name, str) for name in listed))
    return listed


def _schedule(value: Any) -> str | list[str]:
    if isinstance(value, str):
        need(value in ("stock", "last", "reverse_first", "budget", "auto"))
        return value
    return _names(value)


def _layers_or_flag(value: Any) -> bool | list[str]:
    return value if isinstance(value, bool) else _names(value)


def _costs(value: Any, most: int) -> tuple[float, ...]:
    need(isinstance(value, tuple | list) and 2 <= len(value) <= most)
    found = tuple(map(number("", 0.0).take, value))
    need(all(map(math.isfinite, found)))
    return found


def _delay_steps(value: Any) -> dict[Any, int]:
    need(isinstance(value, Mapping))
    need(all(isinstance(key, Tensor | nn.Module) for key in value))
    steps = whole("", 0, LONGEST)
    return {key: steps.take(delay) for key, delay in value.items()}


def _process_group(value: Any) -> dist.ProcessGroup:
    need(isinstance(value, dist.ProcessGroup), "torch.distributed.new_group() makes one")
    return value  # type: ignore[no-any-return]


def _comm_hook(value: Any) -> tuple[Any, Any]:
    need(isinstance(value, tuple | list) and len(value) == 2, "the state may be None")
    state, hook = value
    need(callable(hook), "the second of the two is the function")
    return state, hook


FLAG = Kind("True or False", _flag)
FUNCTION = Kind("a function", _function)
BUILD_FN = Kind("a function that takes one argument, wrap", _build_fn)
OPTIMIZER = Kind("an instance of a subclass of torch.optim.Optimizer", _optimizer)
FUSED = Kind("an optimizer that optfuse.fuse() returned", _take_fused)
OPTIMIZER_CLASS = Kind("a subclass of torch.optim.Optimizer", _class)
DATA_PARALLEL = Kind("a torch.nn.parallel.DistributedDataParallel model", _data_parallel)
MODEL = Kind("a torch.nn.Module", _model)
LAYER_NAMES = Kind("a list, or another iterable, of names of modules", _names)
SCHEDULE = Kind(
    '"stock", "last", "reverse_first", "budget", "auto" or a list of names of modules', _schedule
)
LAYER_NAMES_OR_FLAG = Kind("True, False or a list of names of modules", _layers_or_flag)
NETWORK = Kind("a pair (seconds a message, seconds a byte)", lambda value: _costs(value, 2))
NETWORK_AND_PROCESSOR = Kind(
    "(seconds a message, seconds a byte), or these and the processor's seconds a message",
    lambda value: _costs(value, 3),
)
MEMORY = whole("a number of bytes", 0)
DELAY_STEPS = Kind(
    f"a mapping of parameters or modules to numbers of steps, from 0 to {LONGEST:,}", _delay_steps
)
PROCESS_GROUP = Kind("a process group of torch.distributed", _process_group)
COMM_HOOK = Kind("a pair (state, hook)", _comm_hook)
EAGER = Kind("a list, or another iterable, of parameters of the optimizer", _eager)
PARAMETERS = Kind("an optimizer, a tensor or an iterable of tensors", _parameters)
AB_VARIANTS = Kind("a mapping of names to functions that take an optimizer", _variants)
