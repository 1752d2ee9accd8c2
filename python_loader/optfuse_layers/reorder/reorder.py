# SPDX-License-Identifier: BSD-3-Clause
"""Out-of-order backprop (arXiv 2110.00929): weight gradients run when a schedule says so."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from optfuse import _process
from optfuse._arguments.check import (
    LAYER_NAMES,
    LAYER_NAMES_OR_FLAG,
    MEMORY,
    MODEL,
    NETWORK,
    SCHEDULE,
    checked,
    one_of,
    optional,
    whole,
)
from optfuse._library.bindings import Error
from optfuse._library.log import warn
from optfuse._patches.profiling import remove_retired, retire
from optfuse._table import aligned
from optfuse_layers import communication, tap
from optfuse_layers.layer import Layer, check_skip, check_weights, layers_of
from optfuse_layers.reorder import auto_schedule
from optfuse_layers.reorder.auto_schedule import Times

#: of_reorder_schedule of plugin/planners/reorder/reorder.h, in its order.
SCHEDULES = ("stock", "last", "reverse_first", "budget", "chosen")
#: Arguments that a schedule needs, and those that it may have beside.
_ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reverse_first": (("k",), ()),
    "budget": (("memory",), ()),
    "auto": ((), ("memory", "network", "await_reduction")),
}
_COLUMNS = 7  # of a row of plan_of_reordering(), shim/layers/operators.cpp


@dataclass(frozen=True)
class Row:
    """One layer, in the last forward pass."""

    layer: str
    turn: int | None  # of its dW among those that run after the last dX; None: right after its dX
    extra_bytes: int  # of x and dY, that it keeps until then
    input_bytes: int
    output_bytes: int
    weight_bytes: int
    note: str
    on_side_stream: bool = False

    @property
    def place(self) -> str:
        turn = "after its dX" if self.turn is None else f"turn {self.turn} after the last dX"
        return f"{turn}, on the side stream" if self.on_side_stream else turn


@dataclass(frozen=True)
class ReorderPlan:
    """When each dW runs. str() is a table."""

    choice: dict[str, Any]  # arguments of reorder() that make it
    rows: tuple[Row, ...]  # in the order of the forward pass
    unused: tuple[str, ...]  # layers that this pass did not use in a way that can be seen
    extra_bytes: int  # of the peak of backward, above stock's

    def __str__(self) -> str:
        cells = [("layer", "dW", "keeps", "")]
        for row in self.rows:
            cells.append((row.layer, row.place, f"{row.extra_bytes:,} B", row.note))
        cells += [(name, "as in stock", "0 B", "not seen") for name in self.unused]
        return "\n".join(
            [*aligned(cells), f"extra bytes at the peak of backward: {self.extra_bytes:,}"]
        )


class Reordering:
    """A model whose weight gradients run in another order; reorder() returns it.

    It lasts as long as the model, until remove(), or to the end of a with block."""

    def __init__(self, model: nn.Module, layers: list[Layer], choice: dict[str, Any]) -> None:
        self._choice = choice
        self._layers = layers
        self._model = weakref.ref(model)
        self.times: Times | None = None  # "auto": simulated, once it has chosen
        self._undecided = choice["schedule"] == "auto"
        self._left_off: ReorderPlan | None = None  # "auto" has found stock's order best
        self._handle: int | None = _start(layers, choice)
        self._finalizer = weakref.finalize(model, self.remove)
        if self._undecided:
            torch.ops.optfuse.rehearse_reordering(self._handle, True)
            auto_schedule.choose_after_forward(model, self)
        _watch_steps()
        _watching.add(self)

    @property
    def plan(self) -> ReorderPlan:
        """The plan of the last forward pass with gradients. Raises optfuse.Error before the
        first."""
        if self._left_off is not None:
            return self._left_off
        used = self._used()
        beside = frozenset(torch.ops.optfuse.beside_in_reordering(self._handle))
        return _plan_of(used, self._layers, self._choice, beside)

    @property
    def extra_bytes(self) -> int:
        """How much higher the peak of a backward pass is than stock's, in bytes: by a model
        (plugin/planners/reorder/reorder.h), known after the forward pass. Raises optfuse.Error
        before the first."""
        return self.plan.extra_bytes

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of x and dY that waiting dW keep: now, and the most since reorder()."""
        if self._left_off is not None:
            return 0, 0
        if self._handle is None:
            raise Error("optfuse: this Reordering has been removed")
        now, most = torch.ops.optfuse.held_by_reordering(self._handle)
        return now, most

    def remove(self) -> None:
        """From the next forward pass on everything is stock's. Twice does nothing."""
        self._finalizer.detach()
        _watching.discard(self)
        auto_schedule.leave_off(self._model(), self)
        handle, self._handle = self._handle, None
        if handle is not None:
            tap.leave(torch.ops.optfuse.stop_reordering, handle)

    def __enter__(self) -> Reordering:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _used(self) -> list[int]:
        if self._handle is None:
            raise Error("optfuse: this Reordering has been removed")
        found: list[int] = torch.ops.optfuse.plan_of_reordering(self._handle)
        if len(found) == 1:
            raise Error(
                "optfuse: the plan has the order and the sizes of a forward pass; run one with "
                "gradients first"
            )
        return found

    def before_step(self) -> None:
        """Until the layers are checked, by the first step with gradients of this model."""
        check_weights(
            self._layers,
            "reorder(); call reorder() last (after fully_shard, pruning or exchanged parameters), "
            "and remove() on the old Reordering",
        )
        complete = [layer.name for layer in self._layers if layer.weight.grad is not None]
        self._check_called(complete)
        if not complete or self._handle is None:
            return
        self._check_seen(complete, self._handle)
        _watching.discard(self)

    def choose(self) -> None:
        """All processes come here after the same forward pass."""
        handle, model = self._handle, self._model()
        if not self._undecided or handle is None or model is None or not self._has_seen(handle):
            return
        self._stop_rehearsing(handle)
        self.times = self._agreed(auto_schedule.best_k(handle, model, *self._costs(model)), model)
        if self.times.k == 0:
            self._leave_to_stock()
            _leave_steps()
            return
        torch.ops.optfuse.choose_k(handle, self.times.k)
        self._choice = {"schedule": "reverse_first", "k": self.times.k}

    def _stop_rehearsing(self, handle: int) -> None:
        self._undecided = False
        auto_schedule.leave_off(self._model(), self)
        torch.ops.optfuse.rehearse_reordering(handle, False)

    def _has_seen(self, handle: int) -> bool:
        """Any layer, in a forward pass with gradients."""
        return len(torch.ops.optfuse.plan_of_reordering(handle)) > 1

    def _costs(self, model: nn.Module) -> tuple[tuple[float, float], bool, int, int | None]:
        before = auto_schedule.bytes_before(model, [layer.weight for layer in self._layers])
        awaits = self._choice["await_reduction"] is not None
        return self._choice["network"], awaits, before, self._choice["memory"]

    def _agreed(self, times: Times, model: nn.Module) -> Times:
        group = auto_schedule.group_of(model)
        return communication.agreed(times, group, self._layers[0].weight.device)

    def _leave_to_stock(self) -> None:
        self._choice = {"schedule": "stock"}
        unseen = ReorderPlan(self._choice, (), tuple(layer.name for layer in self._layers), 0)
        seen = self._handle is not None and self._has_seen(self._handle)
        self._left_off = self.plan if seen else unseen
        self.remove()

    def _check_called(self, complete: list[str]) -> None:
        """Until "auto" has chosen, every layer that runs is rehearsed. Those of a reentrant
        checkpoint are not, and those of compiled code are not seen. complete: with gradients."""
        if not self._undecided or self._handle is None:
            return
        seen = self._has_seen(self._handle)
        if all(self._used()[_COLUMNS - 1 : -1 : _COLUMNS]) if seen else not complete:
            return
        self._stop_rehearsing(self._handle)
        self._leave_to_stock()
        warn(
            'reorder(schedule="auto") chooses at the end of a call of the model, but its layers '
            "have run outside of one (model.forward(x), modules of the model by themselves, "
            "torch.compile, torch.jit.script, nn.DataParallel). Their order is now stock's. Call "
            "model(x), or give reorder() the module that is called, or another schedule",
            UserWarning,
            stacklevel=4,
        )

    def _check_seen(self, complete: list[str], handle: int) -> None:
        """A layer that compiled code computes is never seen."""
        rows: list[int] = torch.ops.optfuse.plan_of_reordering(handle)
        seen = {self._layers[n].name for n in rows[:-1:_COLUMNS]}
        missing = [name for name in complete if name not in seen]
        if missing and not seen:
            raise Error(
                "optfuse: the layers of this model have gradients, but none was seen in its "
                "forward pass. torch.compile, torch.export and torch.jit.script compute layers in "
                "code of their own, vmap and forward-mode AD by nodes of PyTorch, nn.DataParallel "
                "with copies of the weights; there reorder() has no effect: call remove(), or "
                "train the model as it is"
            )
        if missing:
            warn(
                f"the order of {', '.join(missing)} is stock's: their weights did not "
                "come to a Linear or Conv2d operator as they are",
                UserWarning,
                stacklevel=4,
            )


#: Those whose layers are to be checked before a step().
_watching: set[Reordering] = set()


#: The hook that calls them, while there are some.
_hook: list[RemovableHandle] = []


def _watch_steps() -> None:
    remove_retired()
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def _leave_steps() -> None:
    """Outside of any hook of step()."""
    remove_retired()
    if not _watching and _hook:
        _hook.pop().remove()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for reordering in tuple(_watching):
        reordering.before_step()
    if not _watching and _hook:
        retire(_hook.pop())


def _start(layers: list[Layer], choice: dict[str, Any]) -> int:
    schedule = choice["schedule"]
    held = [] if isinstance(schedule, str) else schedule
    schedule = "stock" if schedule == "auto" else schedule  # until k is chosen
    handle: int = torch.ops.optfuse.reorder(
        [layer.weight for layer in layers],
        [layer.name for layer in layers],
        SCHEDULES.index(schedule if isinstance(schedule, str) else "chosen"),
        choice.get("k") or 0,
        choice.get("memory") or 0,
        [n for n, layer in enumerate(layers) if layer.name in held],
        [n for n, layer in enumerate(layers) if layer.fixed],
        [n for n, layer in enumerate(layers) if _is_wanted_beside(layer, choice)],
    )
    return handle


def _is_wanted_beside(layer: Layer, choice: dict[str, Any]) -> bool:
    wanted = choice.get("side_stream", False)
    return wanted if isinstance(wanted, bool) else layer.name in wanted


def _note_of(layer: Layer, recomputed: bool, choice: dict[str, Any], beside: bool) -> str:
    notes = ["recomputed in backward (reentrant checkpoint)" if recomputed else layer.fixed]
    if _is_wanted_beside(layer, choice) and not beside:
        is_on_cpu = layer.weight.device.type == "cpu"
        notes.append(
            "no side stream: on the CPU"
            if is_on_cpu
            else "no side stream: its gradient is added up on another one"
        )
    return "; ".join(note for note in notes if note)


def _plan_of(
    found: list[int], layers: list[Layer], choice: dict[str, Any], beside: frozenset[int]
) -> ReorderPlan:
    rows = []
    for at in range(0, len(found) - 1, _COLUMNS):
        number, turn, x, y, w, _, recomputed = found[at : at + _COLUMNS]
        layer, waits = layers[number], turn >= 0
        note = _note_of(layer, bool(recomputed), choice, number in beside)
        turn_of = turn if waits else None
        row = Row(layer.name, turn_of, waits * (x + y), x, y, w, note, number in beside)
        rows.append(row)
    seen = {row.layer for row in rows}
    unused = tuple(layer.name for layer in layers if layer.name not in seen)
    return ReorderPlan(choice, tuple(rows), unused, found[-1])


def _choice_of(
    schedule: str | Sequence[str], given: dict[str, Any], layers: list[Layer]
) -> dict[str, Any]:
    """The arguments that the schedule has. Raises optfuse.Error if they don't fit it."""
    name = schedule if isinstance(schedule, str) else "chosen"
    needs, may_have = _ARGUMENTS.get(name, ((), ()))
    for argument, value in given.items():
        if value is None and argument in needs:
            raise Error(f"optfuse: reorder() with schedule={schedule!r} needs {argument}=")
        if value is not None and argument not in (*needs, *may_have):
            raise Error(f"optfuse: reorder() with schedule={schedule!r} does not have {argument}=")
    k = given["k"]
    if k is not None and k > len(layers):
        raise Error(f"optfuse: reorder() got k={k}, but this model has {len(layers)} layers")
    if not isinstance(schedule, str):
        _check_names("schedule", schedule, layers)
    return {
        "schedule": schedule,
        **{argument: given[argument] for argument in (*needs, *may_have)},
    }


def _check_names(argument: str, given: Sequence[str], layers: list[Layer]) -> None:
    names = [layer.name for layer in layers]
    strange = [name for name in given if name not in names]
    if strange:
        raise Error(
            f"optfuse: reorder() got {strange[0]!r} in {argument}=, which is no layer of this "
            f"model; its layers are {', '.join(names)}"
        )


@checked(
    model=MODEL,
    schedule=SCHEDULE,
    k=optional(whole("a number of layers", 0)),
    memory=optional(MEMORY),
    network=optional(NETWORK),
    await_reduction=optional(one_of("first_use")),
    skip=LAYER_NAMES,
    side_stream=LAYER_NAMES_OR_FLAG,
)
def reorder(
    model: nn.Module,
    schedule: str | Sequence[str] = "stock",
    k: int | None = None,
    memory: int | None = None,
    network: tuple[float, float] | None = None,
    await_reduction: str | None = None,
    skip: Sequence[str] = (),
    side_stream: bool | Sequence[str] = False,
) -> Reordering:
    """Computes the weight gradients of a model's Linear and Conv2d layers in another order.

        reordering = optfuse.reorder(model, "reverse_first", k=8)

    In the backward pass of a layer dX, the gradient of the input, has to come first: the layer
    before waits for it. dW, the gradients of weight and bias, may come later. Gradients and
    everything computed from them have stock's bits; the order, and what is in memory meanwhile,
    are the schedule's ("Out-of-order backprop", arXiv 2110.00929):

    - "stock": dW right after dX.
    - "last": every dW after the last dX of the pass, in stock's order.
    - "reverse_first": the dW of the first `k` layers of the forward pass after the last dX,
      in the order in which the next forward pass needs them: their gradients are the first to
      be sent to other processes.
    - "budget": from the end of the model on every dW waits whose x and dY (input, and gradient
      of the output) fit into `memory` bytes, with those that wait already.
    - a list of names of modules: the dW of these, in the order of the forward pass.
    - "auto": "reverse_first" with the `k` with which a simulator finds iterations shortest, or
      stock's order, where it finds none 3 % faster. It decides at the end of the first forward
      pass with gradients, in which each layer's tasks run three times more, so that
      DistributedDataParallel orders its buckets accordingly. The first process decides. Where
      stock's order is best, the reordering ends at the first optimizer step, as by remove(), or as
      the next forward pass begins. On the CPU.
      `memory`: extra bytes that are allowed at most. `.times` is what the simulator found, and
      `.plan.choice` what was chosen, to be given back as reorder(model, **choice).

    model: a module, or its DistributedDataParallel wrapper (find_unused_parameters=True keeps
        DDP's buckets in the old order, which takes the gain). Linear, Conv2d and the projections
        of MultiheadAttention are reordered wherever they are, other layers stay as they are.
    network: "auto": seconds a message and seconds a byte, instead of a measurement, for which all
        processes call reorder().
    await_reduction: "auto": "first_use" where the optimizer is fused with Forward(ddp=model).
    skip: names of modules that stay as they are, with all that is in them.
    side_stream: run dW, the adding up of the gradient and in backward fusion the update on a CUDA
        stream of their own, beside dX: those of all layers, or of the layers named. The schedule
        says in which order, "stock" too: each dW then runs beside the dX of the layers before
        it. Layers on the CPU stay as they are, and so does a layer whose gradient somebody has
        tied to another stream, as DistributedDataParallel has; `.plan` says so.

    Returns a Reordering: .plan is a table, .extra_bytes the memory it costs, .remove() ends it;
    it is a context manager, too.

    Raises optfuse.Error for arguments that don't fit, a layer that is reordered already, and
    sharded parameters (DTensors); at the first optimizer step if compiled code has computed
    the layers; and in backward if a gradient is changed in place while its dW waits.
    """
    _process.start()
    check_skip(model, frozenset(skip), "reorder()")
    layers = layers_of(model, frozenset(skip), "reorder()")
    if not layers:
        raise Error("optfuse: reorder() found no Linear or Conv2d layer with a weight to train")
    given = {"k": k, "memory": memory, "network": network, "await_reduction": await_reduction}
    choice = _choice_of(schedule, given, layers)
    if side_stream is not False:
        if side_stream is not True:
            _check_names("side_stream", side_stream, layers)
        choice["side_stream"] = side_stream
    if choice["schedule"] == "auto" and any(layer.weight.device.type != "cpu" for layer in layers):
        raise Error(
            'optfuse: reorder() with schedule="auto" times layers on the CPU only; use '
            'schedule="reverse_first" and try some k='
        )
    if choice["schedule"] == "auto" and network is None:
        device = layers[0].weight.device
        choice["network"] = auto_schedule.network_of(auto_schedule.group_of(model), device)
    return Reordering(model, layers, choice)
