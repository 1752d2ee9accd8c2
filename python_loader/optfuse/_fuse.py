# SPDX-License-Identifier: BSD-3-Clause
"""fuse(), unfuse() and flush()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optfuse import _process
from optfuse._arguments.check import (
    COMM_HOOK,
    DATA_PARALLEL,
    DELAY,
    EAGER,
    FLAG,
    FUSED,
    OPTIMIZER,
    checked,
    number,
    one_of,
    optional,
    whole,
)
from optfuse._arguments.wrappers import returns_the_wrapper
from optfuse._classes import (
    become_fused,
    become_stock,
    give_up_unasked,
    try_to_trace,
    try_with_stock,
)
from optfuse._clipping.preconditioners import kfac_of
from optfuse._ddp.await_reduction import AwaitedLater
from optfuse._ddp.reduction import Reduction, check_model, reduction_of
from optfuse._layers.delay.delayed_updates import delays_of
from optfuse._library.bindings import BACKWARD, FORWARD, Error
from optfuse._library.log import warn
from optfuse._link import link_of
from optfuse._options import Options, is_disabled, is_fused
from optfuse._refuse import (
    check_class,
    check_eager,
    check_optimizer,
    check_params,
    may_be_traced,
)
from optfuse._rules import RULES
from optfuse._scheduler import check_step
from optfuse._selfcheck import gpu_bits_differ
from optfuse._trials.rule_choice import rule_of

_MODES = {"forward": FORWARD, "backward": BACKWARD}
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@returns_the_wrapper
@checked(
    optimizer=OPTIMIZER,
    mode=one_of(*_MODES),
    eager=EAGER,
    strict=FLAG,
    side_stream=FLAG,
    accumulate=whole("the number of passes a step, a whole number of at least 1", least=1),
    max_grad_norm=optional(number("a number of at least 0", least=0.0)),
    fold=FLAG,
    bucket_bytes=whole("a whole number of bytes, or 0 for the default", least=0),
    ddp=optional(DATA_PARALLEL),
    comm_hook=optional(COMM_HOOK),
    await_reduction=one_of("backward", "first_use"),
    delay=optional(DELAY),
    weights=one_of("stash", "latest", "average"),
)
def fuse(
    optimizer: OptimizerT,
    mode: str = "forward",
    eager: Iterable[Tensor] = (),
    strict: bool = False,
    side_stream: bool = False,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    fold: bool = True,
    bucket_bytes: int = 0,
    ddp: DistributedDataParallel | None = None,
    comm_hook: tuple[Any, Callable[..., Any]] | None = None,
    await_reduction: str = "backward",
    delay: Mapping[Tensor | nn.Module, int] | None = None,
    weights: str = "stash",
) -> OptimizerT:
    """Makes the optimizer's updates run inside the training passes.

    optimizer: one of torch.optim but LBFGS and SparseAdam, or of a class named to
        register(), over dense parameters on the CPU or on NVIDIA GPUs, of dtype
        float32, float64, bfloat16 or float16. Where there are no kernels for it
        the update runs torch's operators as the class's step() does, or that
        step() itself, on one parameter. It may be in a wrapper of Accelerate or Lightning.
    mode: "forward": step() leaves every update pending until the first use of
        its parameter, gradient or state, usually in the next forward pass; any
        training loop works. "backward": each update runs inside backward() as
        soon as its gradient is complete, and frees the gradient; what needs
        gradients after backward() (clipping, loss scaling) raises, and
        passes that only add to the gradients must be marked: accumulate.
    eager: parameters of the optimizer whose raw address is known outside of
        PyTorch across steps (ctypes, a NumPy array made from an address);
        their updates are never left pending.
    strict: refuse an optimizer whose flags make PyTorch use another
        implementation than its fused one, the reference for equal bits.
    side_stream: in backward mode, run the updates of parameters on GPUs on a
        CUDA stream of their own beside the rest of the backward pass, which
        waits for them at its end.
    accumulate: how many backward passes make one step; matters in backward
        mode, where only the last of them updates. A pass is one backward()
        that reaches a parameter of this optimizer; step() and zero_grad()
        start over. The other way to say so is optfuse.accumulate().
    max_grad_norm: step() first clips the gradients of this optimizer to this
        2-norm, as clip_grad_norm_() does; for loops that can't be edited.
        Forward mode only.
    fold: in forward mode, whether multiplying gradients is left to the update,
        in clip_grad_norm_() and max_grad_norm, and, on the CPU, when
        torch.amp.GradScaler unscales. It changes no result.
    bucket_bytes: small updates run together with their neighbours, so many bytes of
        parameters at a time. In forward mode neighbours run at the first use of one
        of them; in backward mode updates wait for each other, and the gradients
        live as long, on the CPU until the next larger one is complete, at most until
        backward() returns. 0: on the CPU 256 KiB in forward and 512 KiB in backward
        mode, which concern parameters of less than 16,384 elements, on GPUs 4 MiB.
        1: each by itself. In backward mode on the CPU larger parameters wait, too,
        where a number is given: at the price of memory.
    ddp: in backward mode, the DistributedDataParallel model that reduces the gradients. Each
        update runs as soon as the reduction of its bucket is done, while later ones still are
        on their way. DDP's buckets keep their memory, and the gradients need none beside them.
        Parameters that the model does not reduce are updated as without it. Several
        optimizers may name the same model. Forward mode needs none but for await_reduction.
    comm_hook: with ddp, the communication hook for this model, as (state, hook); hook(state,
        bucket) gives a future, as DistributedDataParallel.register_comm_hook() says. That
        function may be called after fuse(), too. None: the mean, as DDP makes it.
    await_reduction: in forward mode, when this process waits for the gradients that the model
        given as ddp reduces. "backward": at the end of backward(), as DistributedDataParallel
        does. "first_use": when a gradient or its parameter is first used, usually in the next
        forward pass, so that backward() and step() return while gradients are on the network.
        Parameters on the CPU only. A communication hook must start all that it communicates
        before it returns.
    delay: in forward mode, by how many steps the updates of a parameter arrive late, or those of
        all parameters of a module: D by parameter or module, 0 where nothing is said. The forward
        pass of batch b then sees the updates of all batches before b - D, as in a pipeline. It
        changes what is computed (docs/layerpipe.md). Until drain() a parameter is an older
        version of itself; D newer ones, of its size each, are kept beside it, and in
        state_dict().
    weights: with delay, which version of their weights nn.Linear and nn.Conv2d compute the
        gradients of their inputs with. "stash": the one that the forward pass saw. "latest": the
        newest. "average": what the newest and a moving average of its changes say of the one
        that the forward pass saw.

    Returns the same object, still an instance of its class. Raises
    optfuse.Error, with nothing changed, if it can't be fused. With
    OPTFUSE_DISABLE=1 in the environment it returns the optimizer unchanged,
    and raises if it was to clip.
    """
    if is_disabled():
        _refuse_to_lose(max_grad_norm)
        _refuse_to_be_early(delay)
        return optimizer
    give_up_unasked(optimizer)
    if is_fused(optimizer):
        raise Error("optfuse: this optimizer is already fused; call optfuse.unfuse() on it first")
    if side_stream and mode != "backward":
        raise Error('optfuse: side_stream=True goes with mode="backward"')
    if max_grad_norm is not None and mode == "backward":
        raise Error(
            "optfuse: max_grad_norm needs all gradients at once, and backward mode updates "
            'before they are there; use optfuse.fuse(optimizer, mode="forward")'
        )
    late = await_reduction == "first_use"
    if late and (ddp is None or mode != "forward"):
        raise Error(
            'optfuse: await_reduction="first_use" goes with mode="forward" and ddp=model, the '
            "DistributedDataParallel model whose reductions are to be awaited"
        )
    if comm_hook is not None and (ddp is None or (mode != "backward" and not late)):
        raise Error(
            'optfuse: comm_hook goes with ddp=model and mode="backward" or '
            'await_reduction="first_use"; otherwise call model.register_comm_hook()'
        )
    if delay is not None and mode == "backward":
        raise Error(
            "optfuse: delay= keeps updates for later, and backward mode updates inside "
            'backward(); use optfuse.fuse(optimizer, mode="forward", delay=...)'
        )
    if weights != "stash" and delay is None:
        raise Error(f'optfuse: weights="{weights}" goes with delay=')
    check_class(optimizer)
    traced = None
    if may_be_traced(type(optimizer)):
        check_params(optimizer)  # else the trial could fail at what one of them is
        _process.start()
        traced = try_to_trace(optimizer, in_backward=mode == "backward")
    check_optimizer(optimizer, strict, traced)
    check_step(optimizer)
    delays = delays_of(delay or {}, optimizer)
    if mode == "backward" and kfac_of(optimizer) is not None:
        raise Error(
            "optfuse: kfac() preconditions the gradients of this optimizer before step(), and in "
            'backward mode they are used up by then; use mode="forward"'
        )
    kind = AwaitedLater if late else Reduction if mode == "backward" else None
    if ddp is not None and kind is not None:
        check_model(ddp, optimizer, comm_hook, accumulate, kind)
    chosen = check_eager(eager, optimizer)
    _process.start()
    if try_with_stock(type(optimizer), optimizer.param_groups):
        check_optimizer(optimizer, strict)  # by the rule that it has now
    differ: list[str] = []
    rule = traced or rule_of(optimizer)
    if rule is RULES.get(type(optimizer)) and not rule.external:
        differ = gpu_bits_differ(optimizer, lambda small: become_fused(small, Options()))
    if strict and differ:
        raise Error(
            f"optfuse: strict=True, but updates of {', '.join(differ)} have other bits than "
            "fused=True there (docs/numerics.md names the releases and chips where they are "
            "equal). Pass strict=False, or keep the optimizer as it is"
        )
    if differ:
        warn(
            f"updates of {', '.join(differ)} round differently from fused=True there, so results "
            "will be close to stock's and not equal; strict=True refuses that",
            UserWarning,
            stacklevel=2,
        )
    reduction = reduction_of(ddp, comm_hook, kind) if ddp is not None and kind else None
    options = Options(
        _MODES[mode],
        tuple(chosen),
        side_stream,
        accumulate,
        max_grad_norm,
        fold,
        bucket_bytes,
        reduction,
        delays,
        weights,
    )
    become_fused(optimizer, options, traced)
    link_of(optimizer).gpu_bits_differ = tuple(differ)
    return optimizer


def _refuse_to_lose(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        raise Error(
            "optfuse: OPTFUSE_DISABLE leaves this optimizer as it is, so nothing would clip to "
            f"max_grad_norm={max_grad_norm}; call torch.nn.utils.clip_grad_norm_() before step(), "
            "or unset OPTFUSE_DISABLE"
        )


def _refuse_to_be_early(delay: Mapping[Any, int] | None) -> None:
    if delay and any(delay.values()):
        raise Error(
            "optfuse: OPTFUSE_DISABLE leaves this optimizer as it is, so nothing would delay its "
            "updates; leave delay= out, or unset OPTFUSE_DISABLE"
        )


@returns_the_wrapper
@checked(optimizer=FUSED)
def unfuse(optimizer: OptimizerT) -> OptimizerT:
    """Launches what is pending, also what fuse(delay=...) holds back, and makes the optimizer
    the stock one again, with its state. A gradient that backward fusion has used becomes None, once
    step() was called. Raises optfuse.Error if it is not fused."""
    if is_fused(optimizer):  # else OPTFUSE_DISABLE=1
        become_stock(optimizer)
    return optimizer


@checked(optimizer=optional(FUSED))
def flush(optimizer: Optimizer | None = None) -> None:
    """Launches every pending update of the optimizer, or of all optimizers.
    Raises optfuse.Error if it is not fused."""
    if optimizer is None:
        _process.flush_all()
    elif is_fused(optimizer):
        link_of(optimizer).flush()
