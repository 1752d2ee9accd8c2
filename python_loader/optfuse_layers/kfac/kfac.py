# SPDX-License-Identifier: BSD-3-Clause
"""K-FAC (arXiv 1503.05671) with the communication of SPD-KFAC (arXiv 2107.06533)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optfuse import _process
from optfuse._arguments.check import argument, checked, parameters_of
from optfuse._clipping import preconditioners
from optfuse._library.bindings import FORWARD, Error
from optfuse._link import link_of
from optfuse._options import is_fused
from optfuse_layers.kfac import messages
from optfuse_layers.kfac.arguments import OPTIONS, POSITIVE, STEPS
from optfuse_layers.kfac.factors import Factors
from optfuse_layers.kfac.gradients import not_finite, precondition
from optfuse_layers.kfac.inverses import Factor, factored, invert, owners
from optfuse_layers.kfac.layers import FACTORS, Preconditioned, sorted_layers
from optfuse_layers.layer import check_skip, check_weights

_AMP = "_step_supports_amp_scaling"
_ENTRIES = {"step", "collections", "layers", "order", "group"}  # of a state

Scheduled = float | int | Callable[[int], float]


@dataclass(frozen=True)
class KFACSummary:
    """str() is a table of the layers."""

    preconditioned: dict[str, tuple[int, int]]  # d of A and of G
    others: dict[str, str]  # why not
    factor_bytes: int  # running factors and their sums
    inverse_bytes: int
    steps: int
    messages: int  # of factors, in the last collection

    def __str__(self) -> str:
        rows = [(name, f"A {a} x {a}, G {g} x {g}") for name, (a, g) in self.preconditioned.items()]
        rows += [(name, f"left to the optimizer: {why}") for name, why in self.others.items()]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{name:{width}}  {what}" for name, what in rows]
        return "\n".join(
            [
                *lines,
                f"{len(self.preconditioned)} layers preconditioned; "
                f"{self.factor_bytes:,} bytes of factors, {self.inverse_bytes:,} of inverses; "
                f"{self.steps} steps, {self.messages} messages with factors in the last collection",
            ]
        )


class KFAC:
    """Preconditions the gradients before each step() of its optimizer; kfac() returns it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None,
        options: dict[str, Any],
    ) -> None:
        self._options = options
        self._optimizer = weakref.ref(optimizer)
        self._layers, self._others = sorted_layers(model, frozenset(options["skip"]))
        _check_layers(self._layers, optimizer)
        self._factors = Factors(self._layers, group, options["fusion"], options["network"])
        self.rows = options["rows"]
        self._owners = owners(options["placement"], self._factors.sizes, self._factors.processes)
        self._inverses: list[Tensor] | None = None
        self.steps = 0
        self._collects = self._is_on("factors_every", 0)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        self._saved_amp = optimizer.__dict__.get(_AMP)
        # GradScaler then unscales the gradients before step(), and skips it.
        optimizer.__dict__[_AMP] = False
        preconditioners.know(optimizer, self)
        self._begin()

    @property
    def scale(self) -> float:
        """The scale of the loss of which gradients have been seen since the last step()."""
        return self._factors.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._factors.scale = scale

    # Methods for users

    @property
    def rows(self) -> list[float] | None:
        """Samples in the batch of each process, from the next collection on; None: all alike."""
        return self._factors.rows

    @rows.setter
    def rows(self, rows: Sequence[float] | None) -> None:
        processes = self._factors.processes
        if rows is not None and len(rows) != processes:
            raise Error(
                f"optfuse: KFAC.rows has {len(rows)} numbers, and there are {processes} "
                "processes; give the samples of each"
            )
        self._factors.rows = None if rows is None else [float(n) for n in rows]

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Copies of the running factors of a layer, A (inputs, and 1 for a bias) and G (outputs),
        as whole matrices. Raises optfuse.Error for an unknown name."""
        self._check_there()
        names = [layer.name for layer in self._layers]
        if name not in names:
            raise Error(
                f"optfuse: {name!r} is no layer that is preconditioned; these are: "
                + ", ".join(names)
            )
        slot = 2 * names.index(name)
        return self._factors.unpacked(slot), self._factors.unpacked(slot + 1)

    def summary(self) -> KFACSummary:
        inverses = self._inverses or []
        return KFACSummary(
            {layer.name: layer.sizes for layer in self._layers},
            dict(self._others),
            2 * sum(t.nbytes for t in self._factors.running),
            sum(t.nbytes for t in inverses),
            self.steps,
            self._factors.messages,
        )

    def discard(self) -> None:
        """Drops what the layers have contributed since the last step(), as after a batch that is
        given up. All processes call it."""
        self._check_there()
        self._factors.end()
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Running factors and inverses, packed (upper triangles by rows); the step; and how
        messages are arranged, which decides how sums are rounded. Copies."""
        self._check_there()
        packed = [t.clone() for t in self._factors.running]
        inverses = [torch.ops.optfuse.pack_factor(t) for t in self._inverses or []]
        layers = {}
        for n, layer in enumerate(self._layers):
            of_layer: dict[str, Any] = {"sizes": list(layer.sizes)}
            for at, factor in enumerate(FACTORS):
                of_layer[factor] = packed[2 * n + at]
                if inverses:
                    of_layer[f"{factor}_inverse"] = inverses[2 * n + at]
            layers[layer.name] = of_layer
        return {
            "step": self.steps,
            "collections": self._factors.collections,
            "layers": layers,
            "order": list(self._factors.arrangement.order),
            "group": list(self._factors.arrangement.group),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also from another number of processes. Raises optfuse.Error if it is of other layers,
        with nothing changed; drops what was contributed since the last step(). All processes call
        it."""
        self._check_there()
        if not isinstance(state_dict, dict) or not set(state_dict) >= _ENTRIES:
            raise Error(
                "optfuse: this is no state of KFAC; give what KFAC.state_dict() returned, which "
                f"has {', '.join(sorted(_ENTRIES))}"
            )
        layers = state_dict["layers"]
        theirs = {name: tuple(of_layer["sizes"]) for name, of_layer in layers.items()}
        ours = {layer.name: layer.sizes for layer in self._layers}
        differing = sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n))
        if differing:
            raise Error(
                f"optfuse: this state of KFAC is of another model: layer {differing[0]!r} has "
                f"factors of {theirs.get(differing[0])} in it, and of {ours.get(differing[0])} here"
            )
        self._factors.end()
        states = [layers[layer.name] for layer in self._layers]
        packed = [state[factor] for state in states for factor in FACTORS]
        for running, loaded in zip(self._factors.running, packed, strict=True):
            running.copy_(loaded)
        self._inverses = None
        if all("A_inverse" in state for state in states):
            inverses = [state[f"{factor}_inverse"] for state in states for factor in FACTORS]
            self._inverses = [
                torch.ops.optfuse.unpack_factor(packed.to(running), d, 0.0)
                for packed, running, d in zip(
                    inverses, self._factors.running, self._factors.sizes, strict=True
                )
            ]
        self.steps, self._factors.collections = state_dict["step"], state_dict["collections"]
        self._collects = self._is_on("factors_every", self.steps)
        self._factors.arrange(messages.Arrangement(state_dict["order"], state_dict["group"]))
        self._begin()

    def remove(self) -> None:
        """From here on the gradients are the optimizer's alone. All processes call it; twice does
        nothing."""
        if not self._factors.is_alive:
            return
        self._hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            preconditioners.forget(optimizer)
            optimizer.__dict__.pop(_AMP, None)
            if self._saved_amp is not None:
                optimizer.__dict__[_AMP] = self._saved_amp
        self._factors.stop()

    def _check_there(self) -> None:
        if not self._factors.is_alive:
            raise Error("optfuse: this KFAC has been removed; call optfuse.kfac() for another one")

    # A step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise Error(
                "optfuse: step(closure) computes gradients inside step(), where kfac() can't "
                "precondition them; call backward() first, then step()"
            )
        _refuse_backward_mode(optimizer)
        if getattr(optimizer, "grad_scale", None) is not None:
            raise Error(
                "optfuse: GradScaler has left the gradients scaled for this optimizer, and kfac() "
                "needs them unscaled; call optfuse.fuse() first, then kfac()"
            )
        check_weights(self._layers, "kfac(); call remove() on the KFAC, then kfac() again")
        inverts = self._inverses is None or self._is_on("inverses_every", self.steps)
        damping = float(self._scheduled("damping", self.steps)) if inverts else 0.0
        collects = self._is_on("factors_every", self.steps + 1)
        self._check_finite()
        with torch.no_grad():
            missing = self._commit() if self._collects else set()
            if inverts:
                self._invert(damping)
            assert self._inverses is not None
            precondition(self._layers, self._inverses, optimizer, self._options["kl_clip"], missing)
        self.steps += 1
        self._factors.scale = 1.0
        self._collects = collects
        self._begin()

    def _scheduled(self, name: str, step: int) -> Any:
        value = self._options[name]
        if not callable(value):
            return value
        kind = POSITIVE if name == "damping" else STEPS
        return argument("kfac", f"{name}({step})", value(step), kind)

    def _is_on(self, name: str, step: int) -> bool:
        return bool(step % self._scheduled(name, step) == 0)

    def _check_finite(self) -> None:
        """Looks at gradients, which all processes share; in steps that collect no factors, too."""
        layer = not_finite(self._layers)
        if layer is not None:
            self.discard()  # what comes now may be right
            raise Error(
                f"optfuse: the gradients of layer {layer.name!r} have infinities or NaN, and once "
                "preconditioned more weights would. The factors and the weights are as they were; "
                "leave out this step()"
            )

    def _begin(self) -> None:
        if self._collects:
            self._factors.begin()

    def _commit(self) -> set[int]:
        try:
            return self._factors.commit(self._options["decay"], self._options["missing"] == "skip")
        except Error:
            self._begin()  # what comes now may be right
            raise

    def _invert(self, damping: float) -> None:
        of = self._factors
        factors = []
        for n, layer in enumerate(self._layers):
            dampings = (damping, damping)
            if self._options["split"] == "pi":
                dampings = factored(of.unpacked(2 * n), of.unpacked(2 * n + 1), damping)
            for slot, factor, added in zip((2 * n, 2 * n + 1), FACTORS, dampings, strict=True):
                name = f"{factor} of layer {layer.name!r}"
                factors.append(Factor(name, of.running[slot], of.sizes[slot], added))
        self._inverses = invert(factors, self._owners, of.group)


def _refuse_backward_mode(optimizer: Optimizer) -> None:
    if is_fused(optimizer) and link_of(optimizer).mode != FORWARD:
        raise Error(
            "optfuse: kfac() preconditions gradients before step(), and in backward mode they are "
            'used up by then; use optfuse.fuse(optimizer, mode="forward")'
        )


def _check_layers(layers: Sequence[Preconditioned], optimizer: Optimizer) -> None:
    if not layers:
        raise Error("optfuse: kfac() found no Linear or Conv2d layer with a weight to train")
    known = set(map(id, parameters_of(optimizer)))
    foreign = [la.name for la in layers if any(id(p) not in known for p in la.parameters())]
    if foreign:
        raise Error(
            f"optfuse: this optimizer has not the parameters of layer {foreign[0]!r}; pass the "
            "one that has, or leave the layer out with skip=[...]"
        )
    devices = sorted({str(layer.weight.device) for layer in layers})
    if len(devices) > 1:
        raise Error(f"optfuse: kfac() needs all layers on one device; these are on {devices}")


@checked(**OPTIONS)
def kfac(
    model: nn.Module,
    optimizer: Optimizer,
    damping: Scheduled = 1e-3,
    decay: float = 0.95,
    kl_clip: float | None = 1e-3,
    factors_every: Scheduled = 10,
    inverses_every: Scheduled = 100,
    process_group: dist.ProcessGroup | None = None,
    fusion: str | int = "planned",
    placement: str = "balanced",
    skip: Sequence[str] = (),
    split: str | None = None,
    missing: str = "error",
    rows: Sequence[float] | None = None,
    network: tuple[float, float] | tuple[float, float, float] | None = None,
) -> KFAC:
    """Preconditions the gradients of a model's layers with K-FAC before each optimizer.step().

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        kfac = optfuse.kfac(model, optimizer)      # the training loop stays as it is

    A layer has two factors. With g the gradient of the mean loss over the joint batch by the
    layer's output: A = X'X / N and G = N sum g g' of a Linear with N rows, A = P'P / B and
    G = (B / S) sum g g' of a Conv2d with B images, patches P and S positions; a bias is one more
    column, of ones, of X or P. The running factor is decay F + (1 - decay) F_new, from the
    identity. Gradients dW become G^-1 dW A^-1 min(1, sqrt(kl_clip / |lr^2 sum v g|)); then the
    optimizer makes its own step. (Martens and Grosse, arXiv 1503.05671; Grosse and Martens, arXiv
    1602.01407; the distributed part: Shi et al., arXiv 2107.06533.)

    model: a module, or its DistributedDataParallel wrapper. Linear, Conv2d (groups=1) and the
        projections of MultiheadAttention are preconditioned; `KFAC.summary()` says why others are
        not. Parameters of float32, float64 or 16 bits; factors are float32, or float64 if any
        weight is.
    optimizer: any torch.optim optimizer of these parameters, stock or fused in forward mode.
    damping: added to the diagonal of both factors when they are inverted. split="pi": pi
        sqrt(damping) to A and sqrt(damping) / pi to G, pi^2 the ratio of their mean diagonals.
    kl_clip: None leaves the preconditioned gradients as long as they are.
    factors_every, inverses_every: steps between collections of factors, and between inverses. They
        and damping may be functions of the step, which counts from 0.
    process_group: the processes over whose batches factors are summed, in a group of their own
        that is made here; by default those of DistributedDataParallel. A process's gradient
        counts divided by their number.
    fusion: which factors go in one message: "each", "all", "threshold" (those that follow each
        other until it has 25 MiB), a number (until it has as many bytes), "paper" (the rule of
        arXiv 2107.06533), "planned" (the grouping that ends soonest, by the times of the second
        to fourth collection).
    network: seconds a message, seconds a byte, and seconds that a message takes the processor from
        the passes. The last or all may be left out: they are measured.
    placement: who inverts: "balanced" (by the cube of the size; below 1,024 rows all do),
        "round_robin" or "everywhere".
    skip: names of modules that are left to the optimizer, with all that is in them.
    missing: "error", or "skip": a layer without a use since the last step keeps its gradient.
    rows: how many samples each process has, if not all have as many, with a loss that is the mean
        over its own.

    Returns a KFAC. Raises optfuse.Error for sharded parameters (DTensors) and backward mode; and
    in step() for what would make factors wrong, before anything has changed.
    """
    _process.start()
    _refuse_backward_mode(optimizer)
    if isinstance(model, DistributedDataParallel):
        process_group = process_group or model.process_group
        model = model.module
    check_skip(model, frozenset(skip), "kfac()")
    options = {
        "damping": damping,
        "decay": decay,
        "kl_clip": kl_clip,
        "factors_every": factors_every,
        "inverses_every": inverses_every,
        "fusion": fusion,
        "placement": placement,
        "skip": skip,
        "split": split,
        "missing": missing,
        "rows": rows,
        "network": network,
    }
    return KFAC(model, optimizer, process_group, options)
