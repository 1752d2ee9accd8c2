# SPDX-License-Identifier: BSD-3-Clause
"""Parameters that are DTensors: the library updates their local tensors.

It sees a local tensor in the place of the parameter, of each state tensor and, while it looks,
of the gradient: `.grad` of the local parameter is lent for a step, and taken back."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from optfuse._dtensor import fsdp
from optfuse._gpu import current_stream
from optfuse._library.bindings import Error, guard, lib

_PLAIN = (Tensor, Parameter)
_PLACEMENTS = {"Shard", "_StridedShard", "Replicate"}


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
    if is_dtensor(grad) and grad._spec is param._spec and type(grad._local_tensor) is Tensor:
        return grad._local_tensor  # type: ignore[no-any-return]
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


def _references(grad: Any) -> tuple[int, int]:
    """To the Python objects of a gradient and of its local tensor."""
    return sys.getrefcount(grad), sys.getrefcount(grad._local_tensor)


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
    grad = param.grad
    return _references(grad)


class Sharded:
    """The DTensors among the parameters of one plan."""

    def __init__(self, plan: int, params: list[Tensor], labels: list[str]) -> None:
        self.plan = plan
        self._labels = labels
        self._params: dict[int, Any] = {i: p for i, p in enumerate(params) if is_dtensor(p)}
        self._locals = {slot: param._local_tensor for slot, param in self._params.items()}
        self._units = fsdp.units_of(self._params.values())
        self._aliases: dict[int, list[Tensor]] = {}
        self._lent: list[int] = []  # slots
        self._lent_used: list[int] = []  # whose gradients backward has used
        self._consumed: dict[int, Any] = {}  # by slots: what .grad becomes
        self._handles: list[Any] = []
        self.fresh: list[int] = []  # slots whose gradient is complete
        self.reduced_on: torch.Stream | None = None  # where, on a GPU
        for slot in self._params:
            self._tell_aliases(slot)
            self.tell_state(slot, [])

    def _tell_aliases(self, slot: int) -> None:
        """Who else uses the memory of this parameter, as far as it is FSDP2."""
        unit = self._units.get(id(self._params[slot]))
        known = [] if unit is None else fsdp.aliases_of(unit, self._locals[slot])
        self._aliases[slot] = known
        torch.ops.optfuse.know_aliases(self.plan, slot, known)

    def tell_state(self, slot: int, state: list[Any]) -> None:
        """The DTensors of a slot's local tensors. The link keeps them alive."""
        wrappers = [self._params[slot], *filter(is_dtensor, state)]
        with torch._C._DisableTorchDispatch():
            torch.ops.optfuse.know_wrappers(self.plan, slot, wrappers)

    def are_replaced(self) -> bool:
        """Whether a parameter has got another local tensor: FSDP2 pads it at the first forward
        pass, and Module.to() exchanges it."""
        locals_ = self._locals
        return any(p._local_tensor is not locals_[i] for i, p in self._params.items())

    def follow(self) -> None:
        """FSDP2 may have replaced the tensors through which it reads a parameter, and nothing
        else."""
        for slot, param in self._params.items():
            unit = self._units.get(id(param))
            if unit is not None and not fsdp.has_alias(unit, self._aliases[slot]):
                self._tell_aliases(slot)

    # ---- step()

    def lend(self) -> None:
        """The library sees the gradients. Raises, with nothing lent, for one that it can't use."""
        slots, grads, wrappers = [], [], []
        found = {slot: param.grad for slot, param in self._params.items()}
        gone = [slot for slot, grad in found.items() if grad is None]
        consumed = _consumed_among(found)
        for slot, grad in found.items():
            if grad is not None and slot not in consumed:
                slots.append(slot)
                grads.append(_local_gradient(self._labels[slot], self._params[slot], grad))
                wrappers.append(grad)
        self._lent = slots
        if gone:
            torch.ops.optfuse.discard(self.plan, gone)
        with torch._C._DisableTorchDispatch():  # of the wrappers it takes the addresses only
            torch.ops.optfuse.lend(self.plan, slots, grads, wrappers)
            used = [found[slot] for slot in consumed]
            self._lent_used = list(consumed)
            torch.ops.optfuse.lend(self.plan, self._lent_used, used, used)

    def take_back(self, stepped: bool) -> None:
        torch.ops.optfuse.take_back(self.plan, self._lent)
        torch.ops.optfuse.discard(self.plan, self._lent_used)  # nobody else may hold them
        if stepped and guard("wrapper_version"):
            torch.autograd.graph.increment_version([self._params[slot] for slot in self._lent])
        self._lent = self._lent_used = []

    # ---- backward mode

    def attach(self) -> None:
        """FSDP2 calls the hooks of a parameter when its gradient is reduced; others have
        theirs called by autograd."""
        self.detach()
        myself = weakref.ref(self)
        for slot, param in self._params.items():
            if not param.requires_grad:
                continue
            is_reduced = id(param) in self._units
            hook = _note(myself, slot) if is_reduced else _complete(myself, slot)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
        if self._units:
            fsdp.listen(self)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _completed(self, noted: list[int]) -> tuple[list[int], list[Tensor]]:
        """Slots whose gradients nobody else has, who could change them before step(); and
        their local gradients."""
        usual = _usual_references() if guard("held") else (sys.maxsize, sys.maxsize)
        cls = _class()
        slots, grads = [], []
        kept = {slot: self._consumed[slot] for slot in noted if slot in self._consumed}
        for slot in kept.keys() - _consumed_among(kept):
            del self._consumed[slot], kept[slot]  # zeroed in place, and added to since
        del kept
        for slot in noted:
            param = self._params[slot]
            grad = param.grad
            if type(grad) is not cls or param._local_tensor is not self._locals[slot]:
                continue
            whole, local = _references(grad)
            if whole <= usual[0] and local <= usual[1]:
                slots.append(slot)
                grads.append(_local_gradient(self._labels[slot], param, grad))
        return slots, grads

    def complete(self, siblings: fsdp.Siblings, only_kept: bool) -> None:
        """The gradients of self.fresh are complete: their updates run where nobody else knows
        them, and the others are left to step(). siblings: what uses the same memory. only_kept:
        nobody writes to what they are views of."""
        noted, self.fresh = self.fresh, []
        if torch._C._current_graph_task_id() == -1:
            return  # FSDP2 was told to reduce after backward()
        slots, grads = self._completed(noted)
        for slot in slots:
            if unit := self._units.get(id(self._params[slot])):
                fsdp.await_gradient(unit)
        updated = None
        try:
            with fsdp.on(self.reduced_on):
                updated = torch.ops.optfuse.complete(self.plan, slots, grads, siblings(), only_kept)
        finally:
            if updated is None:
                updated = [slot for slot in slots if lib.of_shim_is_updated(self.plan, slot)]
            self._consume(updated)

    def _consume(self, slots: list[int]) -> None:
        for slot in slots:
            param = self._params[slot]
            if slot not in self._consumed or _is_kept(self._consumed, slot):
                self._consumed[slot] = _consumed(self.plan, param, self._locals[slot])
            param.grad = self._consumed[slot]
        consumed = [self._consumed[slot]._local_tensor for slot in slots]
        torch.ops.optfuse.consume_again(self.plan, slots, consumed)
        torch.autograd.graph.increment_version([self._params[slot] for slot in slots])
        torch.ops.optfuse.note_versions(self.plan, slots)


_ALONE = {0: object()}


def _is_kept(consumed: dict[int, Any], slot: int) -> bool:
    """Whether a script still has one that has been .grad."""
    return sys.getrefcount(consumed[slot]) > sys.getrefcount(_ALONE[0])


def _consumed(plan: int, param: Any, local: Tensor) -> Any:
    """A DTensor that reads as a consumed gradient."""
    consumed = torch.ops.optfuse.consumed_like(plan, local)
    wrapper: Any = _class()(consumed, param._spec, requires_grad=False)
    with torch._C._DisableTorchDispatch():
        torch.ops.optfuse.consume_wrapper(wrapper, consumed)
    wrapper._optfuse_consumed = True
    return wrapper


def _consumed_among(grads: dict[int, Any]) -> set[int]:
    """The slots of gradients that are consumed, and have not been zeroed in place since."""
    made = {slot: grad for slot, grad in grads.items() if hasattr(grad, "_optfuse_consumed")}
    with torch._C._DisableTorchDispatch():
        consumed = torch.ops.optfuse.are_consumed(list(made.values())) if made else []
    return {slot for slot, is_consumed in zip(made, consumed, strict=True) if is_consumed}


Hook = Callable[[Tensor], None]


def _note(sharded: weakref.ref[Sharded], slot: int) -> Hook:
    def note(param: Tensor) -> None:
        known = sharded()
        if known is not None:
            known.fresh.append(slot)
            known.reduced_on = current_stream(param.device)

    return note


def _complete(sharded: weakref.ref[Sharded], slot: int) -> Hook:
    def complete(_: Tensor) -> None:
        known = sharded()
        if known is not None:
            known.fresh.append(slot)
            known.complete(list, False)

    return complete
