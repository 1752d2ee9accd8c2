# SPDX-License-Identifier: BSD-3-Clause
"""While a class's step() is tried on copies, nothing real is within its reach: whoever asks
for the address of a real parameter, gradient or state tensor gets an error. What Python can
exchange without an address is compared afterwards and put back, and the bits, which only an
address that was taken before can still lead to, are compared by checksums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import Error, guard
from optfuse._own_step.reach import is_wrapper, reachable, span_of
from optfuse._own_step.twin import HIDDEN
from optfuse._trials.compare import deep_copy, difference

_CONTENTS = ("param_groups", "state")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Real:
    """A real tensor and, if it is a parameter, what assigning to its attributes changes."""

    tensor: Tensor
    alias: Tensor  # of its memory and shape
    grad: Tensor | None
    requires_grad: bool
    checksum: int | None

    def is_same(self) -> bool:
        now, before = self.tensor.detach(), self.alias
        same_grad = not self.tensor.is_leaf or self.tensor.grad is self.grad
        return (
            same_grad
            and self.tensor.requires_grad == self.requires_grad
            and (now.dtype, now.device) == (before.dtype, before.device)
            and (now.shape, now.stride()) == (before.shape, before.stride())
            and now.data_ptr() == before.data_ptr()
        )

    def put_back(self) -> None:
        self.tensor.data = self.alias
        if self.tensor.is_leaf:
            self.tensor.requires_grad_(self.requires_grad)
            self.tensor.grad = self.grad


RAN = (
    "Its step() was tried on small copies: whatever it counts outside of the optimizer, as in a "
    "global or an attribute of its class, may have advanced"
)
trials = 0  # that have begun, each of which runs foreign code


@contextlib.contextmanager
def says_what_ran() -> Iterator[None]:
    """An error of the body says that there was a trial, if there was one."""
    before = trials
    try:
        yield
    except Error as error:
        if trials != before:
            error.args = (f"{error}. {RAN}",)
        raise


@contextlib.contextmanager
def untouched(optimizer: Optimizer, name: str) -> Iterator[None]:
    """Raises optfuse.Error if the body changed anything of the optimizer. Another thread that
    uses its parameters meanwhile gets an error."""
    global trials
    trials += 1
    if not guard("untouched"):
        yield
        return
    own = optimizer.__dict__
    contents = {k: v for k, v in own.items() if k in _CONTENTS or k not in HIDDEN}
    tensors = _tensors_of(optimizer, contents)
    shared: dict[int, Any] = {id(optimizer): optimizer, **{id(t): t for t in tensors}}
    before = deep_copy(contents, "the optimizer's options, attributes or state", shared)
    real = [_real(tensor) for tensor in tensors if not is_wrapper(tensor)]
    memory = [one.alias for one in real]
    sealed = [memory[i] for i in torch.ops.optfuse.seal(memory)]
    try:
        yield
    finally:
        torch.ops.optfuse.unseal(sealed)
        changed = _put_back(optimizer, contents, before, real)
        if changed is not None:
            raise Error(
                f"optfuse: can't fuse {name}: tried on copies its step() changed {changed}. Use "
                "the optimizer as it is"
            )


def _tensors_of(optimizer: Optimizer, contents: dict[str, Any]) -> list[Tensor]:
    found = [value for value in reachable(contents) if isinstance(value, Tensor)]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params if p.grad is not None]
    return found + [grad for grad in grads if span_of(grad) is not None]


def _real(tensor: Tensor) -> _Real:
    grad = tensor.grad if tensor.is_leaf else None
    return _Real(tensor, tensor.detach(), grad, tensor.requires_grad, _checksum(tensor))


def _checksum(tensor: Tensor) -> int | None:
    """A checksum of a tensor's bits: one changed word always changes it, several nearly always
    do."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return None
    bits = tensor.detach()
    if tensor.is_complex():
        bits = torch.view_as_real(bits)
    if bits.is_contiguous() and bits.data_ptr() % 8 == 0 and bits.storage_offset() % 8 == 0:
        bits = bits.view(-1)
        words = bits.numel() * bits.element_size() // 8 * 8 // bits.element_size()
        head, tail = bits[:words], bits[words:]
        return hash((int(head.view(torch.int64).sum()), _sum(tail) if tail.numel() else 0))
    return _sum(bits)


def _sum(bits: Tensor) -> int:
    return int(bits.view(_INTEGERS[bits.element_size()]).sum(dtype=torch.int64))


def _put_back(
    optimizer: Optimizer, contents: dict[str, Any], before: dict[str, Any], real: list[_Real]
) -> str | None:
    """Puts the optimizer back; the name of a change, if there was one."""
    changed = None
    for one in real:
        if not one.is_same():
            one.put_back()
            changed = "a tensor of a real parameter"
    now = {k: optimizer.__dict__.get(k) for k in contents}
    place = difference("", now, before)
    if place is not None:
        optimizer.__dict__.update(before)
        changed = f"the real optimizer's {place}"
    if any(one.checksum is not None and _checksum(one.tensor) != one.checksum for one in real):
        changed = (
            "real parameters, gradients or state by their raw address; they can't be put back: "
            "load them again from a checkpoint"
        )
    return changed
