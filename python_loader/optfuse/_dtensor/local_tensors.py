# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that are DTensors: the library updates their local tensors.

It sees a local tensor in the place of the parameter, of each state tensor and, while it looks,
of the gradient: `.grad` of the local parameter is lent for a step, and taken back."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from optfuse._dtensor import fsdp
from optfuse._gpu import current_stream
from optfuse._library.bindings import Error, guard, lib, lib_with_gil

_PLAIN = (Tensor, Parameter)
_local_tensor_of, _spec_of = map(attrgetter, ("_local_tensor", "_spec"))
_are_of, _are_in = lib_with_gil.of_shim_are_of, lib_with_gil.of_shim_are_in
_PLACEMENTS = {"Shard", "_StridedShard", "Replicate"}
_ENOUGH = 16384  # elements of gradients that wait for others no longer


def _class() -> Any:
    """DTensor, if anybody can have one."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(value: Any) -> bool:
    """Whether it is one, and not of a subclass."""
    if type(value) in _PLAIN:
        return False
    cls = _class()
    return cls is not None and type(value) is cls


def local_of(value: Any) -> Any:
    """A DTensor's local tensor; everything else as it is."""
    return value._local_tensor if is_dtensor(value) else value


def why_not(param: Any) -> str | None:
    """Why the library can't update a DTensor, whatever its local tensor's dtype and device."""
    local = param._local_tensor
    if type(local) not in _PLAIN:
        return f"it is a DTensor over a tensor subclass ({type(local).__name__})"
    strange = [p for p in param.placements if type(p).__name__ not in _PLACEMENTS]
    if strange:
        return (
            f"it is a DTensor with the placement {strange[0]!r}; only Shard and Replicate have "
            "fused updates. Redistribute it first, or keep the optimizer as it is"
        )
    return None


def has_holes(param: Tensor) -> bool:
    """Whether its elements are not all that is in its span of memory, or overlap."""
    local: Tensor = local_of(param)
    if local.is_contiguous():
        return False
    filled = 1
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size != 1 and stride != filled:
            return True
        filled *= size
    return False


def _same_layout(param: Any, other: Any) -> bool:
    ours, theirs = param._spec, other._spec
    if ours is theirs:
        return True
    return bool(ours.placements == theirs.placements and ours.mesh == theirs.mesh)


def _layout(tensor: Any) -> str:
    if not is_dtensor(tensor):
        return f"a {type(tensor).__name__}"
    return f"a DTensor with placements {tuple(tensor.placements)} on {tensor.device_mesh}"


def check_layout(what: str, label: str, param: Any, tensor: Any) -> None:
    """Raises unless a gradient or a state tensor is laid out as its parameter is."""
    if not is_dtensor(tensor) or not _same_layout(param, tensor):
        raise Error(
            f"optfuse: {what} of {label} is {_layout(tensor)}, but the parameter is "
            f"{_layout(param)}, and only equal layouts have a fused update: redistribute it "
            "before step(), or keep the optimizer as it is. Nothing was updated"
        )


def _local_gradient(label: str, param: Any, grad: Any) -> Tensor:
    check_layout("the gradient", label, param, grad)
    local: Any = grad._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    if type(local) not in _PLAIN:
        raise Error(
            f"optfuse: the gradient of {label} is a DTensor over a tensor subclass "
            f"({type(local).__name__}), which optfuse does not support; nothing was updated"
        )
    return local  # type: ignore[no-any-return]


def _references(grads: list[Any], locals_: list[Any]) -> Iterable[tuple[int, int]]:
    """To the Python objects of gradients and of their local tensors, which are in these lists."""
    return zip(map(sys.getrefcount, grads), map(sys.getrefcount, locals_), strict=True)


class _Gradient(Tensor):
    __slots__ = ("_local_tensor",)


@functools.cache
def _usual_references() -> tuple[int, int]:
    """Where nobody else has them but the parameter, and whoever asks."""
    param = torch.zeros(1, device="cpu", requires_grad=True)
    grad: Any = torch.zeros(1, device="cpu").as_subclass(_Gradient)
    grad._local_tensor = torch.zeros(1, device="cpu")
    param.grad = grad
    del grad
    grads = [param.grad]
    return next(iter(_references(grads, list(map(_local_tensor_of, grads)))))


class Sharded:
    """The DTensors among the parameters of one plan."""

    def __init__(self, plan: int, params: list[Tensor], labels: list[str]) -> None:
        self.plan = plan
        self._labels = labels
        self._params: dict[int, Any] = {i: p for i, p in enumerate(params) if is_dtensor(p)}
        self._locals = {slot: param._local_tensor for slot, param in self._params.items()}
        self._numels = {slot: local.numel() for slot, local in self._locals.items()}
        units = fsdp.units_of(self._params.values())
        self._units = {i: units[id(p)] for i, p in self._params.items() if id(p) in units}
        self._flats: dict[int, Tensor] = {}  # through which FSDP2 reads the parameter of a slot
        self._handles: list[Any] = []
        self.fresh: list[int] = []  # slots whose gradient is complete
        self._forget()
        self.reduced_on: torch.Stream | None = None  # where, on a GPU
        for slot in self._params:
            self._tell_aliases(slot)
            self.tell_state(slot, [])

    def _tell_aliases(self, slot: int) -> None:
        """Who else uses the memory of this parameter, as far as it is FSDP2."""
        unit = self._units.get(slot)
        known = [] if unit is None else fsdp.aliases_of(unit, self._locals[slot])
        if unit is not None:
            self._flats[slot] = known[0]
        torch.ops.optfuse.know_aliases(self.plan, slot, known)

    def tell_state(self, slot: int, state: list[Any]) -> None:
        """The DTensors of a slot's local tensors. The link keeps them alive."""
        wrappers = [self._params[slot], *filter(is_dtensor, state)]
        with torch._C._DisableTorchDispatch():
            torch.ops.optfuse.know_wrappers(self.plan, slot, wrappers)

    def are_replaced(self) -> bool:
        """Whether a parameter has got another local tensor: FSDP2 pads it at the first forward
        pass, and Module.to() exchanges it."""
        return not _are_in([*self._locals.values()], [*self._params.values()], "_local_tensor")

    def follow(self) -> None:
        """FSDP2 may have replaced the tensors through which it reads a parameter, and nothing
        else."""
        if _are_in([*self._flats.values()], [*self._units.values()], fsdp.FLAT):
            return
        for slot in self._units:
            self._tell_aliases(slot)

    def _gradients(self, slots: list[int]) -> list[Any]:
        """.grad of these; that attribute takes longer than all else here, for a subclass."""
        found: list[Any] = []
        if not lib_with_gil.of_shim_are_gradients(self.plan, slots, found):
            found = [self._params[slot].grad for slot in slots]
        return found

    def _local_gradients(self, slots: list[int], grads: list[Any]) -> list[Tensor]:
        """Raises for one that the library can't use."""
        cls, params = _class(), [self._params[slot] for slot in slots]
        if _are_of(grads, cls, cls) and _are_in(list(map(_spec_of, params)), grads, "_spec"):
            locals_ = list(map(_local_tensor_of, grads))
            if _are_of(locals_, Tensor, Tensor):
                return locals_
        labels = [self._labels[slot] for slot in slots]
        return list(map(_local_gradient, labels, params, grads))

    # ---- step()

    def lend(self) -> None:
        """The library sees the gradients. Raises, with nothing lent, for one that it can't use."""
        self._forget()
        slots = [*self._params]
        grads = self._gradients(slots)
        if any(map(is_, grads, repeat(None))):
            there = [grad is not None for grad in grads]
            slots, grads = list(compress(slots, there)), list(compress(grads, there))
        torch.ops.optfuse.lend(self.plan, slots, self._local_gradients(slots, grads))

    def take_back(self, stepped: bool) -> None:
        torch.ops.optfuse.take_back(self.plan, stepped)

    # ---- backward mode

    def attach(self) -> None:
        """FSDP2 calls the hooks of a parameter when its gradient is reduced; others have
        theirs called by autograd."""
        self.detach()
        myself = weakref.ref(self)
        for slot, param in self._params.items():
            if not param.requires_grad:
                continue
            hook = _note(myself, slot) if slot in self._units else _complete(myself, slot)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
        if self._units:
            fsdp.listen()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self.fresh = [], []

    def _forget(self) -> None:
        """The gradients that wait are left to step()."""
        self._waiting: list[int] = []
        self._of_groups: list[Any] = []  # the units of their groups
        self._elements, self._pass = 0, -1  # of them all; the backward pass

    def _known(self, noted: list[int]) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Slots whose gradients nobody else has, who could change them before step(); their local
        gradients; and those of all."""
        usual = _usual_references() if guard("held") else (sys.maxsize, sys.maxsize)
        cls, params = _class(), self._params
        slots = [slot for slot in noted if params[slot]._local_tensor is self._locals[slot]]
        grads = self._gradients(slots)
        if not _are_of(grads, cls, cls):
            there = [type(grad) is cls for grad in grads]
            slots, grads = list(compress(slots, there)), list(compress(grads, there))
        locals_ = list(map(_local_tensor_of, grads))
        held = _references(grads, locals_)
        alone = [whole <= usual[0] and local <= usual[1] for whole, local in held]
        slots, grads = list(compress(slots, alone)), list(compress(grads, alone))
        return slots, self._local_gradients(slots, grads), locals_

    def complete(self, units: Iterable[Any], only_kept: bool) -> None:
        """The gradients of self.fresh are complete. units: those of FSDP2 whose gradients use the
        same memory. only_kept: nobody writes to what they are views of; then a few small ones wait
        for those of other groups."""
        noted, self.fresh = self.fresh, []
        this = torch._C._current_graph_task_id()
        if this == -1:
            return  # FSDP2 was told to reduce after backward()
        begins = this != self._pass
        if begins:
            self._forget()  # of a pass that has failed, or that this one is inside of
            self._pass = this
        elif not only_kept:
            self._update(True)
        self._waiting += noted
        self._of_groups += units
        self._elements += sum(map(self._numels.__getitem__, noted))
        waits = only_kept and self.reduced_on is None and self._elements < _ENOUGH
        if begins or not waits:
            self._update(only_kept)

    def end_pass(self) -> None:
        if self._waiting and self._pass == torch._C._current_graph_task_id():
            self._update(True)
        self._forget()

    def _update(self, only_kept: bool) -> None:
        """Updates of gradients that wait run where nobody else knows these, and the others are
        left to step()."""
        slots, grads, siblings = self._known(self._waiting)
        siblings += fsdp.gradients_of(set(self._of_groups).difference(self._units.values()))
        self._waiting, self._of_groups, self._elements = [], [], 0
        for slot in slots:
            if slot in self._units:
                fsdp.await_gradient(self._units[slot])
        updated = None
        try:
            with fsdp.on(self.reduced_on):
                updated = torch.ops.optfuse.complete(self.plan, slots, grads, siblings, only_kept)
        finally:
            if updated is None:
                updated = [slot for slot in slots if lib.of_shim_is_updated(self.plan, slot)]
            self._consume(updated)

    def _consume(self, slots: list[int]) -> None:
        for slot in torch.ops.optfuse.consume(self.plan, slots):
            local = torch.ops.optfuse.consumed_like(self.plan, self._locals[slot])
            made: Any = _class()(local, self._params[slot]._spec, requires_grad=False)
            with torch._C._DisableTorchDispatch():
                torch.ops.optfuse.consume_by(self.plan, slot, made, local)


Hook = Callable[[Tensor], None]


def _note(sharded: weakref.ref[Sharded], slot: int) -> Hook:
    def note(param: Tensor) -> None:
        known = sharded()
        if known is not None:
            fsdp.note(known, slot)
            known.reduced_on = None if param.is_cpu else current_stream(param.device)

    return note


def _complete(sharded: weakref.ref[Sharded], slot: int) -> Hook:
    def complete(_: Tensor) -> None:
        known = sharded()
        if known is not None:
            known.fresh.append(slot)
            known.complete((), False)

    return complete
