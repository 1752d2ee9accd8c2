# SPDX-License-Identifier: BSD-3-Clause
"""Forward mode under DistributedDataParallel: Forward(ddp=model).

DDP waits for the reductions of all buckets at the end of a backward pass. Our communication
hook tells it that a reduction is done as soon as the reduction has begun, and tells the library
which gradients are on their way (shim/absent/awaited.h). Who looks at such a gradient, or uses a
parameter with an update that reads it, waits for its bucket."""

from __future__ import annotations

import atexit
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from optfuse._arguments.modes import CommHook
from optfuse._ddp import Reduction, known_reduction
from optfuse._library.bindings import ALL_MODELS, check, guard, lib
from optfuse._patches import compiled
from optfuse._patches.listed import AWAITED
from optfuse._patches.profiling import addresses_are_noted
from optfuse._patches.replacing import after, replace, warn_of_changes

_groups = itertools.count()
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
#: Their hooks start a second collective when the first one is done.
_CHAINED = ("powerSGD_hook", "quantization_hooks", "optimizer_overlap_hooks")


@dataclass(frozen=True)
class _Bucket:
    params: list[Tensor]
    buffer: Tensor  # of their gradients, one after the other
    reduction: Any  # a future: the reduced gradients are in the buffer
    is_late: bool  # DDP does not wait for it

    def offsets(self) -> list[int]:
        return list(itertools.accumulate(map(Tensor.numel, self.params[:-1]), initial=0))


class AwaitedLater(Reduction):
    """The communication hook of one model. A bucket with a parameter that no optimizer has which
    was fused with the model is waited for at the end of backward: nobody else would."""

    taken_by = "forward mode with ddp="
    way_out = "; call optfuse.fuse(optimizer) without ddp="

    def __init__(self, model: DistributedDataParallel | None, comm_hook: CommHook | None) -> None:
        install()
        super().__init__(model, comm_hook)
        self._group = next(_groups)
        self._passes: dict[int, list[_Bucket]] = {}  # by graph task: buckets of backward passes
        self._buffers: dict[int, Tensor] = {}  # by the bucket's index, as last seen

    def start(self, bucket: Any) -> Any:
        model = self.model()
        task = torch._C._current_graph_task_id()
        buffer = bucket.buffer()
        if task == -1 or buffer.is_sparse:  # join() lets a process without batches take part
            return self._reduce(model, bucket)
        params = bucket.parameters()
        self._check_bucket(params)
        is_late = self._may_be_late(model, bucket.index(), buffer, params)
        reduction = self._start_reduction(model, bucket, buffer)
        if task not in self._passes:
            self._passes[task] = []
            Variable._execution_engine.queue_callback(functools.partial(self._end, task))
        self._passes[task].append(_Bucket(params, buffer, reduction, is_late))
        if not is_late:
            return reduction.then(functools.partial(_done, buffer))
        begun: Future[Tensor] = Future()
        begun.set_result(buffer)
        return begun

    def _may_be_late(
        self, model: DistributedDataParallel, index: int, buffer: Tensor, params: list[Tensor]
    ) -> bool:
        """Who knows the memory of a bucket is known when DDP has used the bucket once."""
        is_known = not model.gradient_as_bucket_view or self._buffers.get(index) is buffer
        self._buffers[index] = buffer
        links = list(self._links)
        return is_known and all(
            any(link.slot_of(param) is not None for link in links) for param in params
        )

    def _start_reduction(self, model: DistributedDataParallel, bucket: Any, buffer: Tensor) -> Any:
        if self.comm_hook is None:
            return self._mean(model, bucket)
        return self._reduce(model, bucket).then(functools.partial(_put, buffer))

    def _end(self, task: int) -> None:
        """The end of a backward pass, before DDP's own or after it."""
        buckets = self._passes.pop(task, [])
        left = [(bucket, self._expect(bucket)) for bucket in buckets]
        for bucket, numbers in left:
            if numbers:
                self._wait(bucket, numbers)
        if addresses_are_noted() or compiled.running():
            check(lib.of_shim_await(self._group))

    def _expect(self, bucket: _Bucket) -> list[int]:
        """The numbers of the parameters whose gradients can't wait."""
        if not bucket.is_late:
            return list(range(len(bucket.params)))
        left: list[int] = torch.ops.optfuse.expect(
            bucket.params, bucket.buffer, bucket.offsets(), bucket.reduction, self._group
        )
        return left

    def _wait(self, bucket: _Bucket, numbers: list[int]) -> None:
        try:
            bucket.reduction.wait()
        except Exception:
            if bucket.is_late:
                raise
            return  # DDP waits for it, too, and raises the error as without us
        if self.model().gradient_as_bucket_view:
            return
        offsets = bucket.offsets()
        params, places = [bucket.params[i] for i in numbers], [offsets[i] for i in numbers]
        torch.ops.optfuse.give_parts(params, bucket.buffer, places)

    def wait_for_all(self) -> None:
        self._passes.clear()  # of passes that failed
        check(lib.of_shim_await(self._group))

    @staticmethod
    def why_not_hook(hook: Callable[..., Any]) -> str | None:
        for name in map(_module_of, _with_wrapped(hook)):
            if name.removeprefix(_HOOKS) in _CHAINED:
                return (
                    f"it is of {name}, and starts a collective when another one is done, by then "
                    "beside those of your script, in another order on each process"
                )
        return None

    @staticmethod
    def why_not_model(model: DistributedDataParallel) -> str | None:
        if any(not param.is_cpu for param in model.module.parameters()):
            return "it has parameters that are not on the CPU"
        return None


def _done(buffer: Tensor, reduced: Any) -> Tensor:
    reduced.value()  # raises if the reduction has failed
    return buffer


def _put(buffer: Tensor, reduced: Any) -> Tensor:
    """Into the bucket, where a hook's result is another tensor."""
    found = reduced.value()
    if found.data_ptr() != buffer.data_ptr():
        buffer.copy_(found.view_as(buffer))
    return buffer


def _module_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", ""))


def _with_wrapped(hook: Any) -> Iterator[Any]:
    """The function, and those that it calls as fp16_compress_wrapper() does."""
    yield hook
    for cell in getattr(hook, "__closure__", None) or ():
        if callable(cell.cell_contents):
            yield from _with_wrapped(cell.cell_contents)


def _end_of_forward(model: DistributedDataParallel, *_: Any, **__: Any) -> None:
    """In the backward pass that follows DDP writes into the buckets. Of parameters that this
    forward pass has used nothing is on its way any more."""
    reduction = known_reduction(model)
    if isinstance(reduction, AwaitedLater) and guard("reuse"):
        reduction.wait_for_all()


@functools.cache
def install() -> None:
    """Once per process."""
    warn_of_changes(AWAITED)
    # A forward hook would have dynamo compile three frames more; what it would trace here takes
    # microseconds.
    stock = DistributedDataParallel._post_forward
    awaiting = torch._dynamo.disable(after(_end_of_forward, stock))
    replace(DistributedDataParallel, "_post_forward", awaiting, AWAITED)
    # The other processes need what this one still has to send. Failures have been raised, or
    # concern nobody any more.
    atexit.register(lib.of_shim_await, ALL_MODELS)
