# SPDX-License-Identifier: BSD-3-Clause
"""fuse(), unfuse(), flush() and summary(): the public functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from optfuse import _process, _products, _stock_trial
from optfuse._check import (
    EAGER,
    FLAG,
    OPTIMIZER,
    Kind,
    Unfit,
    checked,
    number,
    one_of,
    optional,
    whole,
)
from optfuse._classes import LINK, fused_class, link_of
from optfuse._gpu import is_gpu
from optfuse._link import How, Link
from optfuse._native import BACKWARD, DTYPES, FORWARD, Counts, Error, lib
from optfuse._refuse import check_eager, check_optimizer
from optfuse._rules import RULES, Group, Rule, rule_of
from optfuse._scheduler import check_step, rewrap
from optfuse._selfcheck import gpu_bits_differ

_MODES = {"forward": FORWARD, "backward": BACKWARD}
_AMP = "_step_supports_amp_scaling"
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    return LINK in optimizer.__dict__


def is_disabled() -> bool:
    return os.environ.get("OPTFUSE_DISABLE", "") not in ("", "0")


def _take_fused(value: Any) -> Optimizer:
    optimizer: Optimizer = OPTIMIZER.take(value)
    if not is_fused(optimizer) and not is_disabled():
        raise Unfit("this one is not fused, or was unfused")
    return optimizer


FUSED = Kind("an optimizer that optfuse.fuse() returned", _take_fused)


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
) -> OptimizerT:
    """Makes the optimizer's updates run inside the training passes.

    optimizer: one of torch.optim but LBFGS and SparseAdam, or of a class named to
        register(), over dense parameters on the CPU or on NVIDIA GPUs, of dtype
        float32, float64, bfloat16 or float16. Where there are no kernels for it
        the update runs torch's operators as the class's step() does, or that
        step() itself, on one parameter.
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

    Returns the same object, still an instance of its class. Raises
    optfuse.Error, with nothing changed, if it can't be fused. With
    OPTFUSE_DISABLE=1 in the environment it returns the optimizer unchanged,
    and raises if it was to clip.
    """
    if is_disabled():
        _refuse_to_lose(max_grad_norm)
        return optimizer
    if is_fused(optimizer):
        raise Error("optfuse: this optimizer is already fused; call optfuse.unfuse() on it first")
    if side_stream and mode != "backward":
        raise Error('optfuse: side_stream=True goes with mode="backward"')
    if max_grad_norm is not None and mode == "backward":
        raise Error(
            "optfuse: max_grad_norm needs all gradients at once, and backward mode updates "
            'before they are there; use optfuse.fuse(optimizer, mode="forward")'
        )
    check_optimizer(optimizer, strict)
    check_step(optimizer)
    chosen = check_eager(eager, optimizer)
    _process.start()
    if try_with_stock(type(optimizer), optimizer.param_groups):
        check_optimizer(optimizer, strict)  # by the rule that it has now
    differ: list[str] = []
    rule = rule_of(optimizer)
    if rule is RULES.get(type(optimizer)) and not rule.by_host:
        differ = gpu_bits_differ(optimizer, lambda small: _fuse(small, How()))
    if strict and differ:
        raise Error(
            f"optfuse: strict=True, but updates of {', '.join(differ)} have other bits than "
            "fused=True there (docs/numerics.md names the releases and chips where they are "
            "equal). Pass strict=False, or keep the optimizer as it is"
        )
    how = How(
        _MODES[mode], tuple(chosen), side_stream, accumulate, max_grad_norm, fold, bucket_bytes
    )
    fused = _fuse(optimizer, how)
    link_of(fused).gpu_bits_differ = tuple(differ)
    return fused


def _refuse_to_lose(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        raise Error(
            "optfuse: OPTFUSE_DISABLE leaves this optimizer as it is, so nothing would clip to "
            f"max_grad_norm={max_grad_norm}; call torch.nn.utils.clip_grad_norm_() before step(), "
            "or unset OPTFUSE_DISABLE"
        )


def try_with_stock(stock: type[Optimizer], groups: list[dict[str, Any]]) -> bool:
    """Finds out whether something may take the place of the class's own step(), where that
    is not known; once for each kind of parameters. False: it is known."""
    rule = RULES.get(stock)
    if rule is None or not any(_stock_trial.kinds(rule, stock, groups)):
        return False

    def fuse_for_trial(small: Optimizer) -> Optimizer:
        _products.make(rule, small.param_groups)
        on_gpu = rule.tried and is_gpu(small.param_groups[0]["params"][0].device)
        return _fuse(small, How(), rule.on_gpus() if on_gpu else rule)

    _stock_trial.make(stock, groups, _stock_trial.Tried(rule, fuse_for_trial))
    if not _stock_trial.verdicts(rule, stock, groups):
        _products.make(rule, groups)
    return True


def _fuse(optimizer: OptimizerT, how: How, rule: Rule | None = None) -> OptimizerT:
    stock = type(optimizer)
    link = Link(optimizer, how, rule)
    optimizer.__dict__[LINK] = link
    optimizer.__class__ = fused_class(stock, link.rule.by_host)  # type: ignore[assignment, arg-type]
    rewrap(optimizer)
    # On the CPU GradScaler must skip steps by itself, and unscale before someone
    # clips: what is folded is folded in its own unscale_().
    if _AMP in optimizer.__dict__:
        link.saved[_AMP] = optimizer.__dict__[_AMP]
    optimizer.__dict__[_AMP] = _unscales(optimizer, how.mode)
    return optimizer


def _unscales(optimizer: Optimizer, mode: int) -> bool:
    """Whether GradScaler may leave unscaling and skipping to the update, as it
    does with stock's fused=True: on GPUs, where the step counters are too."""
    by_host = link_of(optimizer).rule.by_host
    return not by_host and mode == FORWARD and all(
        group.get("fused") and all(is_gpu(p.device) for p in group["params"])
        for group in optimizer.param_groups
    )


def fuse_like(optimizer: OptimizerT, link: Link, eager: list[Tensor]) -> OptimizerT:
    """Fuses a copy of an optimizer in the way the original was. Its options, and what
    its parameters are, may have become others since."""
    try_with_stock(type(optimizer), optimizer.param_groups)
    return _fuse(optimizer, replace(link.how, eager=tuple(eager)))


@checked(optimizer=FUSED)
def unfuse(optimizer: OptimizerT) -> OptimizerT:
    """Launches what is pending and makes the optimizer the stock one again,
    with its state. Raises optfuse.Error if it is not fused."""
    if not is_fused(optimizer):
        return optimizer  # OPTFUSE_DISABLE=1
    link = link_of(optimizer)
    link.close(optimizer)
    del optimizer.__dict__[LINK], optimizer.__dict__[_AMP]
    optimizer.__dict__.update(link.saved)
    optimizer.__class__ = link.stock
    rewrap(optimizer)
    return optimizer


def fuse_again(optimizer: Optimizer) -> None:
    """In the same way; with another update where its state has become another."""
    how = link_of(optimizer).how
    _fuse(unfuse(optimizer), how)


@checked(optimizer=optional(FUSED))
def flush(optimizer: Optimizer | None = None) -> None:
    """Launches every pending update of the optimizer, or of all optimizers.
    Raises optfuse.Error if it is not fused."""
    if optimizer is None:
        _process.flush_all()
    elif is_fused(optimizer):
        link_of(optimizer).flush()


@dataclass(frozen=True)
class Summary:
    """What a fused optimizer has done. Counts are updates since fuse()."""

    optimizer: str
    mode: str
    parameters: int
    elements: int
    reference: str  # the implementation of PyTorch whose bits are reproduced
    reference_differs: tuple[int, ...]  # groups whose flags select another one
    gpu_bits_differ: tuple[str, ...]  # kinds of parameters, as seen in a check by fuse()
    own_step_because: tuple[str, ...]  # why, where something else might update
    products_because: tuple[str, ...]  # why operators multiply there, where cuBLAS might
    isa: dict[str, str]  # dtype -> instruction set of the kernel
    eager: int
    created: int
    at_use: int  # launched by the first use of their memory
    at_close: int  # launched with a bucket, by flush() or by the next step()
    at_once: int  # launched where they were created
    pending: int
    in_flight: int  # launched on a GPU and not known to be done
    launches: int
    threads_seen: bool  # another thread used a pending parameter: no more deferring
    compiled: bool  # compiled code used parameters on a GPU: no more deferring
    past_caches: bool  # backward fusion stores parameters on the CPU so now (docs/performance.md)

    def __str__(self) -> str:
        lines = [
            f"optfuse: {self.optimizer}, {self.mode} fusion, {self.parameters} parameters "
            f"({self.elements:,} elements)",
            f"  kernels: {', '.join(f'{d} {i}' for d, i in self.isa.items()) or 'none'}; "
            f"bits of {self.reference}",
            f"  updates: {self.created} created, {self.at_use} at first use, "
            f"{self.at_close} with others, {self.at_once} at once, {self.pending} pending, "
            f"in {self.launches} launches",
        ]
        if self.reference_differs:
            groups = ", ".join(map(str, self.reference_differs))
            lines.append(
                f"  note: the options of group {groups} select another implementation of "
                "PyTorch; it rounds differently (docs/numerics.md). "
                "strict=True refuses this"
            )
        if self.gpu_bits_differ:
            lines.append(
                f"  note: updates of {', '.join(self.gpu_bits_differ)} round differently from "
                "fused=True on this GPU and release. strict=True refuses this"
            )
        lines += [
            f"  note: the class's own step() updates, because {why}"
            for why in self.own_step_because
        ]
        lines += [
            f"  note: torch's operators multiply matrices of Muon, and not cuBLAS, because {why}"
            for why in self.products_because
        ]
        if self.eager:
            lines.append(f"  note: {self.eager} parameters are eager, as asked")
        if self.threads_seen:
            lines.append(
                "  note: another thread used a pending parameter; updates run at once since then"
            )
        if self.compiled:
            lines.append(
                "  note: a compiled callable was entered; updates on the GPU run at once since then"
            )
        if self.mode == "forward" and self.created and self.at_once > self.created // 2:
            lines.append(
                "  note: most updates ran inside step(), because their memory is shared with "
                "other tensors; fusion saves less then"
            )
        return "\n".join(lines)


def _kinds(params: Iterable[Tensor]) -> list[str]:
    """The kinds of device that the parameters are on."""
    return sorted({"CUDA" if is_gpu(p.device) else "the CPU" for p in params})


def _by_host(rule: Rule, groups: list[Group], dtype: str) -> str:
    """What updates parameters of this dtype where there are no kernels."""
    found = set()
    for group in groups:
        if any(str(p.dtype) == f"torch.{dtype}" for p in group["params"]):
            found.add(rule.updates_by() if rule.is_native(group) else "own step()")
    return " and ".join(sorted(found))


def _disabled(optimizer: str, params: list[Tensor]) -> Summary:
    """Of one that fuse() left as it is, since OPTFUSE_DISABLE said so."""
    return Summary(
        optimizer=optimizer,
        mode="disabled",
        parameters=len(params),
        elements=sum(p.numel() for p in params),
        reference="the class itself (OPTFUSE_DISABLE is set)",
        reference_differs=(),
        gpu_bits_differ=(),
        own_step_because=(),
        products_because=(),
        isa={},
        eager=0,
        created=0,
        at_use=0,
        at_close=0,
        at_once=0,
        pending=0,
        in_flight=0,
        launches=0,
        threads_seen=False,
        compiled=False,
        past_caches=False,
    )


@checked(optimizer=FUSED)
def summary(optimizer: Optimizer) -> Summary:
    """What the fused optimizer has done so far, and what it fell back from.
    Raises optfuse.Error if the optimizer is not fused."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    if not is_fused(optimizer):
        return _disabled(type(optimizer).__name__, params)
    link = link_of(optimizer)
    counts = Counts()
    lib.of_shim_counts(link.plan, ctypes.byref(counts))
    dtypes = {str(p.dtype).removeprefix("torch.") for p in params}
    return Summary(
        optimizer=type(optimizer).__name__,
        mode="forward" if link.mode == FORWARD else "backward",
        parameters=len(params),
        elements=sum(p.numel() for p in params),
        reference=f"torch's {link.rule.reference} on " + " and ".join(_kinds(params)),
        reference_differs=tuple(
            i for i, group in enumerate(groups) if link.rule.difference(group)
        ),
        gpu_bits_differ=link.gpu_bits_differ,
        own_step_because=link.own_step_because,
        products_because=tuple(_products.reasons(link.rule, groups)),
        isa={
            name: _by_host(link.rule, groups, name) if link.rule.by_host else " and ".join(
                lib.of_shim_isa(link.plan, i).decode() if kind == "the CPU" else "cuda"
                for kind in _kinds(p for p in params if str(p.dtype) == f"torch.{name}")
            )
            for i, name in enumerate(DTYPES)
            if name in dtypes
        },
        eager=len(link.eager),
        created=counts.created,
        at_use=counts.at_use,
        at_close=counts.at_close,
        at_once=counts.at_once,
        pending=counts.pending,
        in_flight=counts.in_flight,
        launches=counts.launches,
        threads_seen=counts.threads_seen,
        compiled=link.compiled,
        past_caches=counts.past_caches,
    )
