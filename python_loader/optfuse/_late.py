# SPDX-License-Identifier: BSD-3-Clause
"""Late changes: what a script changes between backward() and step(), after an update that has used
it. Here are values of an optimizer's state, options and attributes, to be compared with those that
are there now; the library's ledger (shim/ledger/late.cpp) asks for that, and says what it finds."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._bits import difference
from optfuse._library.bindings import guard
from optfuse._options import LINK

Entry = dict[Any, Any]
Group = dict[str, Any]
Path = tuple[Any, ...]  # keys of dicts in dicts
_HOOKS = [
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]
# Attributes of every optimizer, and those that PyTorch writes in step() for itself: in wrappers,
# and a check that its fused implementations need to make once.
_NOT_OWN = frozenset(
    (
        *("param_groups", "state", "step", LINK, "_step_supports_amp_scaling", *_HOOKS),
        *("_warned_capturable_if_run_uncaptured", "_opt_called", "_step_count"),
        "_need_device_dtype_check_for_fused",
        *("grad_scale", "found_inf"),  # which begin() of an updater sees
    )
)
_NOT_OPTIONS = ("params", "param_names")
_DEFAULTS = "defaults"  # of groups that are still to come
# Among attributes: what the state holds under other keys than parameters, such as a counter.
_SHARED = "state of no parameter"
_FEW = 1024  # numbers in a tensor
_LISTS = (list, tuple, deque)


class Used:
    """The entries of the state that updates of one optimizer have made, or run through, since its
    last step()."""

    def __init__(self) -> None:
        # By slots; and the versions of their tensors if these are not known in C.
        self._made: dict[int, tuple[dict[Path, Any], list[int] | None]] = {}

    def make(self, slot: int, entry: Entry, is_over: bool) -> None:
        """is_over: the update has done so, and not what prepares it."""
        self._made[slot] = dict(_paths(entry)), _versions(entry) if is_over else None

    def changed_entry(
        self, slot: int, then: Entry, now: Entry, keys: tuple[str, ...] | None
    ) -> str | None:
        """A sentence with a gap for the parameter's label. then: the entry that updates used, if
        they did not make it. keys: of an entry, that an update uses; None: all."""
        used, versions = self._made.get(slot) or (dict(_paths(then)), None)
        now = dict(_paths(now))
        for path in {**used, **now} if keys is None else ((key,) for key in keys):
            if (path in used) != (path in now) or _is_changed(used.get(path), now.get(path)):
                how = "removed" if path not in now else "replaced" if path in used else "added"
                place = "".join(f"[{key!r}]" for key in path)
                return f"state{place} of {{}} was {how}"
        if versions is not None and versions != _versions(now):
            return "the state of {} was written in place"
        return None


class Settings:
    """Options of groups and attributes of an optimizer at one time, and what its state holds under
    other keys than parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        is_written: Callable[[Tensor], bool] = lambda _: False,
        keys: Iterable[Any] | None = None,
    ) -> None:
        """is_written: whether updates make or change a tensor, which is only told by its identity
        then. keys: of the state, of no parameter."""
        self._is_written = is_written
        self._keys = None if keys is None else list(keys)
        self._options = [self._options_of(group) for group in optimizer.param_groups]
        self._attributes = self._attributes_of(optimizer)

    def changed_option(self, number: int, group: Group) -> str | None:
        """The first in which a group differs from what group `number` was."""
        return next(_differing(self._options[number], self._options_of(group)), None)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        return next(_differing(self._attributes, self._attributes_of(optimizer)), None)

    def changed(self, optimizer: Optimizer) -> str | None:
        """The first that is no longer what it was."""
        groups = optimizer.param_groups
        if len(groups) != len(self._options):
            return "the number of groups"
        if (name := self.changed_attribute(optimizer)) is not None:
            return f"the attribute {name!r}"
        for i, group in enumerate(groups):
            if (name := self.changed_option(i, group)) is not None:
                return f"the option {name!r} of group {i}"
        return None

    def _options_of(self, group: Group) -> Group:
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        return {name: noted(value, self._is_written) for name, value in options.items()}

    def _attributes_of(self, optimizer: Optimizer) -> dict[str, Any]:
        own = own_attributes(optimizer, self._keys)
        own.pop(_DEFAULTS, None)
        return {k: noted(_unbound(v, optimizer), self._is_written) for k, v in own.items()}


def own_attributes(optimizer: Optimizer, keys: Iterable[Any] | None = None) -> dict[str, Any]:
    """Those that belong to the class, and what the state holds under these keys; None: under all
    that are no parameters."""
    own, state = optimizer.__dict__, optimizer.state
    found = {name: value for name, value in own.items() if name not in _NOT_OWN}
    shared = {key: state.get(key) for key in (no_parameters(state) if keys is None else keys)}
    return found | {_SHARED: shared} if shared else found


def no_parameters(state: dict[Any, Any]) -> list[Any]:
    return [key for key in state if not isinstance(key, Tensor)]


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """The names under which two dicts differ."""
    for name in {**a, **b}:
        missing = (name in a) != (name in b)
        if missing or difference("", a.get(name), b.get(name)) is not None:
            yield name


def _unbound(value: Any, optimizer: Optimizer) -> Any:
    """A method of the optimizer is another object at each look."""
    is_method = isinstance(value, types.MethodType) and value.__self__ is optimizer
    return value.__func__ if is_method else value


def noted(value: Any, is_written: Callable[[Tensor], bool]) -> Any:
    """Numbers and the like can't change, and other objects are told by their identity."""
    if isinstance(value, Tensor):
        return id(value) if is_written(value) else _noted_tensor(value)
    if type(value) in _LISTS:
        return type(value)(noted(item, is_written) for item in value)
    if isinstance(value, dict):
        return {key: noted(item, is_written) for key, item in value.items()}
    return value


def _noted_tensor(tensor: Tensor) -> Any:
    """A write through .data or NumPy leaves a tensor's version as it is. But values on a GPU would
    have to be waited for, and many numbers copied."""
    if tensor.device.type == "cpu" and tensor.numel() <= _FEW and guard("late_values"):
        return tensor.detach().clone()
    return id(tensor), tensor._version


def _paths(entry: Entry, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of dicts in dicts, with the keys that lead there."""
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from _paths(value, (*at, key))
        else:
            yield (*at, key), value


def _is_changed(then: Any, now: Any) -> bool:
    """Tensors are told by identity, numbers and the like by value."""
    if then is now:
        return False
    return isinstance(then, Tensor) or difference("", now, then) is not None


def _versions(entry: Entry) -> list[int]:
    return [x._version for x in tensors_in(entry.values()) if not x.is_inference()]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the values, and in their containers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, list | tuple | deque):
            yield from tensors_in(value)
