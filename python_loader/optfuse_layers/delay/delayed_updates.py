# SPDX-License-Identifier: BSD-3-Clause
"""Updates that arrive late, as in a pipeline: the forward pass of batch b sees the updates of all
batches before b - D. Rule and stability limit: docs/layerpipe.md.

step() updates the newest weights, which wait in a queue of D versions; the parameter itself
shows the version that is due. Both have their own memory, so that no update is ever undone, and
any optimizer, clipping and loss scaling work as they are."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optfuse._arguments.check import FUSED, checked, parameters_of
from optfuse._arguments.modes import Delay
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._library.bindings import Error, guard
from optfuse._link import Link, link_of
from optfuse._options import is_fused
from optfuse_layers import tap
from optfuse_layers.delay import average


@dataclass
class _Late:
    """One delayed parameter."""

    param: Tensor
    delay: int
    label: str
    is_eager: bool
    versions: deque[Tensor] = field(default_factory=deque)  # that wait, the newest last
    seen: int | None = None  # the parameter's version counter after step(); None: not noted
    updates: int = 0  # of the average
    average: Tensor | None = None  # of its changes, with weights="average"

    def newest(self) -> Tensor:
        return self.versions[-1] if self.versions else self.param.detach()

    def nbytes(self) -> int:
        """Bytes of the versions that wait when the queue is full."""
        return self.delay * self.param.numel() * self.param.element_size()


@dataclass(frozen=True)
class Delays:
    """The parameters of one optimizer that Forward(delay=...) names."""

    steps: tuple[tuple[Tensor, int], ...]  # above 0
    weights: str  # as in Delay

    def begin(self, link: Link, optimizer: Optimizer) -> Delayed:
        return Delayed(link, optimizer, self)


def delays_of(delay: Delay, optimizer: Optimizer) -> Delays | None:
    """In the optimizer's order; None: all are 0. A parameter's own entry counts before a module's,
    and a smaller module's before one around it."""
    steps = _steps_of(delay.steps, optimizer)
    return Delays(steps, delay.weights) if steps else None


def _steps_of(given: Mapping[Any, int], optimizer: Optimizer) -> tuple[tuple[Tensor, int], ...]:
    modules = [(key, delay) for key, delay in given.items() if isinstance(key, nn.Module)]
    modules.sort(key=lambda entry: -sum(1 for _ in entry[0].modules()))
    _refuse_ambiguous(modules, given)
    found: dict[Tensor, int]
    found = {p: delay for module, delay in modules for p in module.parameters()}
    found |= {key: delay for key, delay in given.items() if isinstance(key, Tensor)}
    params = parameters_of(optimizer)
    strange = [p for p in found if not any(p is q for q in params)]
    if strange:
        raise Error(
            f"optfuse: delay= names a parameter of shape {tuple(strange[0].shape)} that this "
            "optimizer does not have; name its own parameters, or modules that have no others"
        )
    delayed = tuple((p, found[p]) for p in params if found.get(p, 0) > 0)
    _refuse(delayed)
    return delayed


def _has_updates(key: Any) -> bool:
    return isinstance(key, Tensor) or any(True for _ in key.parameters())


def _refuse_ambiguous(modules: Sequence[tuple[nn.Module, int]], given: Mapping[Any, int]) -> None:
    """modules: the largest first."""
    said: dict[Tensor, tuple[nn.Module, int]] = {}
    late = [module for module, delay in modules if delay]
    if late and not any(given[key] for key in given if _has_updates(key)):
        raise Error(
            f"optfuse: delay= names a {type(late[0]).__name__} without parameters and nothing else "
            "that has updates to delay; name the modules whose weights are to be late"
        )
    for module, delay in modules:
        for param in module.parameters():
            around, other = said.get(param, (module, delay))
            if other != delay and param not in given and module not in set(around.modules()):
                raise Error(
                    f"optfuse: delay= says {other} of a {type(around).__name__} and {delay} of a "
                    f"{type(module).__name__}, which share a parameter of shape "
                    f"{tuple(param.shape)}; name that parameter, too"
                )
            said[param] = module, delay


def _refuse(delayed: Sequence[tuple[Tensor, int]]) -> None:
    for param, _ in delayed:
        if is_dtensor(param):
            raise Error(
                f"optfuse: delay= names a DTensor of shape {tuple(param.shape)}; versions of "
                "sharded parameters are not kept. Use optfuse.pipeline.Pipeline, or no delay"
            )
    spans = sorted(
        (p.untyped_storage().data_ptr(), *_extent(p), tuple(p.shape)) for p, _ in delayed
    )
    for (memory, _, end, shape), (other, begin, *_) in zip(spans, spans[1:], strict=False):
        if memory == other and begin < end:
            raise Error(
                f"optfuse: delay= names parameters that share memory, one of shape {shape}; "
                "their versions would overwrite each other. Delay none of them"
            )


def _extent(param: Tensor) -> tuple[int, int]:
    """The elements of its storage from the first to behind the last that it may use."""
    begin = int(param.storage_offset())
    spans = zip(param.shape, param.stride(), strict=True)
    return begin, begin + 1 + sum((size - 1) * stride for size, stride in spans)


class Delayed:
    """The delayed parameters of one fused optimizer."""

    def __init__(self, link: Link, optimizer: Optimizer, delays: Delays) -> None:
        eager = set(map(id, link.options.eager))
        self._weights = weights = delays.weights
        self._owner = link.plan
        self._late = [_Late(p, delay, _label(link, p), id(p) in eager) for p, delay in delays.steps]
        if weights == "average":
            for late in self._late:
                late.average = torch.zeros_like(late.param.detach())
        if weights != "stash":
            self._forget = weakref.finalize(
                optimizer, tap.leave, torch.ops.optfuse.forget_input_weights, self._owner
            )
            self._forget.atexit = False
            self._tell()

    def __len__(self) -> int:
        return len(self._late)

    def nbytes(self) -> int:
        """Bytes of all versions that wait when the queues are full."""
        return sum(map(_Late.nbytes, self._late))

    def close(self) -> None:
        self.drain()
        if self._weights != "stash":
            self._forget()

    @torch.no_grad()
    def step(self, optimizer: Optimizer, link: Link) -> None:
        self._refuse_writes()
        made = [late.newest().clone() for late in self._late]
        self._exchange(made)
        try:
            link.step(optimizer)
        except BaseException:
            self._exchange(made)
            self._note()
            raise
        self._exchange(made)
        for late, version in zip(self._late, made, strict=True):
            if late.average is not None:
                late.updates += 1
                average.follow(late.average, late.newest(), version, late.updates, late.delay)
            late.versions.append(version)
        due = [late for late in self._late if len(late.versions) > late.delay]
        self._exchange([late.versions.popleft() for late in due], due)
        self._note()

    def _exchange(self, others: list[Tensor], late: list[_Late] | None = None) -> None:
        late = self._late if late is None else late
        params, fixed = [one.param for one in late], [int(one.is_eager) for one in late]
        torch.ops.optfuse.exchange(params, others, fixed)

    def _note(self) -> None:
        for late in self._late:
            late.seen = late.param._version
        if self._weights != "stash":
            self._tell()

    def _tell(self) -> None:
        """Sets the weights that dX of the next backward pass reads."""
        matrices = [late for late in self._late if late.param.dim() in (2, 4)]
        torch.ops.optfuse.set_input_weights(
            self._owner,
            [late.param for late in matrices],
            [self._input_weight(late) for late in matrices],
            [late.label for late in matrices],
        )

    def _input_weight(self, late: _Late) -> Tensor | None:
        if not late.versions:
            return None
        if late.average is None:
            return late.newest()
        return average.reconstruct(late.newest(), late.average, len(late.versions))

    def _refuse_writes(self) -> None:
        for late in self._late:
            if late.seen not in (None, late.param._version) and guard("late_write"):
                raise Error(
                    f"optfuse: {late.label} was changed outside of step(), but newer versions of "
                    "it wait in the queue of its delay and would take its place. Call "
                    "optfuse.drain(optimizer) before changing it, or load the optimizer's "
                    "state_dict() with the model's"
                )

    @torch.no_grad()
    def drain(self) -> None:
        """Every parameter becomes its newest version; the queues are empty."""
        waiting = [late for late in self._late if late.versions]
        self._exchange([late.versions[-1] for late in waiting], waiting)
        self._empty()

    def _empty(self) -> None:
        for late in self._late:
            late.versions.clear()
            late.seen = None
        if self._weights != "stash":
            self._tell()

    # ---- checkpoints

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The queue, by the numbers that parameters have in state_dict()."""
        numbers = {id(p): i for i, p in enumerate(parameters_of(optimizer))}
        entries = {
            numbers[id(late.param)]: {
                "delay": late.delay,
                "versions": list(late.versions),
                "updates": late.updates,
                "average": late.average,
            }
            for late in self._late
        }
        return {"weights": self._weights, "parameters": entries}

    def check(self, optimizer: Optimizer, state: Mapping[str, Any] | None) -> None:
        """Raises optfuse.Error if a queue can't be that of these parameters."""
        if state is None:
            return
        known = self.state(optimizer)
        for what, mine, theirs in (
            ("weights=", known["weights"], state["weights"]),
            ("delays", _delays(known), _delays(state)),
        ):
            if mine != theirs:
                raise Error(
                    f"optfuse: the state_dict was saved with other {what} ({theirs}) than this "
                    f"optimizer was fused with ({mine}); fuse it with the same, or call "
                    "optfuse.drain(optimizer) before saving. Nothing was loaded"
                )
        for late, entry in zip(self._late, state["parameters"].values(), strict=True):
            for version in entry["versions"]:
                if version.shape != late.param.shape:
                    raise Error(
                        f"optfuse: the state_dict has a version of shape {tuple(version.shape)} "
                        f"for {late.label}. Nothing was loaded"
                    )

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None) -> None:
        """A queue that check() has passed. None: it is empty, as in a checkpoint of an optimizer
        without delays."""
        self._empty()
        if state is None:
            for late in self._late:
                if late.average is not None:
                    late.average.zero_()
                late.updates = 0
            return
        for late, entry in zip(self._late, state["parameters"].values(), strict=True):
            for version in entry["versions"]:
                late.versions.append(torch.empty_like(late.param).copy_(version))
            if late.average is not None:
                late.updates = entry["updates"]
                late.average.copy_(entry["average"])
        if self._weights != "stash":
            self._tell()


def _delays(state: Mapping[str, Any]) -> dict[int, int]:
    return {number: entry["delay"] for number, entry in state["parameters"].items()}


def _label(link: Link, param: Tensor) -> str:
    slot = link.slot_of(param)
    assert slot is not None
    return link.label(slot)


@checked(optimizer=FUSED)
def drain(optimizer: Optimizer) -> None:
    """Applies every update that Forward(delay=...) still holds back, so that all
    parameters are the newest; training may go on, with empty queues. Without delays it is
    flush(). Raises optfuse.Error if the optimizer is not fused."""
    if not is_fused(optimizer):
        return
    link = link_of(optimizer)
    link.flush()
    if link.delayed is not None:
        link.delayed.drain()
