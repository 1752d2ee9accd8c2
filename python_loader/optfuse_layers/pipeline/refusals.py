# SPDX-License-Identifier: BSD-3-Clause
"""Refusals of a Pipeline, before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._clipping.preconditioners import kfac_of
from optfuse._library.bindings import BACKWARD, FINAL, Error
from optfuse._link import Link, link_of
from optfuse._options import is_fused
from optfuse_layers.pipeline.flow import Flow
from optfuse_layers.pipeline.plan import SYNCHRONOUS, PipelinePlan
from optfuse_layers.pipeline.shapes import Spec
from optfuse_layers.pipeline.shared_weights import Tie, ties_of


def check_module(plan: PipelinePlan, module: nn.Sequential) -> None:
    if len(module) != len(plan.layers):
        raise Error(
            f"optfuse: this plan has {len(plan.layers)} layers and the module {len(module)}; make "
            "a plan of this module"
        )
    seen: dict[int, int] = {}
    is_synchronous = plan.strategy in SYNCHRONOUS
    tied = {id(tie.parameter) for tie in ties_of(module)} if is_synchronous else set()
    for n, (layer, planned) in enumerate(zip(module, plan.layers, strict=True)):
        trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        if trained != planned.parameters:
            raise Error(
                f"optfuse: layer {n} ({type(layer).__name__}) has {trained:,} trained elements, in "
                f"the plan {planned.parameters:,}; make a plan of this module"
            )
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if id(tensor) not in tied and seen.setdefault(id(tensor), n) != n:
                raise Error(
                    f"optfuse: {name!r} of layer {n} ({type(layer).__name__}) is also of layer "
                    f"{seen[id(tensor)]}; a Pipeline shares a parameter of two layers in plans "
                    "without delays, and nothing else: make one entry of both, or copy it"
                )


def check_processes(
    plan: PipelinePlan, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The group to use; None: there is one process."""
    if plan.processes == 1 and group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise Error(
            f"optfuse: this plan has {plan.processes} processes, and torch.distributed is not "
            "initialized; call torch.distributed.init_process_group() first"
        )
    found = dist.group.WORLD if group is None else group
    assert found is not None
    if found.size() != plan.processes:
        raise Error(
            f"optfuse: this plan has {plan.processes} processes, and the process group "
            f"{found.size()}; make a plan for as many"
        )
    return found


def _refuse_final(link: Link) -> None:
    if link.mode == FINAL:
        raise Error(
            "optfuse: a Pipeline adds up the gradients of several batches, and "
            "Backward(final=True) would update with each of them; use another mode"
        )


def check_optimizer(
    plan: PipelinePlan, module: nn.Sequential, layers: Iterable[int], optimizer: Optimizer
) -> None:
    """layers: those of this process."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Error("optfuse: LBFGS calls a closure in step(), which a Pipeline has none of")
    if kfac_of(optimizer) is not None:
        raise Error(
            "optfuse: kfac() looks at whole backward passes, and a Pipeline runs them by layers; "
            "call KFAC.remove() first"
        )
    if is_fused(optimizer):
        link = link_of(optimizer)
        _refuse_final(link)
        if link.mode == BACKWARD and plan.strategy not in SYNCHRONOUS:
            raise Error(
                f"optfuse: the layers of a Pipeline by {plan.strategy!r} are updated at different "
                "times, and backward mode has one step() for all; use "
                'optfuse.fuse(optimizer, mode="forward"), or a strategy without delays'
            )
        if link.max_grad_norm is not None and (
            plan.processes > 1 or plan.strategy not in SYNCHRONOUS
        ):
            raise Error(
                "optfuse: max_grad_norm clips by the norm of this process's layers here, and stock "
                "by that of all: fuse the optimizer without it"
            )
        if link.delayed is not None:
            raise Error(
                "optfuse: a Pipeline delays updates by its plan; fuse the optimizer without a delay"
            )
    known = set(map(id, parameters_of(optimizer)))
    for n in layers:
        for of, parameter in module[n].named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise Error(
                    f"optfuse: parameter {of!r} of layer {n} is not in this {name}; give it "
                    "module.parameters()"
                )


def check_shared(
    plan: PipelinePlan, module: nn.Sequential, mode: str, group: dist.ProcessGroup | None
) -> None:
    """Refuses, on all processes, what a shared weight can't be in; asks them whether they share the
    same ones, with the same numbers."""
    ties = ties_of(module) if plan.strategy in SYNCHRONOUS else []
    apart = [tie for tie in ties if len({plan.places[n].forward for n in tie.layers}) > 1]
    pairs = [frozenset(plan.places[n].forward for n in tie.layers) for tie in apart]
    if mode == "each" and len(set(pairs)) < len(pairs):
        raise Error(
            'optfuse: shared="each" exchanges the gradients of one weight between two processes, '
            f'and two of them share {max(map(pairs.count, pairs))}; use shared="sums"'
        )
    if apart and plan.strategy == "modulo" and any(not one.parameters for one in plan.layers):
        raise Error(
            "optfuse: by 'modulo' layers without parameters and a weight that two processes share "
            "would wait for each other; use 'fast_forward', or copy the weight"
        )
    if group is None:
        return
    told: list[Any] = [None] * plan.processes
    dist.all_gather_object(told, [(tie.layers, tie.names, _sum(tie)) for tie in ties], group)
    for process, theirs in enumerate(told):
        if [one[:2] for one in theirs] != [one[:2] for one in told[0]]:
            raise Error(
                f"optfuse: the modules of processes 0 and {process} share other weights; make the "
                "same module on all, and let layers share them again after moving it"
            )
        for one, first in zip(theirs, told[0], strict=True):
            if None not in (one[2], first[2]) and one[2] != first[2]:
                raise Error(
                    f"optfuse: the weight that layers {one[0]} share has other numbers on process "
                    f"{process} than on process 0; make the module from one seed on all, or load "
                    "one checkpoint"
                )


def _sum(tie: Tie) -> int | None:
    """The sum of its bits, as whole numbers; None where it has no memory."""
    parameter = tie.parameter.detach()
    if parameter.is_meta:
        return None
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return int(parameter.contiguous().view(-1).view(kind).sum(dtype=torch.int64))


def check_divided(flow: Flow, module: nn.Sequential) -> None:
    """Layers whose backward tasks are computed without autograd."""
    hooks = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    for n, layer in enumerate(module):
        if not flow.is_divided(n):
            continue
        if type(layer) not in (nn.Linear, nn.Conv2d):
            raise Error(
                f"optfuse: layer {n} ({type(layer).__name__}) is divided by this plan, which is "
                "of a Linear or Conv2d there; make a plan of this module"
            )
        if any(getattr(layer, f"_{kind}") for kind in hooks):
            raise Error(
                f"optfuse: layer {n} ({type(layer).__name__}) has hooks, and this plan divides it "
                "over processes, where they would not be seen in backward; remove them, or put "
                "the layer into an entry of its own: nn.Sequential(layer)"
            )


def check_run(flow: Flow, told: list[dict[str, Any]]) -> list[list[Spec]]:
    """The tensors that go from layer to layer, for each batch. told: each process's report of its
    arguments of run(), so that all raise the same, or none. "state": values that must be the same
    everywhere; "inputs" on a process of the first layer: what infer() finds for each batch, or why
    it finds nothing."""
    _check_states([one["state"] for one in told])
    return _check_batches(flow, told)


def _check_states(states: list[dict[str, Any]]) -> None:
    for process, state in enumerate(states):
        for name, value in state.items():
            if value != states[0][name]:
                raise Error(
                    f"optfuse: processes 0 and {process} of a Pipeline differ in {name}; make it "
                    "with the same arguments on all, and load the checkpoints of one moment"
                )


def _check_batches(flow: Flow, told: list[dict[str, Any]]) -> list[list[Spec]]:
    first, last = _processes(flow, 0), _processes(flow, flow.n - 1)
    for what, at, where in (("inputs", first, "first"), ("targets", last, "last")):
        for process in at:
            if told[process][what] is None:
                raise Error(
                    f"optfuse: run() got {what}=None on process {process}, which has the {where} "
                    f"layer; pass the {what} there"
                )
    shapes: list[Any] = told[first[0]]["inputs"]
    for found in shapes:
        if isinstance(found, str):
            raise Error(found)
    for one in told:
        for what, given in (("inputs", one["inputs"]), ("targets", one["targets"])):
            count = len(given) if isinstance(given, list) else given
            if count not in (None, len(shapes)):
                raise Error(
                    f"optfuse: run() got {len(shapes)} inputs on process {first[0]}, and {count} "
                    f"{what} on process {one['process']}; give as many of each"
                )
    for process in first:
        if told[process]["inputs"] != shapes:
            raise Error(
                f"optfuse: run() got inputs of other shapes on process {process} than on process "
                f"{first[0]}; both have the first layer, so give them the same batches"
            )
    if not shapes:
        raise Error("optfuse: run() got 0 batches; give at least one")
    return shapes


def _processes(flow: Flow, layer: int) -> list[int]:
    place = flow.plan.places[layer]
    return list(range(place.forward, place.forward + place.replicas))
