# SPDX-License-Identifier: BSD-3-Clause
"""fuse(), unfuse() and flush()."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from torch import Tensor
from torch.optim import Optimizer

from optfuse import _names, _process
from optfuse._arguments.check import (
    EAGER,
    FLAG,
    FUSED,
    OPTIMIZER,
    checked,
    one_of,
    optional,
    parameters_of,
    whole,
)
from optfuse._arguments.modes import MODE, Backward, Forward, mode_of
from optfuse._arguments.wrappers import returns_the_wrapper
from optfuse._class_code import patched
from optfuse._clipping.preconditioners import kfac_of
from optfuse._ddp import Reduction, check_model, reduction_of
from optfuse._fused import final
from optfuse._fused.classes import become_fused, become_stock, fuse_by, tried_rule
from optfuse._fused.recorded import is_asked, unfuse_recorded
from optfuse._fused.refuse import check_eager, check_group, check_own_hooks, check_params
from optfuse._fused.scheduler import check_step
from optfuse._gpu import is_gpu
from optfuse._library.bindings import BACKWARD, FINAL, FORWARD, Error
from optfuse._library.log import warn
from optfuse._link import link_of
from optfuse._options import (
    AUTO,
    OFF,
    Options,
    is_disabled,
    is_fused,
    is_recorded,
    owner_of,
    products_asked,
)
from optfuse._registered import is_registered
from optfuse._rules import (
    NATIVE,
    RECORDED,
    RECORDED_OBJECT,
    REGISTERED,
    RULES,
    RecordedRule,
    RegisteredRule,
    Rule,
)
from optfuse._trials.gpu_trial import gpu_bits_differ, refused, said_of

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@returns_the_wrapper
@checked(
    optimizer=OPTIMIZER,
    mode=MODE,
    eager=EAGER,
    strict=FLAG,
    bucket_bytes=whole("a whole number of bytes, or 0 for the default", least=0),
    products=optional(one_of(AUTO, OFF)),
    recorded=optional(FLAG),
)
def fuse(
    optimizer: OptimizerT,
    mode: str | Forward | Backward = "forward",
    eager: Iterable[Tensor] = (),
    strict: bool = False,
    *,
    bucket_bytes: int = 0,
    products: str | None = None,
    recorded: bool | None = None,
) -> OptimizerT:
    """Makes the optimizer's updates run inside the training passes.

    optimizer: of torch.optim or any other class, over dense parameters on the CPU or on NVIDIA
        GPUs, of dtype float32, float64, bfloat16 or float16. Where there are no kernels for it
        its own step() is recorded, in forward mode over any parameters. It may be in a wrapper
        of Accelerate or Lightning.
    mode: optfuse.Forward(...), or "forward" for its defaults: updates run at the first use of
        what they change, usually in the next forward pass; any training loop works.
        optfuse.Backward(...), or "backward": inside backward(), and gradients are freed.
    eager: parameters of the optimizer whose raw address is known outside of
        PyTorch across steps (ctypes, a NumPy array made from an address);
        their updates are never left pending.
    strict: refuse an optimizer whose flags make PyTorch use another
        implementation than its fused one, the reference for equal bits.
    bucket_bytes: small updates run together with their neighbours, so many bytes of
        parameters at a time. In forward mode on the CPU neighbours run at the first use
        of one of them; on GPUs step() runs all. In backward mode updates wait for each
        other, and the gradients live as long, until the next larger one is complete, at
        most until backward() returns. 0: on the CPU 256 KiB in forward and 512 KiB in
        backward mode, which concern parameters of less than 16,384 elements, on GPUs 16
        MiB in backward (docs/performance.md has other sizes). 1: each by itself. In backward
        mode on the CPU larger ones wait, too, where a number is given: it costs memory.
    products: "auto": the gradient of a large torch.nn.Linear with few rows, in forward mode also
        of a large torch.nn.Embedding, is not computed in backward(): .grad stands for it, and the
        update computes it part by part, in the cache. Whoever looks at .grad before gets its
        numbers. It is done where a trial on this machine finds the same bits and no loss of time,
        for embeddings always (docs/promises.md). "off": no gradient is a promise. None: what the
        environment says, OPTFUSE_PRODUCTS, or else "auto".
    recorded: an optimizer without kernels runs its own step(), whose operators are recorded: in
        forward mode they run together before step() returns, in backward mode those of a parameter
        when its gradient is there (docs/any-optimizer.md). False: that step() is called as it is.
        None: what the environment says, OPTFUSE_RECORDED=0, or else yes.

    Returns the same object, still an instance of its class. Raises
    optfuse.Error, with nothing changed, if it can't be fused. With
    OPTFUSE_DISABLE=1 in the environment it returns the optimizer unchanged,
    and raises if it was to clip.
    """
    mode = mode_of(mode)
    if is_disabled():
        _refuse_to_lose(mode)
        return optimizer
    give_up_unasked(optimizer)
    if is_fused(optimizer) or is_recorded(optimizer):
        raise Error("optfuse: this optimizer is already fused; call optfuse.unfuse() on it first")
    wanted = replace(_options(optimizer, mode, eager, bucket_bytes), recorded=is_asked(recorded))
    if not wanted.delays:
        wanted = replace(wanted, products=products or products_asked())
    check_own_hooks(optimizer)
    if "step" in patched(optimizer):
        return _fuse_recorded(optimizer, mode, wanted, RECORDED_OBJECT)
    if type(optimizer) not in RULES:
        return _fuse_recorded(optimizer, mode, wanted, _rule_without_kernels(optimizer, wanted))
    check_step(optimizer)
    check_params(optimizer.param_groups)  # else a trial could fail at what one of them is
    options = replace(wanted, strict=strict)
    _process.start()
    rule = tried_rule(optimizer)
    if isinstance(rule, RecordedRule):
        return _fuse_recorded(optimizer, mode, options, rule)
    for index, group in enumerate(optimizer.param_groups):
        check_group(rule, group, index, strict)
    differ = _try_on_gpus(rule, optimizer, strict)
    if mode.ddp is not None:
        options = replace(options, reduction=reduction_of(mode.ddp, _reduction_kind(mode)))
    become_fused(optimizer, options, rule)
    link_of(optimizer).gpu_bits_differ = tuple(differ)
    return optimizer


def _fuse_recorded(
    optimizer: OptimizerT,
    mode: Forward | Backward,
    options: Options,
    rule: RecordedRule | RegisteredRule,
) -> OptimizerT:
    """None of the class's code runs."""
    _process.start()
    if isinstance(mode, Backward) or options.delays:
        check_params(optimizer.param_groups)
    if mode.ddp is not None:
        options = replace(options, reduction=reduction_of(mode.ddp, _reduction_kind(mode)))
    return fuse_by(rule, optimizer, replace(options, fold=False))


def _rule_without_kernels(optimizer: Optimizer, options: Options) -> RecordedRule | RegisteredRule:
    stock = type(optimizer)
    if options.mode == FINAL:
        return RECORDED
    on_gpu = any(is_gpu(param.device) for param in parameters_of(optimizer))
    if options.mode == FORWARD or not options.recorded or on_gpu:
        return RECORDED
    return NATIVE.get(stock, REGISTERED if is_registered(stock) else RECORDED)


def _options(
    optimizer: Optimizer, mode: Forward | Backward, eager: Iterable[Tensor], bucket_bytes: int
) -> Options:
    """All but the reduction, which changes its model."""
    chosen = tuple(check_eager(eager, optimizer))
    if isinstance(mode, Backward):
        if kfac_of(optimizer) is not None:
            raise Error(
                "optfuse: kfac() preconditions the gradients of this optimizer before step(), and "
                'in backward mode they are used up by then; use mode="forward"'
            )
        if mode.final:
            final.start(optimizer)
        options = Options(
            FINAL if mode.final else BACKWARD,
            chosen,
            bucket_bytes,
            mode.side_stream,
            accumulate=mode.accumulate,
            fold=not mode.final,
        )
    else:
        options = Options(
            FORWARD,
            chosen,
            bucket_bytes,
            max_grad_norm=mode.max_grad_norm,
            fold=mode.fold,
            delays=_names.delays_of(mode.delay, optimizer) if mode.delay else None,
        )
    if mode.ddp is not None:
        check_model(mode.ddp, optimizer, options.accumulate, _reduction_kind(mode))
    return options


def _reduction_kind(mode: Forward | Backward) -> type[Reduction]:
    return Reduction if isinstance(mode, Backward) else _names.awaited_later()


def _try_on_gpus(rule: Rule, optimizer: Optimizer, strict: bool) -> list[str]:
    """The dtypes and GPUs on which a rule's kernels have other bits than fused=True."""
    if rule is not RULES.get(type(optimizer)):
        return []
    differ = gpu_bits_differ(rule, optimizer.param_groups, optimizer.state)
    if strict and differ:
        raise Error(refused(differ))
    if differ:
        warn(said_of(differ), UserWarning, stacklevel=5)
    return differ


def _refuse_to_lose(mode: Forward | Backward) -> None:
    """Under OPTFUSE_DISABLE: what changes the training, and would not be done."""
    if not isinstance(mode, Forward):
        return
    if mode.max_grad_norm is not None:
        raise Error(
            "optfuse: OPTFUSE_DISABLE leaves this optimizer as it is, so nothing would clip to "
            f"max_grad_norm={mode.max_grad_norm}; call torch.nn.utils.clip_grad_norm_() before "
            "step(), or unset OPTFUSE_DISABLE"
        )
    if mode.delay is not None and any(mode.delay.steps.values()):
        raise Error(
            "optfuse: OPTFUSE_DISABLE leaves this optimizer as it is, so nothing would delay its "
            "updates; leave delay= out, or unset OPTFUSE_DISABLE"
        )


@returns_the_wrapper
@checked(optimizer=FUSED)
def unfuse(optimizer: OptimizerT) -> OptimizerT:
    """Launches what is pending, also what Forward(delay=...) holds back, and makes the optimizer
    the stock one again, with its state. A gradient that backward fusion has used becomes None, once
    step() was called. Raises optfuse.Error if it is not fused."""
    _unfuse(optimizer)
    return optimizer


def _unfuse(optimizer: Optimizer) -> None:
    if is_recorded(optimizer):
        unfuse_recorded(optimizer)
    elif is_fused(optimizer):  # else OPTFUSE_DISABLE=1
        become_stock(optimizer)


def give_up_unasked(optimizer: Optimizer) -> None:
    """Makes it the stock one again if `python -m optfuse run` fused it, and the script now says
    itself what it wants."""
    owner = owner_of(optimizer)
    if owner is not None and owner.unasked is not None:
        _unfuse(optimizer)
        owner.unasked()


@checked(optimizer=optional(FUSED))
def flush(optimizer: Optimizer | None = None) -> None:
    """Launches every pending update of the optimizer, or of all optimizers.
    Raises optfuse.Error if it is not fused."""
    if optimizer is None:
        _process.flush_all()
    elif is_fused(optimizer):
        link_of(optimizer).flush()
