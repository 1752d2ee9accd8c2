# SPDX-License-Identifier: BSD-3-Clause
"""Fuses the optimizers that a script makes, and says on stderr what it has not fused."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._arguments.modes import Backward, Forward
from optfuse._ddp import reduces
from optfuse._fuse import fuse
from optfuse._fused.classes import become_stock
from optfuse._library.bindings import BACKWARD, Error
from optfuse._link import link_of
from optfuse._options import is_disabled, is_fused, is_recorded, owner_of
from optfuse._registered import is_registered, register

Models = Iterable[DistributedDataParallel]
_OF_ANY_MODE = "bucket_bytes", "strict", "products"
_OF_FORWARD = "max_grad_norm", "fold"
_OF_BACKWARD = "side_stream", "accumulate"


def _line(error: Error) -> str:
    """The error's text without its beginning, as one line."""
    return " ".join(str(error).removeprefix("optfuse: ").split())


class Session:
    """The fused optimizers of one process."""

    def __init__(self, settings: dict[str, Any], models: Models) -> None:
        """models: those that live, which grow."""
        self._mode: str = settings["mode"]
        self._options: dict[str, Any] = settings["options"]
        self._register = frozenset(settings["register"])
        self._said: int = settings["said"]  # 0: nothing, 2: more
        self._models = models
        self._ours: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self.lines: list[str] = []  # what was said once
        self.given_up: list[str] = []  # where those were made that the script has taken over
        self.start_anew()

    def start_anew(self) -> None:
        """Counts from here on."""
        self._fused: Counter[tuple[str, str]] = Counter()  # by mode and class
        self._left = 0

    def made(self, optimizer: Optimizer, where: str) -> None:
        """where: file and line."""
        others = (x for x in optimizer.__dict__.values() if isinstance(x, Optimizer))
        inner = any(owner_of(other) for other in others if other is not optimizer)
        if is_disabled() or owner_of(optimizer) or inner:
            return
        self._fuse(optimizer, where, self._mode)

    def wrapped(self, model: DistributedDataParallel) -> None:
        """A model was made, perhaps after the optimizer of its parameters."""
        for optimizer in self._in_backward_mode():
            if reduces(model, optimizer):
                self._fuse_again(optimizer, self._mode)

    def _in_backward_mode(self) -> list[Optimizer]:
        """The optimizers in backward mode that the script has not taken over."""
        return [
            optimizer
            for optimizer in self._ours
            if is_fused(optimizer)
            and link_of(optimizer).unasked is not None
            and link_of(optimizer).mode == BACKWARD
        ]

    def _fuse_again(self, optimizer: Optimizer, mode: str) -> None:
        self._fused[_kind(optimizer)] -= 1
        become_stock(optimizer)
        self._fuse(optimizer, self._ours[optimizer], mode)

    def report(self) -> None:
        """At the end of the process."""
        self._say(1, "optfuse: " + "; ".join(self._counts()))

    def _counts(self) -> Iterable[str]:
        modes = sorted({mode for (mode, _), count in self._fused.items() if count})
        for mode in modes:
            names = {name: n for (m, name), n in self._fused.items() if m == mode and n}
            total = sum(names.values())
            yield f"fused {_many(total)} ({', '.join(sorted(names))}) in {mode} mode"
        if not modes:
            yield "fused no optimizer"
        if self._left:
            yield f"left {_many(self._left)} as it was made"

    def _say(self, least: int, text: str) -> None:
        if self._said >= least:
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                sys.stderr.write(f"{text}\n")  # in one piece, beside other processes
                sys.stderr.flush()

    def _say_once(self, text: str) -> None:
        if text not in self.lines:
            self.lines.append(text)
            self._say(1, text)

    def _register_if_named(self, cls: type[Optimizer]) -> None:
        if f"{cls.__module__}.{cls.__qualname__}" in self._register and not is_registered(cls):
            register(cls)

    def _fuse(self, optimizer: Optimizer, where: str, mode: str) -> None:
        name = type(optimizer).__name__
        try:
            self._register_if_named(type(optimizer))
            reason = self._fuse_or_raise(optimizer, mode)
        except Error as error:
            self._left += 1
            self._say_once(f"optfuse: {where}: {name} stays as it is: {_line(error)}")
            return
        mode, _ = kind = _kind(optimizer)
        self._ours[optimizer] = where
        self._fused[kind] += 1
        owner_of(optimizer).unasked = functools.partial(self._give_up, kind, where)
        if reason:
            self._say_once(f"optfuse: {where}: {name} is fused in forward mode: {reason}")
        self._say(2, f"optfuse: {where}: fused {name} in {mode} mode")

    def _give_up(self, kind: tuple[str, str], where: str) -> None:
        self._fused[kind] -= 1
        self.given_up.append(where)

    def _fuse_or_raise(self, optimizer: Optimizer, mode: str) -> str:
        """Why it is in forward mode although the other was asked for, or nothing."""
        reason = ""
        if mode == "backward":
            try:
                self._fuse_in_backward(optimizer)
                return ""
            except Error as error:
                reason = _line(error)
        fuse(optimizer, Forward(**self._chosen(_OF_FORWARD)), **self._chosen(_OF_ANY_MODE))
        return reason

    def _fuse_in_backward(self, optimizer: Optimizer) -> None:
        """Raises optfuse.Error if that can't be done. An optimizer that has the same parameters
        then is in forward mode, too: which of the two will update them is known in step()."""
        params = set(map(id, parameters_of(optimizer)))
        others = [o for o in self._in_backward_mode() if params & set(map(id, parameters_of(o)))]
        for other in others:
            self._fuse_again(other, "forward")
        if others:
            raise Error(
                "optfuse: another optimizer has some of its parameters, and which one updates "
                "them is known in step()"
            )
        mode = Backward(ddp=self._model_of(optimizer), **self._chosen(_OF_BACKWARD))
        fuse(optimizer, mode, **self._chosen(_OF_ANY_MODE))

    def _chosen(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self._options[name] for name in names if name in self._options}

    def _model_of(self, optimizer: Optimizer) -> DistributedDataParallel | None:
        """Raises optfuse.Error if there are several."""
        found = [model for model in self._models if reduces(model, optimizer)]
        if len(found) > 1:
            del found
            gc.collect()  # one that the script has dropped may be part of a circle
            found = [model for model in self._models if reduces(model, optimizer)]
        if len(found) > 1:
            raise Error(
                f"optfuse: its parameters are reduced by {len(found)} DistributedDataParallel "
                "models, and backward mode can follow one"
            )
        return found[0] if found else None


def _kind(optimizer: Optimizer) -> tuple[str, str]:
    if is_recorded(optimizer):
        return "forward", type(optimizer).__name__
    link = link_of(optimizer)
    return "backward" if link.mode == BACKWARD else "forward", link.stock.__name__


def _many(count: int) -> str:
    return "1 optimizer" if count == 1 else f"{count} optimizers"
