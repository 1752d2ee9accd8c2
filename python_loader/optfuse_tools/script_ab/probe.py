# SPDX-License-Identifier: BSD-3-Clause
"""In the script's process: times the steps of its optimizers, or notes what the parameters are
after each of them.

In runs with stock optimizers watch.py loads this file alone, so that the process has nothing else
of optfuse in it; fusing.py fuses besides. Parameters are read in runs of their own, because that
takes time and launches updates."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

_WRAPPED = "_wrapped_by_lr_sched"  # by which schedulers, and fuse(), know a step() that is replaced
_OURS = "_optfuse_clock"


class EnoughSteps(SystemExit):
    """Ends the script as sys.exit() does."""


def digest(params: Iterable[torch.Tensor]) -> str:
    """A digest of the bytes of the parameters' values."""
    found = hashlib.blake2b(digest_size=16)
    for param in params:
        values = param.detach().cpu().contiguous()
        size = values.numel() * values.element_size()
        found.update(ctypes.string_at(values.data_ptr(), size) if size else b"")
    return found.hexdigest()


def sketch(param: torch.Tensor) -> list[float]:
    """Eight sums of the elements, each with a sign of its own that is drawn from a fixed generator:
    sketches of two parameters are about as far apart as these are, and take no room."""
    values = param.detach().cpu()
    values = (torch.view_as_real(values) if values.is_complex() else values).double().flatten()
    drawn = torch.Generator("cpu").manual_seed(len(values))
    values = values * (torch.randint(2, values.shape, generator=drawn, device="cpu") * 2 - 1)
    sums = torch.zeros(8, dtype=torch.float64, device="cpu")
    for i in range(8):
        sums[i] = values[i::8].sum()
    return [float(x) for x in sums.tolist()]


def is_sketched(step: int) -> bool:
    """All of the first steps, and fewer later: they take long."""
    return step % (1 << max(0, step.bit_length() - 5)) == 0


def label(names: Any, group: int, index: int, shape: Any) -> str:
    """A parameter in a sentence, as the package's own errors name it."""
    if names is not None:
        return f"parameter {names[index]!r} of shape {tuple(shape)}"
    return f"parameter {index} of group {group} of shape {tuple(shape)}"


def usage() -> tuple[int, float, float]:
    """Page faults so far, and seconds of processors, in all and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt, used.ru_utime + used.ru_stime, used.ru_stime


def peak_rss_mb() -> float:
    """The peak memory of this program. (getrusage() begins with what the parent had.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Clock:
    """When steps end. On a GPU that is when the GPU gets there, which the host doesn't wait for."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self.used: list[tuple[int, float, float]] = []  # usage() at each end
        self._events: list[torch.cuda.Event] = []

    def step_ends(self) -> None:
        if torch.cuda.is_initialized():
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        self._ends.append(time.perf_counter())
        self.used.append(usage())

    def milliseconds(self) -> list[float]:
        """From one end to the next."""
        if len(self._events) == len(self._ends) > 1:
            torch.cuda.synchronize()
            events = zip(self._events, self._events[1:], strict=False)
            return [begin.elapsed_time(end) for begin, end in events]
        return [1e3 * (e - b) for b, e in zip(self._ends, self._ends[1:], strict=False)]

    def __len__(self) -> int:
        return len(self._ends)


class Watched:
    """An optimizer of the script."""

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.where = where
        self.clock = Clock()


class Session:
    """The probe of one process."""

    def __init__(self, settings: dict[str, Any], models: Any) -> None:
        """models: those of DistributedDataParallel, which are none of ours."""
        self._settings = settings
        self._is_main = os.getppid() == settings["parent"]
        self._watched: list[Watched] = []
        self._digests: list[tuple[int, str]] = []  # which optimizer stepped, and its parameters
        self._sketches: dict[int, list[list[float]]] = {}  # of the parameters, by place in these
        self._labels: dict[int, list[str]] = {}  # of the parameters, by optimizer
        self._processes = 1  # of torch.distributed
        self._stopped = False

    # ---- as watch.py calls it

    def start_anew(self) -> None:
        """In a forked process."""
        self._is_main = False

    def made(self, optimizer: Optimizer, where: str) -> None:
        """where: file and line."""
        if not self._is_main:
            self._say_elsewhere()
            return
        self.prepare(optimizer, where)
        self._watched.append(Watched(optimizer, where))
        self.put_clocks()

    def wrapped(self, model: Any) -> None:
        """A model of DistributedDataParallel was made."""

    def report(self) -> None:
        """At the end of the process."""
        if self._is_main:
            path = Path(self._settings["out"])
            part = path.with_suffix(".part")
            part.write_text(json.dumps(self._found()))
            part.rename(path)

    # ---- what is found out

    def prepare(self, optimizer: Optimizer, where: str) -> None:
        """Gives it the flags of the reference."""
        index = len(self._watched)
        flags = self._settings["flags"][index : index + 1]
        for key, value in (flags[0] if flags else {}).items():
            for options in (optimizer.defaults, *optimizer.param_groups):
                options[key] = value
            if key == "fused":
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def put_clocks(self) -> None:
        """Into optimizers that have none, or whose class has become another since."""
        for index, watched in enumerate(self._watched):
            optimizer = watched.optimizer()
            if optimizer is not None:
                own = optimizer.__dict__.get("step")
                if not hasattr(own, _OURS):
                    self._put_clock(optimizer, index, own)

    def _put_clock(self, optimizer: Optimizer, index: int, own: Any) -> None:
        """own: a step() that the object has already, perhaps a scheduler's, which only counts."""
        owner = weakref.ref(optimizer)
        replaced = own is not None and not hasattr(own, _WRAPPED)
        function: Callable[..., Any] = own if replaced else type(optimizer).step

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            target: Any = owner()
            target._opt_called = True  # for schedulers, as their own wrapper does
            result = function(*args, **kwargs) if replaced else function(target, *args, **kwargs)
            self._step_ends(target, index)
            return result

        vars(step).update({_WRAPPED: True, _OURS: True})
        optimizer.__dict__["step"] = step

    def _step_ends(self, optimizer: Optimizer, index: int) -> None:
        if not self._is_main:  # forked since
            self._say_elsewhere()
            return
        watched = self._watched[index]
        watched.clock.step_ends()
        if self._settings["looks"]:
            self._look_at(optimizer, index, len(watched.clock))
            self._processes = max(self._processes, _processes())
            self.look(optimizer, index)
        if len(watched.clock) == self._settings["steps"]:
            self._stop()

    def _look_at(self, optimizer: Optimizer, index: int, step: int) -> None:
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        if is_sketched(step):
            self._sketches[len(self._digests)] = [*map(sketch, params)]
        self._digests.append((index, digest(params)))
        self._labels[index] = [
            label(group.get("param_names"), i, j, p.shape)
            for i, group in enumerate(groups)
            for j, p in enumerate(group["params"])
        ]

    def _say_elsewhere(self) -> None:
        """Another process than the script's trains."""
        Path(self._settings["elsewhere"]).touch()

    def _stop(self) -> None:
        if self._stopped:  # the script has caught what was raised
            self.report()
            os._exit(0)
        self._stopped = True
        raise EnoughSteps(0)

    def look(self, optimizer: Optimizer, index: int) -> None:
        """After a step of a run that is not timed."""

    def facts(self) -> dict[str, Any]:
        """Further findings, for subclasses."""
        return {}

    def _found(self) -> dict[str, Any]:
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        bytes_of_gpus = sum(map(torch.cuda.max_memory_allocated, gpus))
        return {
            "optimizers": [
                {"name": w.name, "where": w.where, "steps": len(w.clock)} for w in self._watched
            ],
            "ms": [w.clock.milliseconds() for w in self._watched],
            "used": [w.clock.used for w in self._watched],
            "digests": self._digests,
            "sketches": sorted(self._sketches.items()),
            "labels": sorted(self._labels.items()),
            "peak_mb": peak_rss_mb(),
            "peak_gpu_mb": bytes_of_gpus / 2**20 if gpus else None,
            "processes": self._processes,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "gpu": torch.cuda.get_device_name() if gpus else None,
            **self.facts(),
        }


def _processes() -> int:
    """The state of torch.distributed."""
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialized else 1
