# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode under DistributedDataParallel; optfuse_layers.reorder has what forward mode does.

DDP copies gradients into buckets and reduces a bucket between processes as soon as it is
full. A communication hook of ours starts that reduction, by the user's own hook if there is
one, and notes its future. The updates run where the backward pass would wait for the
reductions: after the last gradient and before DDP's own end of the pass, bucket by bucket."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._arguments.modes import CommHook, DDPModel
from optfuse._backward import consumed_gradients
from optfuse._library.bindings import Error
from optfuse._link import Link
from optfuse._patches.raw_memory import launch_gradients
from optfuse._patches.replacing import replace


@dataclass(frozen=True)
class _Bucket:
    buffer: Tensor  # of the gradients, one after the other
    reduction: Any  # a future
    ours: list[tuple[Link, list[int]]]  # optimizers that update with it, and their slots
    others: list[Tensor]  # parameters that nobody updates with it
    offsets: list[int]  # of the others' gradients, in elements


class Reduction:
    """The communication hook of one model, for all optimizers that were fused with it."""

    taken_by = "backward mode"  # as errors say
    way_out = '; use optfuse.fuse(optimizer, mode="forward"), which needs no ddp='

    def __init__(self, model: DistributedDataParallel | None, comm_hook: CommHook | None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self.comm_hook = comm_hook
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._params = set(map(id, _reduced(model))) if model is not None else set()
        self._task = -1  # the pass whose buckets wait
        self._waiting: list[_Bucket] = []

    def __reduce__(self) -> Any:
        """The model lists its hooks, and is copied and saved without the reducer that calls
        them."""
        return type(self), (None, None)

    def model(self) -> DistributedDataParallel:
        model = self._model and self._model()
        if model is None:
            raise Error("optfuse: the DistributedDataParallel model no longer exists")
        return model

    def takes(self, param: Tensor) -> bool:
        return id(param) in self._params

    def add(self, link: Link) -> None:
        self._links.add(link)

    def start(self, bucket: Any) -> Any:
        """Starts the reduction of a bucket that is full; its future."""
        model = self.model()
        task = torch._C._current_graph_task_id()
        if task == -1:  # join() lets a process without batches take part, with zeros
            return self._reduce(model, bucket)
        params = bucket.parameters()
        self._check_bucket(params)
        reduction = self._reduce(model, bucket)
        if task != self._task:
            self._waiting.clear()  # of a pass that failed
            self._task = task
            Variable._execution_engine.queue_callback(self.finish)  # if no update of ours does
        self._waiting.append(self._share_out(bucket.buffer(), params, reduction))
        return reduction

    def _share_out(self, buffer: Tensor, params: list[Tensor], reduction: Any) -> _Bucket:
        offsets = list(itertools.accumulate(map(Tensor.numel, params), initial=0))
        views = self.model().gradient_as_bucket_view
        left = {} if views else dict(zip(range(len(params)), offsets, strict=False))
        ours = []
        for link in self._links:
            slots = {i: s for i, p in enumerate(params) if (s := link.slot_of(p)) is not None}
            numbers, at = list(slots.values()), [offsets[i] for i in slots]
            if slots and (views or torch.ops.optfuse.take_parts(link.plan, numbers, buffer, at)):
                ours.append((link, numbers))
                left = {i: at for i, at in left.items() if i not in slots}
        return _Bucket(buffer, reduction, ours, [params[i] for i in left], list(left.values()))

    def _reduce(self, model: DistributedDataParallel, bucket: Any) -> Any:
        if self.comm_hook is not None:
            state, hook = self.comm_hook
            return hook(state, bucket)
        return self._mean(model, bucket).then(_value)

    def _mean(self, model: DistributedDataParallel, bucket: Any) -> Any:
        """The mean of a bucket, as DDP makes it without a hook."""
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise Error(
                "optfuse: join(divide_by_initial_world_size=False) divides gradients by a number "
                f"that only DDP's own reduction knows, and {self.taken_by} takes its place"
                + self.way_out
            )
        # As DDP rounds it.
        world = model.process_group.size()
        if getattr(model, "batched_grad_copy", False):
            bucket.buffer().div_(world)
        else:
            bucket.buffer().mul_(1.0 / world)
        return model.reducer._run_allreduce_hook(bucket)

    def _check_bucket(self, params: list[Tensor]) -> None:
        """Before anything is communicated."""
        for param in params:
            if param.grad is None:
                raise Error(
                    f"optfuse: a parameter of shape {tuple(param.shape)} got no gradient in this "
                    f"backward pass on this process, and {self.taken_by} can't know whether it "
                    f"did on another one{self.way_out}"
                )

    @staticmethod
    def why_not_hook(hook: Callable[..., Any]) -> str | None:
        """Why this communication hook can't be the user's."""
        return None

    @staticmethod
    def why_not_model(model: DistributedDataParallel) -> str | None:
        """Likewise, beyond what holds for every model."""
        return None

    def finish(self) -> None:
        """Waits for the reductions of this pass, and has each bucket's updates made while the
        next ones are on their way."""
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            try:
                reduced = bucket.reduction.wait()
            except Exception:
                return  # DDP waits for it, too, and raises the error as without us
            if reduced.data_ptr() != bucket.buffer.data_ptr():
                bucket.buffer.copy_(reduced.view_as(bucket.buffer))
            # As DDP does alone.
            torch.ops.optfuse.give_parts(bucket.others, bucket.buffer, bucket.offsets)
            for link, slots in bucket.ours:
                torch.ops.optfuse.reduced(link.plan, slots)


def _value(reduced: Any) -> Tensor:
    """DDP takes a value only that Python has made."""
    return reduced.value()[0]  # type: ignore[no-any-return]


def _start(state, bucket):  # type: ignore[no-untyped-def] # DDP looks at the annotations
    return state.start(bucket)


def _reduced(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters whose gradients the model reduces: those that its module had when it was
    wrapped, also where the module has others by now."""
    return [p for p in model._module_parameters if p.requires_grad]


def reduces(model: DistributedDataParallel, optimizer: Optimizer) -> bool:
    """Whether the model reduces the gradient of a parameter that the optimizer has."""
    managed = set(map(id, _reduced(model)))
    return any(id(param) in managed for param in parameters_of(optimizer))


_reductions: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = (
    weakref.WeakKeyDictionary()
)


def _why_not(model: DistributedDataParallel) -> str | None:
    if model.find_unused_parameters:
        return (
            "it was made with find_unused_parameters=True, and which parameters no process has "
            "used is known after the updates only"
        )
    if model.mixed_precision is not None:
        return "its mixed_precision needs the communication hook, of which a model has one"
    if model._use_python_reducer:
        return 'torch._dynamo.config.optimize_ddp is "python_reducer", which has no buckets'
    if model._delay_all_reduce_params:
        return (
            "it was made with delay_all_reduce_named_params, and these gradients are reduced "
            "outside of its buckets"
        )
    return None


def check_model(
    ddp: DDPModel, optimizer: Optimizer, accumulate: int, kind: type[Reduction]
) -> None:
    """Raises optfuse.Error, with nothing changed, if what was asked for can't work with it."""
    model, comm_hook = ddp.model, ddp.comm_hook
    reason = _why_not(model) or kind.why_not_model(model)
    if accumulate != 1 and model.static_graph and kind is Reduction:
        reason = (
            "with static_graph=True the first pass reduces after its end, and accumulate= would "
            "count it twice; mark passes by optfuse.accumulate(), or use model.no_sync()"
        )
    if reason is not None:
        raise Error(
            f"optfuse: {kind.taken_by} can't update behind this DDP model: {reason}{kind.way_out}"
        )
    if not reduces(model, optimizer):
        raise Error(
            "optfuse: fuse() got ddp=, but that model reduces none of the optimizer's parameters; "
            "pass the model whose parameters they are"
        )
    known = _reductions.get(model)
    if known is None and model._comm_hooks:
        raise Error(_REGISTERED)
    if known is not None and type(known) is not kind:
        raise Error(
            f"optfuse: another optimizer was fused with this DDP model for {known.taken_by}, and "
            "PyTorch can't replace the model's communication hook; fuse all optimizers of a model "
            "in the same way, or make the model anew"
        )
    _check_hook(kind, comm_hook)
    if known is not None and comm_hook is not None:
        raise Error(
            "optfuse: fuse() got a comm_hook, but another optimizer was fused with this model "
            "before; pass comm_hook to the first fuse() of the model"
        )


_REGISTERED = (
    "optfuse: this DDP model has a communication hook already, and PyTorch can't replace one; make "
    "the model anew without it, and pass it in optfuse.DDPModel(model, comm_hook=(state, hook))"
)


def _check_hook(kind: type[Reduction], comm_hook: CommHook | None) -> None:
    reason = kind.why_not_hook(comm_hook[1]) if comm_hook is not None else None
    if reason is not None:
        raise Error(
            f"optfuse: {kind.taken_by} can't take this communication hook: {reason}{kind.way_out}"
        )


def reduction_of(ddp: DDPModel, kind: type[Reduction]) -> Reduction:
    """The reduction of this model; at the first call it becomes the model's communication hook, for
    as long as the model lives: PyTorch has no way to take one away."""
    model = ddp.model
    if model in _reductions:
        return _reductions[model]
    reduction = kind(model, ddp.comm_hook)
    try:
        model.register_comm_hook(reduction, _start)
    except RuntimeError as error:
        model._comm_hooks.pop()
        raise Error(_REGISTERED) from error
    model.reducer._set_optimizer_in_backward()  # DDP leaves .grad alone at the end of a pass
    _reductions[model] = reduction
    return reduction


# Where gradients are views of buckets, DDP copies those that are there when it makes a bucket.


def _init_helper(
    stock: Callable[..., None], self: DistributedDataParallel, parameters: Any, *rest: Any
) -> None:
    """Makes the buckets."""
    with consumed_gradients.aside(parameters):
        stock(self, parameters, *rest)


def _pre_forward(
    stock: Callable[..., Any], self: DistributedDataParallel, *inputs: Any, **kwargs: Any
) -> Any:
    """Rearranges the buckets, once, after the first backward pass. They are for the parameters
    that needed gradients when the model was wrapped: some may be frozen by now."""
    if self.find_unused_parameters or self.static_graph:
        # It reduces the gradients of those that this forward pass will not use, too.
        launch_gradients(self._module_parameters)
    keeps_them = self.find_unused_parameters and not self.static_graph
    if self._has_rebuilt_buckets or keeps_them or self not in _reductions:
        return stock(self, *inputs, **kwargs)
    with consumed_gradients.aside(self._module_parameters):
        return stock(self, *inputs, **kwargs)


def known_reduction(model: DistributedDataParallel) -> Reduction | None:
    return _reductions.get(model)


def install() -> None:
    """Once per process."""
    replace(
        DistributedDataParallel,
        "_ddp_init_helper",
        _method(_init_helper, DistributedDataParallel._ddp_init_helper),
    )
    # Tracing these functions would cost dynamo microseconds.
    before = torch._dynamo.disable(_method(_pre_forward, DistributedDataParallel._pre_forward))
    replace(DistributedDataParallel, "_pre_forward", before)


def _method(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        return ours(stock, self, *args, **kwargs)

    return call
