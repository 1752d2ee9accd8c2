# SPDX-License-Identifier: BSD-3-Clause
"""The objects that a program acts on: models, optimizers and what it holds. There is one
world for each run, and all worlds of a program go through the same states."""

import contextlib
import os
from collections import Counter, deque

import torch
from common import adamw, refused, snapshot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import optfuse
from optfuse._options import is_fused, is_recorded
from programs import cxx_door, deed
from programs.models import LEAVE_OUT, MODELS, PROMISING, inputs
from programs.optimizers import KINDS, Kind
from programs.reference import Dense


def comparable(value):
    """NaN equals NaN, and sparse tensors are compared by what they stand for."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if torch.is_tensor(value):
        return value.detach().to_dense() if value.is_sparse else value
    return [comparable(v) for v in value] if type(value) in (list, tuple) else value


def plain(value, places):
    """Without tensors as keys and of classes of their own, and only what can be compared."""
    if isinstance(value, dict):
        return {places.get(k, str(k)): plain(v, places) for k, v in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(v, places) for v in value]
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, int | str):
        return value
    return comparable(value) if isinstance(value, float) else type(value).__name__


class World:
    def __init__(self, setup, mode):
        self.mode = mode  # "stock", "forward" or "backward"
        self.seen = []  # (label, value), in order: what is compared
        self.label = "setup"
        self.kinds = list(setup["models"])
        self.models = [MODELS[kind][0]() for kind in self.kinds]
        self.ddp = None
        if "ddp" in setup:
            self.ddp = self.models[0] = DistributedDataParallel(
                self.models[0],
                gradient_as_bucket_view=setup["ddp"] == "views",
                find_unused_parameters=self.kinds[0] in LEAVE_OUT,
            )
        self.extra = []  # parameters that are in no model
        self.unsettled = set()  # optimizers with a backward since their last step()
        self.in_backward = False
        self.schedulers, self.averages, self.handles = [], [], []
        self.held, self.losses, self.saved = [], [], []
        self.scaler = None
        self.references = []
        self.armed = {place: [] for place in deed.ARMED}  # (deed, arguments)
        self.hooked = None  # the parameter whose hook calls a deed
        self.turns = Counter()  # how often each deed was played
        self.turn = 0  # how often this one was before
        self.i = 0  # iterations so far
        self.had_pending = False  # whether updates were pending at the tested deed
        self.launched = False  # whether it launched them by a use
        self.has_refused = False  # what a deed does that is to raise
        # Options of fuse(); stock clips by hand.
        self.passes = setup.get("accumulate", 1)
        self.max_norm = setup.get("max_grad_norm")
        self.fold = setup.get("fold", True)
        self.bucket_bytes = setup.get("bucket_bytes", 1)
        self.overlapping = "same elements" in self.kinds
        self.specs = list(setup["optimizers"])
        self.optimizers = [self.make(spec) for spec in self.specs]
        self.is_begun = False
        self.order = setup.get("order")  # of backward passes, or stock's
        self.tested = setup.get("tested")  # the name of a deed that is played though it differs

    def begin(self):
        """Fuses, before the first deed that is not to come before that."""
        if not self.is_begun:
            self.is_begun = True
            for optimizer in self.optimizers:
                self.wrap(optimizer)
            if self.fused and self.order:
                for model in self.models:
                    optfuse.reorder(model, **self.order)

    # ---- optimizers

    def make(self, spec):
        """spec: "kind" is a name or a Kind."""
        kind = spec["kind"] if isinstance(spec["kind"], Kind) else KINDS[spec["kind"]]
        chosen = self.chosen(spec.get("over", "all"))
        groups = [{"params": chosen}]
        if spec.get("groups") == 2 and len(chosen) > 1:
            groups = [{"params": chosen[::2]}, {"params": chosen[1::2], "lr": 0.03}]
        options = dict(spec.get("options", {}))
        if spec.get("tensor_lr"):
            options["lr"] = torch.tensor(options["lr"])
        return kind.make(groups, **options)

    def chosen(self, over):
        if over == "last model":
            return list(self.models[-1].parameters())
        params = list(dict.fromkeys(p for m in self.models for p in m.parameters()))
        if over == "first models" and len(self.models) > 1:
            last = set(self.models[-1].parameters())
            return [p for p in params if p not in last]
        return {"even": params[::2], "odd": params[1::2]}.get(over, params)

    def wrap(self, optimizer, fuse=None, **options):
        """Fuses, with options of the mode's object; fuse: those of fuse() itself."""
        if not self.specs:  # a deed that makes its own
            self.optimizers.append(optimizer)
        if self.mode == "stock":
            optimizer._step_supports_amp_scaling = False  # see reference.py
            self.references.append(Dense(optimizer, self.max_norm))
            return optimizer
        if hasattr(optimizer, "_cxx"):
            if self.max_norm is not None or self.ddp is not None:
                raise optfuse.Error("C++ has no such option")
            passes = self.passes if self.mode == "backward" else 1
            return cxx_door.enter(optimizer, self.mode == "backward", passes, self.bucket_bytes)
        if self.mode == "forward":
            own = {"max_grad_norm": self.max_norm, "fold": self.fold}
            mode = optfuse.Forward(**{**own, **options})
        else:
            if self.max_norm is not None:
                raise optfuse.Error("optfuse.Backward() has no max_grad_norm=")
            mode = optfuse.Backward(**{"accumulate": self.passes, "ddp": self.ddp, **options})
        promise = {"OPTFUSE_PRODUCTS": "force"} if PROMISING & set(self.kinds) else {}
        with self.environment(**promise):
            return optfuse.fuse(optimizer, mode, bucket_bytes=self.bucket_bytes, **(fuse or {}))

    def build(self, kind="mlp"):
        """The model of a deed that makes its own."""
        self.kinds, self.models = [kind], [MODELS[kind][0]()]
        return self.model()

    def own(self, kind="mlp", make=adamw, **options):
        """Its model and its optimizer."""
        return self.build(kind), self.wrap(make(self.params()), **options)

    @property
    def fused(self):
        return self.mode != "stock"

    # ---- what an index means

    def model(self, i=0):
        return self.models[i % len(self.models)]

    def optimizer(self, i=0):
        return self.optimizers[i % len(self.optimizers)]

    def params(self):
        return [*dict.fromkeys(p for m in self.models for p in m.parameters()), *self.extra]

    def param(self, i=0):
        params = self.params()
        return params[i % len(params)]

    def grad(self, i=0):
        """A gradient that is there, or None."""
        params = [p for p in self.params() if p.grad is not None]
        return params[i % len(params)].grad if params else None

    def states(self):
        """(entry, key) of every tensor in an optimizer's state, in stock's order."""
        found = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    entry = optimizer.state.get(p, {})
                    counter = "step" if hasattr(optimizer, "_cxx") else ""  # there it is no tensor
                    found += [
                        (entry, k) for k, v in entry.items() if torch.is_tensor(v) and k != counter
                    ]
        return found

    def state(self, i=0):
        found = self.states()
        if not found:
            return None
        entry, key = found[i % len(found)]
        return entry[key]

    def tensor(self, what, i):
        return {"weight": self.param, "gradient": self.grad, "state": self.state}[what](i)

    def modules(self, kinds=(nn.Linear,)):
        return [m for model in self.models for m in model.modules() if isinstance(m, kinds)]

    # ---- training

    def loss(self, model, i, call=None):
        n = model % len(self.models)
        x = inputs(self.kinds[n], self.models[n], i)
        out = (call or self.models[n])(x).square().mean()
        return out + sum(p.square().sum() for p in self.extra if p.dtype == out.dtype)

    def backward(self, loss, **options):
        """Every backward pass goes through here, or below."""
        doors = [o for o in self.optimizers if hasattr(o, "_door")]
        for optimizer in doors:
            optimizer.tell()
        self.in_backward = True
        self.unsettled.update(range(len(self.optimizers)))
        loss.backward(**options)
        self.in_backward = False
        for optimizer in doors:
            optimizer.learn()

    def backward_that_adds(self, loss):
        """One that updates in no mode, so that all is to be as in stock, but for
        what another pass has updated before."""
        self.in_backward = bool(self.unsettled)
        loss.backward()
        self.in_backward = False

    def step(self, i, closure=None):
        i %= len(self.optimizers)
        result = self.optimizers[i].step(closure) if closure else self.optimizers[i].step()
        self.stepped(i)
        return result

    def stepped(self, i):
        """Every step() comes here afterwards."""
        self.unsettled.discard(i)

    def train(self, loss=None, set_to_none=True):
        """One iteration of all optimizers, and what is armed for it; loss: a function."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for _ in range(self.passes):
            value = loss() if loss else self.loss(0, self.i)
            self.do(deed.BEFORE_BACKWARD)
            with self.hooks():
                if not self.do(deed.BACKWARD, value):
                    self.backward(value)
        self.do(deed.BEFORE_STEP)
        if not self.do(deed.STEP):
            for i in range(len(self.optimizers)):
                self.step(i)
        self.i += 1
        self.see("loss", value)

    # ---- deeds in an iteration

    def do(self, place, *given):
        """Whether there was one for this place."""
        due = self.armed[place]
        if place != deed.IN_BACKWARD:
            self.armed[place] = []
        for one, arguments in due:
            self.call(one, arguments, *given)
        return bool(due)

    def play(self, one, arguments):
        """Now, or in the next iteration."""
        if one.where in deed.ARMED:
            self.armed[one.where].append((one, arguments))
        else:
            self.call(one, arguments)

    def call(self, one, arguments, *given):
        self.turn = self.turns[one.name]
        self.turns[one.name] += 1
        if one.name != self.tested or one.where not in (deed.BETWEEN, deed.ANYWHERE):
            one.call(self, arguments, *given)
            return
        self.had_pending |= any(map(self.pending, self.optimizers))
        before = self.created(), self.count("at_use")
        one.call(self, arguments, *given)
        after = self.created(), self.count("at_use")
        self.launched |= after[0] == before[0] and after[1] > before[1]

    @contextlib.contextmanager
    def hooks(self):
        """Behind each gradient in this pass, if a deed is to come there."""
        handles = []
        if self.armed[deed.IN_BACKWARD]:
            used = [p for p in self.params() if p.is_leaf and p.requires_grad]
            handles = [p.register_post_accumulate_grad_hook(self.in_hook) for p in used]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.armed[deed.IN_BACKWARD] = []

    def in_hook(self, p):
        self.hooked = p
        self.do(deed.IN_BACKWARD)
        self.hooked = None

    @contextlib.contextmanager
    def environment(self, **variables):
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def launch(self):
        """Launches pending updates; those of other programs are not looked at."""
        for optimizer in self.optimizers if self.fused else ():
            if is_fused(optimizer) or is_recorded(optimizer):
                optfuse.flush(optimizer)
            elif hasattr(optimizer, "_door"):
                optimizer._door.flush()

    def add_step_hook(self, i, hook):
        self.handles.append(self.optimizer(i).register_step_pre_hook(hook))
        for reference in self.references:
            reference.last()

    def pending(self, optimizer):
        if hasattr(optimizer, "_door"):
            return optimizer._door.pending()
        return optfuse.summary(optimizer).pending if self.mode == "forward" else 0

    def summaries(self):
        """The summary of each optimizer that is fused."""
        fused = self.optimizers if self.is_begun and self.fused else ()
        return [optfuse.summary(o) for o in fused if o is not None and is_fused(o)]

    def created(self):
        """Updates that optfuse has made or is to make."""
        doors = [o._door for o in self.optimizers if hasattr(o, "_door")]
        return self.count("created") + sum(door.created() for door in doors)

    def count(self, what):
        return sum(getattr(summary, what) for summary in self.summaries())

    def promised(self):
        """Whether a gradient was a promise."""
        return any(layer.promised for summary in self.summaries() for layer in summary.promised)

    def go_on(self):
        """After an error that leaves all as it was: what keeps training from going on."""
        self.seen = []
        self.armed = {place: [] for place in deed.ARMED}
        try:
            for i in range(len(self.optimizers)):
                self.step(i)
            for p in self.params():
                p.grad = None
                p.requires_grad_()
            for _ in range(2):
                self.train()
        except Exception as error:
            return str(error)
        return "" if all(p.isfinite().all() for p in self.params()) else "weights are not finite"

    def clean_up(self):
        """After an exception."""
        for reference in self.references:
            reference.put_back()

    def refused(self, call, *words, way_out='mode="forward"'):
        """With ours it must raise optfuse.Error, with these words; with stock it is not called."""
        if self.fused:
            refused(call, *words, way_out=way_out)
            self.has_refused = True

    # ---- observations

    def see(self, what, value):
        self.seen.append((f"{self.label}: {what}", snapshot(comparable(value))))

    def look(self, gradients=True):
        """Everything that stock shows."""
        self.see("weights", [p.detach() for p in self.params()])
        self.see("buffers", [b for m in self.models for b in m.buffers()])
        self.see("state", [o.state_dict() for o in self.optimizers])
        self.see("attributes", [self.attributes(o) for o in self.optimizers])
        if gradients:
            self.see("gradients", [p.grad for p in self.params()])
        self.see_held()

    def attributes(self, optimizer):
        """Those of its own."""
        places = {p: i for i, p in enumerate(self.params())}
        of_pytorch = ("defaults", "param_groups", "state", "step", "ids", "texts")
        of_pytorch += ("step_parameter", "step_param", "supports_fused_back_pass")  # ours
        found = {k: v for k, v in vars(optimizer).items() if k[0] != "_" and k not in of_pytorch}
        found["log"] = getattr(optimizer, "log", [])
        return {name: plain(value, places) for name, value in found.items()}

    def see_held(self):
        for what, value in self.held:
            self.see(f"held {what}", torch.as_tensor(value))

    def replace(self, models, optimizers):
        """Goes on with copies; what belonged to the originals is left behind."""
        self.models, self.optimizers = models, optimizers
        self.schedulers.clear()
        self.handles.clear()
