# SPDX-License-Identifier: BSD-3-Clause
"""Notices that a script makes an optimizer or a DistributedDataParallel model.

sitecustomize.py loads this file before the script begins. It imports neither torch, whose
settings the script may still make, nor optfuse: it waits until the script imports torch, and
imports what the settings name as "session" when the first optimizer has been made."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

MADE = "_optfuse_made"  # of _options.py, which can't be imported here
_OURS = ("optfuse", "optfuse_layers", "optfuse_tools")
_FOR_THE_SCRIPT = "optfuse._fused.classes"  # calls the class in type(optimizer)(...) of a script
Work = Callable[[types.ModuleType], None]


def _module(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _of_the_package(settings: dict[str, Any]) -> types.ModuleType:
    if settings["home"] not in sys.path:
        sys.path.append(settings["home"])
    return importlib.import_module(settings["session"])


def _alone(settings: dict[str, Any]) -> types.ModuleType | None:
    """Without the package, whose import loads the library; None: the session needs that."""
    name = settings["session"]
    if not settings.get("alone"):
        return None
    path = os.path.join(settings["home"], *name.split(".")) + ".py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Finder:
    """Has some work done after a module was imported."""

    def __init__(self, work: dict[str, Work]) -> None:
        self._work = work

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._work:
            return None
        work = self._work.pop(name)  # the finders after this one are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._work[name] = work
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_work(module: types.ModuleType) -> None:
            load(module)
            work(module)

        spec.loader.exec_module = load_and_work  # type: ignore[method-assign]
        return spec


class Watch:
    """The watch of one process, and of those that it forks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: set[Any] = set()  # the __init__() of classes, as replaced here
        self._threads = threading.local()
        self._session: Any = None

    def session(self) -> Any:
        """Where optimizers are fused or timed. Raises ImportError, which says what to do, if
        optfuse has to be loaded for it and can't be."""
        if self._session is None:
            module = _alone(self._settings) or _of_the_package(self._settings)
            self._session = module.Session(self._settings, self._models)
        return self._session

    def report(self) -> None:
        """At the end of a process."""
        if self._session is not None:
            self._session.report()
        elif self._settings["process"] == os.getpid() and self._settings["said"]:
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                sys.stderr.write("optfuse: this process made no optimizer\n")

    def start_anew(self) -> None:
        """In a forked process."""
        if self._session is not None:
            self._session.start_anew()

    # ---- optimizers

    def watch_optimizers(self, module: types.ModuleType) -> None:
        """From here on each subclass of Optimizer, those of torch among them, has an __init__()
        that says when the outermost one is done."""
        base = module.Optimizer

        def __init_subclass__(cls: Any, /, **options: Any) -> None:
            super(base, cls).__init_subclass__(**options)
            if cls.__init__ not in self._watched:
                cls.__init__ = self._watching(cls.__init__)

        base.__init_subclass__ = classmethod(__init_subclass__)

    def _watching(self, init: Callable[..., None]) -> Callable[..., None]:
        watch = self

        @functools.wraps(init)
        def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
            under: list[Any] = watch._threads.__dict__.setdefault("under", [])
            if self.__dict__.pop(MADE, False):
                return
            if any(optimizer is self for optimizer in under):  # of a base class
                init(self, *args, **kwargs)
                return
            under.append(self)
            try:
                init(self, *args, **kwargs)
                if len(under) == 1:
                    watch._made(self, sys._getframe(1))
            finally:
                under.pop()

        self._watched.add(__init__)
        return __init__

    def _made(self, optimizer: Any, frame: types.FrameType) -> None:
        """frame: of who called the class."""
        if _module(frame) == _FOR_THE_SCRIPT and frame.f_back is not None:
            frame = frame.f_back
        elif _module(frame).partition(".")[0] in _OURS:  # for a trial, or as a base of comparison
            return
        file = os.path.basename(frame.f_code.co_filename)
        self.session().made(optimizer, f"{file}:{frame.f_lineno}")

    # ---- models

    def watch_models(self, module: types.ModuleType) -> None:
        kind = module.DistributedDataParallel
        init = kind.__init__
        watch = self

        @functools.wraps(init)
        def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            watch._models.add(self)
            if watch._session is not None:
                watch._session.wrapped(self)

        kind.__init__ = __init__


def _seeding(seed: int) -> dict[str, Work]:
    """Seeds the generators that training draws from, before the script gets to them."""
    importlib.import_module("random").seed(seed)
    return {
        "torch": lambda module: module.manual_seed(seed),
        "numpy.random": lambda module: module.seed(seed % 2**32),
    }


def start(settings: dict[str, Any]) -> None:
    """Once per process. settings: as the command has written them."""
    watch = Watch(settings)
    work: dict[str, Work] = {
        "torch.optim.optimizer": watch.watch_optimizers,
        "torch.nn.parallel.distributed": watch.watch_models,
    }
    if settings.get("seed") is not None:
        work |= _seeding(settings["seed"])
    sys.meta_path.insert(0, Finder(work))
    os.register_at_fork(after_in_child=watch.start_anew)
    atexit.register(watch.report)
