# SPDX-License-Identifier: BSD-3-Clause
"""The two modes of fuse(), each with the options that make sense in it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from optfuse._arguments.check import (
    COMM_HOOK,
    DATA_PARALLEL,
    DELAY_STEPS,
    FLAG,
    Kind,
    Unfit,
    argument,
    need,
    number,
    one_of,
    optional,
    whole,
)
from optfuse._library.bindings import Error

CommHook = tuple[Any, Callable[..., Any]]


class DDPModel:
    """A DistributedDataParallel model, and the communication hook that reduces its gradients."""

    def __init__(self, model: DistributedDataParallel, comm_hook: CommHook | None = None) -> None:
        """model: several optimizers may name the same one.
        comm_hook: (state, hook); hook(state, bucket) gives a future, as
            DistributedDataParallel.register_comm_hook() says, which refuses another one
            afterwards. None: the mean, as DDP makes it.

        Raises optfuse.Error for anything else."""
        self.model: DistributedDataParallel = argument("DDPModel", "model", model, DATA_PARALLEL)
        self.comm_hook: CommHook | None
        self.comm_hook = argument("DDPModel", "comm_hook", comm_hook, optional(COMM_HOOK))


class Delay:
    """The number of steps by which updates arrive late, and the weights that dX is computed
    with."""

    def __init__(self, steps: Mapping[Tensor | nn.Module, int], weights: str = "stash") -> None:
        """steps: D by parameter, or by module for all of its parameters; 0 where nothing is said.
            The forward pass of batch b then sees the updates of all batches before b - D, as in a
            pipeline. It changes what is computed (docs/layerpipe.md). Until drain() a parameter is
            an older version of itself; D newer ones, of its size each, are kept beside it, and in
            state_dict().
        weights: which version of their weights nn.Linear and nn.Conv2d compute the gradients of
            their inputs with. "stash": the one that the forward pass saw. "latest": the newest.
            "average": what the newest and a moving average of its changes say of the one that the
            forward pass saw.

        Raises optfuse.Error for anything else."""
        self.steps: dict[Tensor | nn.Module, int] = argument("Delay", "steps", steps, DELAY_STEPS)
        self.weights: str = argument("Delay", "weights", weights, _WEIGHTS)


class Forward:
    """step() leaves every update pending until the first use of its parameter, gradient or state,
    usually in the next forward pass; any training loop works."""

    def __init__(
        self,
        *,
        max_grad_norm: float | None = None,
        fold: bool = True,
        ddp: DistributedDataParallel | DDPModel | None = None,
        delay: Mapping[Tensor | nn.Module, int] | Delay | None = None,
    ) -> None:
        """max_grad_norm: step() first clips the gradients of this optimizer to this 2-norm, as
            clip_grad_norm_() does, behind hooks before step(); for loops that can't be edited.
        fold: whether multiplying large gradients is left to the update, in clip_grad_norm_() of
            ours and of torch.nn.utils, max_grad_norm, and, on the CPU, when torch.amp.GradScaler
            unscales. It changes no result.
        ddp: the DistributedDataParallel model whose reduced gradients this process awaits when a
            gradient or its parameter is first used, usually in the next forward pass, so that
            backward() and step() return while gradients are on the network. Parameters on the CPU
            only. A communication hook must start all that it communicates before it returns.
            None: the end of backward() awaits them, as DistributedDataParallel does.
        delay: steps by which updates arrive late; a mapping is Delay(mapping).

        Raises optfuse.Error for anything else."""
        self.max_grad_norm: float | None
        self.max_grad_norm = argument("Forward", "max_grad_norm", max_grad_norm, optional(_NORM))
        self.fold: bool = argument("Forward", "fold", fold, FLAG)
        self.ddp: DDPModel | None = argument("Forward", "ddp", ddp, optional(_DDP))
        self.delay: Delay | None = argument("Forward", "delay", delay, optional(_DELAY))


class Backward:
    """Each update runs inside backward() as soon as its gradient is complete, and frees the
    gradient. What needs gradients after backward() (clipping, loss scaling) raises, and passes
    that only add to the gradients must be marked."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        side_stream: bool = False,
        ddp: DistributedDataParallel | DDPModel | None = None,
        final: bool = False,
    ) -> None:
        """accumulate: how many backward passes make one step; only the last of them updates. A
            pass is one backward() that reaches a parameter of this optimizer; step() and
            zero_grad() start over. The other way to say so is optfuse.accumulate().
        side_stream: run the updates of parameters on GPUs on a CUDA stream of their own beside
            the rest of the backward pass, which waits for them at its end, and before for all but
            the last two launches, so that three buckets of gradients (bucket_bytes) are alive.
        ddp: the DistributedDataParallel model that reduces the gradients. Each update runs as soon
            as the reduction of its bucket is done, while later ones still are on their way. DDP's
            buckets keep their memory, and the gradients need none beside them. Parameters that the
            model does not reduce are updated as without it.
        final: each update is final as soon as its gradient is complete, as if a hook of every
            parameter called step() for that one and set .grad to None: the fused back pass of those
            who fine-tune. No step() or zero_grad() is needed, and nothing is left to step(), so
            what is changed between backward() and step() comes too late for this pass
            (docs/fused-back-pass.md).

        Raises optfuse.Error for anything else."""
        self.accumulate: int = argument("Backward", "accumulate", accumulate, _PASSES)
        self.side_stream: bool = argument("Backward", "side_stream", side_stream, FLAG)
        self.ddp: DDPModel | None = argument("Backward", "ddp", ddp, optional(_DDP))
        self.final: bool = argument("Backward", "final", final, FLAG)
        if self.final and (self.side_stream or self.ddp is not None):
            other = "side_stream" if self.side_stream else "ddp"
            raise Error(
                f"optfuse: Backward(final=True) and {other} do not go together: a final update "
                "runs when autograd completes its gradient, on the stream of that; leave one out"
            )

    def behind(self, model: DistributedDataParallel) -> Backward:
        """The same, behind this model unless it names one."""
        ddp = self.ddp or DDPModel(model)
        return Backward(
            accumulate=self.accumulate, side_stream=self.side_stream, ddp=ddp, final=self.final
        )


def mode_of(mode: str | Forward | Backward) -> Forward | Backward:
    """An object for the short form. Raises Unfit for anything else."""
    if isinstance(mode, Forward | Backward):
        return mode
    if isinstance(mode, type) and issubclass(mode, Forward | Backward):
        raise Unfit(f"make an instance: optfuse.{mode.__name__}()")
    if isinstance(mode, str) and mode == "forward":
        return Forward()
    need(isinstance(mode, str) and mode == "backward")
    return Backward()


def _ddp(value: Any) -> DDPModel:
    return value if isinstance(value, DDPModel) else DDPModel(DATA_PARALLEL.take(value))


def _delay(value: Any) -> Delay:
    return value if isinstance(value, Delay) else Delay(DELAY_STEPS.take(value))


MODE = Kind('"forward", "backward", optfuse.Forward(...) or optfuse.Backward(...)', mode_of)
_DDP = Kind(f"{DATA_PARALLEL.expected}, or optfuse.DDPModel(...)", _ddp)
_DELAY = Kind(f"{DELAY_STEPS.expected}, or optfuse.Delay(...)", _delay)
_NORM = number("a number of at least 0", least=0.0)
_PASSES = whole("the number of passes a step, a whole number of at least 1", least=1)
_WEIGHTS = one_of("stash", "latest", "average")
