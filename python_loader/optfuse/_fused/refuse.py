# SPDX-License-Identifier: BSD-3-Clause
"""Refusals of fuse(), before any state changes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import label
from optfuse._dtensor.local_tensors import is_dtensor, local_of, why_not
from optfuse._gpu import is_gpu
from optfuse._library.bindings import Error
from optfuse._rules import Group, Rule

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_group(rule: Rule, group: dict[str, Any], index: int, strict: bool) -> None:
    on_cpu = any(param.device.type == "cpu" for param in group["params"])
    untried = rule.tried and not rule.as_made
    if untried and any(is_gpu(param.device) for param in group["params"]):
        raise Error(
            f"optfuse: parameter group {index} is on a GPU, and the kernels that update the others "
            "of this optimizer on the CPU have to be tried on a GPU; unfuse the optimizer, and "
            "fuse it again with all groups"
        )
    if rule.as_made and not all(is_gpu(param.device) for param in group["params"]):
        raise Error(
            f"optfuse: parameter group {index} is on the CPU, and the kernels that update the "
            "others of this optimizer have its bits on a GPU only; unfuse the optimizer, and fuse "
            "it again with all groups"
        )
    for flag in ("differentiable", "capturable"):
        if group.get(flag) and (flag == "differentiable" or on_cpu):
            raise Error(
                f"optfuse: parameter group {index} has {flag}=True, which has no fused "
                f"{'CPU ' if on_cpu else ''}update; set {flag}=False or keep the optimizer as it is"
            )
    if strict and rule.difference(group):
        raise Error(
            f"optfuse: strict=True, but parameter group {index} has {rule.difference(group)}: "
            "PyTorch would compute it with another implementation, whose roundings differ from "
            f"the one that optfuse reproduces bit for bit. Build the optimizer with "
            f"{rule.reference} and a number as lr, or pass strict=False"
        )
    if group.get("foreach"):
        _check_apart(group, index)


def _span_of(tensor: Tensor) -> tuple[str, int, int] | None:
    """Addresses of the first byte and of the one after the last; None: it has no memory."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if tensor.layout is not torch.strided or tensor.is_meta or is_wrapper or not tensor.numel():
        return None
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in strides)
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + (last + 1) * tensor.element_size()


def _check_apart(group: dict[str, Any], index: int) -> None:
    """With foreach=True each operator runs for all parameters of a group before the next operator
    does. One parameter at a time gives the same only if none reads what another writes."""
    params = group["params"]
    spans = sorted((*span, i) for i, param in enumerate(params) if (span := _span_of(param)))
    for (where, _, end, i), (there, begin, _, j) in pairwise(spans):
        if where == there and begin < end:
            raise Error(
                f"optfuse: {label(group, index, i)} and {label(group, index, j)} overlap in "
                "memory, and with foreach=True PyTorch would update them at the same time; build "
                "the optimizer with foreach=False or keep it as it is"
            )


def check_params(groups: list[Group], first: int = 0) -> None:
    """Raises optfuse.Error for parameters that nothing here updates. first: the groups' number
    in errors."""
    for index, group in enumerate(groups, first):
        for i, param in enumerate(group["params"]):
            reason = _why_not(param)
            if reason is not None:
                raise Error(f"optfuse: can't fuse {label(group, index, i)}: {reason}")


def _why_not(param: Tensor) -> str | None:
    if isinstance(param, torch.nn.parameter.UninitializedTensorMixin):
        return "it is not initialized yet; run one forward pass first"
    foreign = _why_foreign(param)
    if foreign is not None:
        return foreign
    if is_dtensor(param):
        return why_not(param) or _why_not(local_of(param))
    if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"it is a tensor subclass ({type(param).__name__}), which optfuse does not support"
    if param.device.type == "meta":
        return "it is on the meta device and has no memory; materialize the model first"
    if param.device.type != "cpu" and not is_gpu(param.device):
        return f"device {param.device} is not supported; only cpu and cuda are"
    if param.is_complex():
        return "it is complex; view it as real (torch.view_as_real) and optimize that"
    if param.layout != torch.strided:
        return f"its layout is {param.layout}; only dense (strided) parameters have fused updates"
    if param.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return f"dtype {param.dtype} has no fused update; supported are {names}"
    return None


def _why_foreign(param: Tensor) -> str | None:
    """Who else moves the parameter's memory."""
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        return (
            "it belongs to FullyShardedDataParallel (FSDP1), which exchanges its memory between "
            "passes; shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if hasattr(param, "ds_id"):
        return (
            "it belongs to DeepSpeed's ZeRO, which exchanges its memory between passes; keep "
            "DeepSpeed's optimizer, or shard the model with torch.distributed.fsdp.fully_shard"
        )
    return None


def check_eager(eager: Iterable[Tensor], optimizer: Optimizer) -> list[Tensor]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    listed = list(eager)
    for i, param in enumerate(listed):
        if id(param) not in known:
            raise Error(
                f"optfuse: eager[{i}] is not a parameter of this optimizer; pass the very "
                "tensors that are in its param_groups"
            )
    return listed


def check_own_hooks(optimizer: Optimizer) -> None:
    """Raises optfuse.Error if its class has registered hooks on gradients that update."""
    classes = [c for c in type(optimizer).__mro__ if issubclass(c, Optimizer)]
    names = [(c.__module__, f"{c.__qualname__}.") for c in classes]

    def is_own(hook: Any) -> bool:
        function: Any = getattr(hook, "func", hook)
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        return any(module == its and name.startswith(prefix) for its, prefix in names)

    for index, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            if any(map(is_own, hooks.values())):
                raise Error(
                    f"optfuse: {type(optimizer).__name__} has a hook of its own on the gradient of "
                    f"{label(group, index, i)}, which updates inside backward(): nothing is left "
                    "to fuse. Keep the optimizer as it is, or make it without its hooks (many "
                    "classes have fused=False for that)"
                )
