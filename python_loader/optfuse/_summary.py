# SPDX-License-Identifier: BSD-3-Clause
"""summary(): what a fused optimizer has done."""

from __future__ import annotations

import ctypes
import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import FUSED, checked
from optfuse._clipping.one_call import NOT_TRIED, TORCHS, norms_are
from optfuse._gpu import is_gpu
from optfuse._library.bindings import DTYPES, FINAL, Counts, PromiseCounts, check, lib
from optfuse._link import Link, link_of
from optfuse._options import RECORDED, is_fused, is_recorded

_FINAL = (
    "Backward(final=True): each update is final when its gradient is complete. What is changed "
    "behind backward() counts from the next pass on, no gradient is left to clip or scale, and "
    "zero_grad() takes nothing back"
)


@dataclass(frozen=True)
class PromisedLayer:
    """The gradients of one weight, where fuse(products=...) allows promises, by what became of
    them."""

    label: str
    promised: int  # uses in backward whose gradient was a promise; of these:
    panels: int  # the update computed it part by part
    made: int  # somebody looked at it
    whole: int  # uses whose gradient was computed in backward, as in stock
    because: str  # why, the last time


@dataclass(frozen=True)
class Summary:
    """The work of a fused optimizer. Counts are updates since fuse()."""

    optimizer: str
    mode: str
    parameters: int
    elements: int
    reference: str  # the implementation of PyTorch whose bits are reproduced
    reference_differs: tuple[int, ...]  # groups whose flags select another one
    gpu_bits_differ: tuple[str, ...]  # kinds of parameters, as seen in a check
    own_step_because: tuple[str, ...]  # why, where something else might update
    own_step: str  # in a line, how the class's own step() runs, if it does; or ""
    isa: dict[str, str]  # dtype -> instruction set of the kernel
    eager: int
    delayed: int  # parameters whose updates arrive late, as asked
    delay_bytes: int  # of all versions of them that wait when the queues are full
    created: int
    at_use: int  # launched by the first use of their memory
    at_close: int  # launched with a bucket, by flush() or by the next step()
    at_once: int  # launched where they were created
    in_step: int  # of all, those that ran inside step()
    pending: int
    in_flight: int  # launched on a GPU and not known to be done
    launches: int
    averages: int  # of AveragedModel, made with the updates of their weights
    threads_seen: bool  # another thread used a pending parameter: no more deferring
    compiled: bool  # compiled code used parameters on a GPU: no more deferring
    norms: str  # who finds those of gradients, to clip them on the CPU
    promised: tuple[PromisedLayer, ...]  # weights large enough, with products="auto"
    past_caches: bool  # backward fusion stores parameters on the CPU so now (docs/performance.md)

    def __str__(self) -> str:
        lines = [
            f"optfuse: {self.optimizer}, {self.mode} fusion, {self.parameters} parameters "
            f"({self.elements:,} elements)",
            f"  kernels: {', '.join(f'{d} {i}' for d, i in self.isa.items()) or 'none'}; "
            f"bits of {self.reference}",
            f"  updates: {self.created} created, {self.at_use} at first use, "
            f"{self.at_close} with others, {self.at_once} at once, {self.pending} pending, "
            f"in {self.launches} launches",
        ]
        lines += [f"  {self.own_step}"] if self.own_step else []
        lines += [f"  averages of weights: {self.averages} made with updates"] * (self.averages > 0)
        notes = (*self._notes_on_bits(), *self._notes_on_times())
        return "\n".join([*lines, *(f"  note: {note}" for note in notes)])

    def _notes_on_bits(self) -> Iterator[str]:
        """Notes on the implementation that updates, where that is not a matter of course."""
        if self.reference_differs:
            groups = ", ".join(map(str, self.reference_differs))
            yield (
                f"the options of group {groups} select another implementation of PyTorch; it "
                "rounds differently (docs/numerics.md). strict=True refuses this"
            )
        if self.gpu_bits_differ:
            yield (
                f"updates of {', '.join(self.gpu_bits_differ)} round differently from fused=True "
                "on this GPU and release. strict=True refuses this"
            )
        yield from (
            f"the class's own step() updates, because {why}" for why in self.own_step_because
        )
        if self.norms == TORCHS:
            yield "torch's operator finds the norms of gradients: ours has other bits here"

    def _notes_on_times(self) -> Iterator[str]:
        """Why updates run at other times than usual."""
        if self.eager:
            yield f"{self.eager} parameters are eager, as asked"
        if self.delayed:
            yield (
                f"updates of {self.delayed} parameters arrive late, as asked; newer versions that "
                f"wait take up to {self.delay_bytes:,} bytes"
            )
        if self.promised:
            uses = sum(layer.promised + layer.whole for layer in self.promised)
            panels = sum(layer.panels for layer in self.promised)
            yield (
                f"{panels} of {uses} gradients of {len(self.promised)} layers' weights were never "
                "in memory; explain() says why others were"
            )
        if self.threads_seen:
            yield "another thread used a pending parameter; updates run at once since then"
        if self.compiled:
            yield "a compiled callable was entered; updates on the GPU run at once since then"
        if self.in_step > self.created // 2:
            gradients = ", or no backward() made their gradients" * (self.mode == "backward")
            yield (
                "most updates ran inside step(), because their memory is shared with other "
                f"tensors{gradients}; fusion saves less then"
            )

    def _repr_html_(self) -> str:
        """For notebooks."""
        title, *lines = map(html.escape, str(self).splitlines())
        items = "".join(f"<li>{line.strip()}</li>" for line in lines)
        return f"<p><b>{title}</b></p><ul>{items}</ul>"


def _kinds(params: Iterable[Tensor]) -> list[str]:
    """The kinds of device that the parameters are on."""
    return sorted({"CUDA" if is_gpu(p.device) else "the CPU" for p in params})


def _promised(plan: int) -> Iterator[PromisedLayer]:
    found = PromiseCounts()
    for i in count():
        if not lib.of_shim_count_promises(plan, i, ctypes.byref(found)):
            return
        numbers = found.promised, found.panels, found.made, found.whole
        yield PromisedLayer(found.label.decode(), *numbers, found.because.decode())


def _counts_of(link: Link) -> Counts:
    counts = Counts()
    check(lib.of_shim_counts(link.plan, ctypes.byref(counts)))
    return counts


def _numbers(counts: Counts) -> dict[str, Any]:
    return {name: getattr(counts, name) for name, *_ in counts._fields_}


def _of_own_step(optimizer: Optimizer, params: list[Tensor]) -> Summary:
    """The summary of one whose step() is recorded, or that fuse() left as it is, since
    OPTFUSE_DISABLE said so."""
    step = optimizer.__dict__.get(RECORDED)
    return Summary(
        optimizer=type(optimizer).__name__,
        mode="forward" if step else "disabled",
        parameters=len(params),
        elements=sum(p.numel() for p in params),
        reference="the class itself" + " (OPTFUSE_DISABLE is set)" * (step is None),
        reference_differs=(),
        gpu_bits_differ=(),
        own_step_because=(),
        own_step=step.described() if step else "",
        isa={},
        eager=len(step.options.eager) if step else 0,
        delayed=0,
        delay_bytes=0,
        compiled=False,
        promised=(),
        norms=NOT_TRIED,
        **_numbers(Counts()),
    )


@checked(optimizer=FUSED)
def summary(optimizer: Optimizer) -> Summary:
    """Reports the work of the fused optimizer so far, and its fallbacks. Raises optfuse.Error if
    the optimizer is not fused."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    if not is_fused(optimizer):
        return _of_own_step(optimizer, params)
    link = link_of(optimizer)
    updater = link.updater
    counts = _counts_of(link)
    dtypes = {str(p.dtype).removeprefix("torch.") for p in params}

    def kinds_of(dtype: str) -> list[str]:
        return _kinds(p for p in params if str(p.dtype) == f"torch.{dtype}")

    return Summary(
        optimizer=type(optimizer).__name__,
        mode=("forward", "backward", "final")[link.mode],
        parameters=len(params),
        elements=sum(p.numel() for p in params),
        reference=f"torch's {link.rule.reference} on " + " and ".join(_kinds(params)),
        reference_differs=tuple(i for i, group in enumerate(groups) if link.rule.difference(group)),
        gpu_bits_differ=tuple(sorted({*link.gpu_bits_differ, *updater.gpu_bits_differ})),
        own_step_because=link.rule.because,
        own_step=updater.described(),
        isa={
            name: " and ".join({updater.isa(i, kind == "the CPU"): None for kind in kinds_of(name)})
            for i, name in enumerate(DTYPES)
            if name in dtypes
        },
        eager=len(link.options.eager),
        delayed=len(link.delayed or ()),
        delay_bytes=link.delayed.nbytes() if link.delayed else 0,
        compiled=link.compiled,
        norms=norms_are(),
        promised=tuple(_promised(link.plan)),
        **_numbers(counts),
    )


@checked(optimizer=FUSED)
def explain(optimizer: Optimizer) -> str:
    """Describes the updates of the fused optimizer for people: of an optimizer without kernels how
    its own step() runs; and of each layer whose gradient may be a promise what became of it. Raises
    optfuse.Error if the optimizer is not fused."""
    name = type(optimizer).__name__
    if is_recorded(optimizer):
        return f"{name}: {optimizer.__dict__[RECORDED].described()}"
    if not is_fused(optimizer):
        return f"{name}: not fused, OPTFUSE_DISABLE is set"
    link = link_of(optimizer)
    lines = [f"{name}: {link.updater.explained(link.label)}"]
    if link.mode == FINAL:
        lines.append(_FINAL)
    for layer in _promised(link.plan):
        because = f", {layer.because}" if layer.because else ""
        lines.append(
            f"gradient of {layer.label}: {layer.panels} times computed by the update, "
            f"{layer.made} times for somebody who looked at it, {layer.whole} times in backward"
            + because
        )
    return "\n".join(lines)
