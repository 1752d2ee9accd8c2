# SPDX-License-Identifier: BSD-3-Clause
"""masters(): parameters on the CPU that an optimizer trains in the place of a model's weights.
Hooks around step() copy gradients down before the update and masters up behind it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, optimizer
from torch.utils.weak import TensorWeakRef

from optfuse import _process
from optfuse._arguments.check import PARAMETERS, Kind, checked, need, parameters_of
from optfuse._bits import same_bits
from optfuse._clipping import one_call
from optfuse._library.bindings import Error
from optfuse._patches.listed import MASTERS
from optfuse._patches.replacing import after, replace, warn_of_changes


class _Twin:
    """The weight of one master, which knows it weakly."""

    def __init__(self, master: Parameter, weight: Tensor, number: int) -> None:
        self.master, self._weight = TensorWeakRef(master), TensorWeakRef(weight)
        self.label = f"weight {number} of shape {tuple(weight.shape)}"
        self.spare: Tensor | None = None  # memory of the master's gradient, between two steps
        self.note(master)

    @property
    def weight(self) -> Tensor:
        if (found := self._weight()) is None:
            raise Error(
                f"optfuse: {self.label} no longer exists, but its master does: call "
                "optfuse.masters() again, and make the optimizer over what it returns"
            )
        return found  # type: ignore[no-any-return]

    def note(self, master: Parameter) -> None:
        self.versions = self.weight._version, master._version

    def check(self, master: Parameter) -> None:
        """Before step(): the two are one number, as far as versions tell."""
        if (self.weight._version, master._version) != self.versions:
            which = "" if self.weight._version != self.versions[0] else "the master of "
            raise Error(
                f"optfuse: others than step() have written {which}{self.label}. Of what masters() "
                "returned call take_over(), which copies weights to masters, or hand_over()"
            )
        if master.grad is not None:
            raise Error(
                f"optfuse: the master of {self.label} has a gradient, which the weight's would "
                "replace: have backward() reach the weights alone, and call zero_grad()"
            )


_twins: dict[int, _Twin] = {}  # by their masters' ids


def _pairs(tensors: Iterable[Tensor]) -> list[tuple[Any, _Twin]]:
    """The masters among them, and their twins."""
    found = ((tensor, _twins[id(tensor)]) for tensor in tensors if id(tensor) in _twins)
    return [(master, twin) for master, twin in found if twin.master() is master]


class Masters(list[Parameter]):
    """The list of masters(). Its methods raise optfuse.Error if a weight no longer exists."""

    @torch.no_grad()
    def take_over(self) -> None:
        """Has the masters take the weights' numbers, after others have written the weights, say
        model.load_state_dict(). A master that is its weight when rounded keeps all its bits."""
        for master, twin in _pairs(self):
            number = twin.weight.detach().cpu()
            if not same_bits(number, master.detach().to(number.dtype)):
                master.copy_(number)
            twin.note(master)

    def hand_over(self) -> None:
        """Has the weights take the masters' numbers, rounded, after a script has loaded these."""
        _copy_up(_pairs(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)  # a copy has no weights


def _floating(value: Any) -> torch.dtype:
    need(isinstance(value, torch.dtype) and value.is_floating_point)
    return value  # type: ignore[no-any-return]


@checked(params=PARAMETERS, dtype=Kind("a floating-point dtype, such as torch.float32", _floating))
def masters(params: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> Masters:
    """Parameters on the CPU for an optimizer to train in the place of a model's weights.

        masters = optfuse.masters(model.parameters())
        optimizer = optfuse.fuse(torch.optim.AdamW(masters, lr=1e-4, fused=True))

    step() first copies the weights' gradients to the CPU, in the masters' dtype, and last the
    masters into the weights, to nearest even. zero_grad() and GradScaler act on the weights'
    gradients; clip these, by model.parameters(). state_dict() is stock's; save the masters, too.

    params: dense leaves of floating-point dtypes on any device. Leave frozen ones out.
    dtype: of the masters. It must hold every number of the weights' dtypes.

    Returns a list of torch.nn.Parameter: for each weight one of its shape, with its number in
    memory of its own: with its gradient 8 bytes an element in float32. The list and the optimizer
    own the masters; nothing here owns a weight. After others than step() have written weights or
    masters, the list's take_over() or hand_over() makes them equal again.

    Raises optfuse.Error for weights that it can't take. step() raises it, with nothing changed,
    after such a write, as far as versions tell (those through .data are not seen), if a weight no
    longer exists, or if a master has a gradient of its own; functions that clip do for masters.
    """
    weights = list(params)
    if len(set(map(id, weights))) < len(weights):
        raise Error("optfuse: masters() got a weight twice; pass each one once")
    for i, weight in enumerate(weights):
        if reason := _unfit(weight, dtype):
            raise Error(f"optfuse: masters() can't take weight {i} of {len(weights)}: {reason}")
    _start()
    made = Masters()
    for i, weight in enumerate(weights):
        master = Parameter(weight.detach().to("cpu", dtype, copy=True), weight.requires_grad)
        _twins[id(master)] = _Twin(master, weight, i)
        weakref.finalize(master, _twins.pop, id(master), None)
        made.append(master)
    return made


def _unfit(weight: Tensor, dtype: torch.dtype) -> str:
    if type(weight) not in (Tensor, Parameter):
        return f"it is a {type(weight).__name__}, and only plain tensors are copied"
    if weight.layout != torch.strided or weight.is_meta:
        return "it is sparse or has no numbers; make it dense, on a device"
    if not weight.is_leaf:
        return "it is computed from others and gets no gradient; pass those others"
    if not weight.is_floating_point() or torch.promote_types(weight.dtype, dtype) != dtype:
        return f"{dtype} does not hold every number of {weight.dtype}; pass another dtype="
    return ""


@torch.no_grad()
def _copy_down(pairs: list[tuple[Any, _Twin]]) -> None:
    for master, twin in pairs:
        if (grad := twin.weight.grad) is None:
            continue
        on_cpu = grad.cpu()  # in its own dtype: a GPU would widen it before it goes down
        memory = torch.empty_like(on_cpu, dtype=master.dtype) if twin.spare is None else twin.spare
        master.grad, twin.spare = memory.copy_(on_cpu), None


@torch.no_grad()
def _copy_up(pairs: list[tuple[Any, _Twin]]) -> None:
    for master, twin in pairs:
        twin.weight.copy_(master)  # launches the master's update, if that is pending
        twin.note(master)
        if master.grad is not None:
            twin.spare, master.grad = master.grad, None


def _has_masters(optimizer: Optimizer) -> bool:
    return bool(_pairs(parameters_of(optimizer)))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    pairs = _pairs(parameters_of(optimizer))
    if not pairs:
        return None
    for master, twin in pairs:
        twin.check(master)
    for name in ("grad_scale", "found_inf"):  # GradScaler's, perhaps on a GPU
        if isinstance(found := vars(optimizer).get(name), Tensor):
            vars(optimizer)[name] = found.cpu()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _copy_down(pairs)
        return None

    def evaluate() -> Any:
        _copy_up(pairs)  # step() may have changed the masters
        loss = closure()
        _copy_down(pairs)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _copy_up(_pairs(parameters_of(optimizer)))


def _refuse_to_clip(params: list[Tensor], *_: Any) -> None:
    for master, twin in _pairs(params):
        if master.grad is None and twin.weight.grad is not None:
            raise Error(
                f"optfuse: can't clip the master of {twin.label}, whose gradient is the weight's "
                "until step(): clip model.parameters()"
            )


@functools.cache
def _start() -> None:
    _process.start()
    warn_of_changes(MASTERS)
    stock_zero_grad, unscale = Optimizer.zero_grad, torch.amp.GradScaler._unscale_grads_

    @functools.wraps(stock_zero_grad)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        stock_zero_grad(self, set_to_none)
        for weight in (twin.weight for _, twin in _pairs(parameters_of(self))):
            weight.grad = None if set_to_none or weight.grad is None else weight.grad.zero_()

    @functools.wraps(unscale)
    def unscale_grads(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        params = parameters_of(optimizer)
        if weights := {id(master): twin.weight for master, twin in _pairs(params)}:
            params = [weights.get(id(param), param) for param in params]
            optimizer = SimpleNamespace(param_groups=[{"params": params}])
        return unscale(self, optimizer, *args, **kwargs)

    for hook in (_before_step, _after_step):
        hook.concerns = _has_masters  # else classes without kernels would be left to step()
    optimizer.register_optimizer_step_pre_hook(_before_step)
    optimizer.register_optimizer_step_post_hook(_after_step)
    for name in ("clip_norm", "clip_value", "refuse_final"):
        replace(one_call, name, after(_refuse_to_clip, getattr(one_call, name)))
    replace(Optimizer, "zero_grad", zero_grad, MASTERS)
    replace(torch.amp.GradScaler, "_unscale_grads_", unscale_grads)
