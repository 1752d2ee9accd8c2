# SPDX-License-Identifier: BSD-3-Clause
"""The objects that a program acts on: models, optimizers and what it holds. There is one
world for each run, and all worlds of a program go through the same states."""

import torch
from common import snapshot
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import optfuse
from hazard.models import LEAVE_OUT, MODELS, inputs
from hazard.reference import FUSED, Dense


def comparable(value):
    """NaN equals NaN, and sparse tensors are compared by what they stand for."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if torch.is_tensor(value):
        return value.detach().to_dense() if value.is_sparse else value
    return [comparable(v) for v in value] if type(value) in (list, tuple) else value


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
        # Options of fuse(); stock clips by hand.
        self.passes = setup.get("accumulate", 1)
        self.max_norm = setup.get("max_grad_norm")
        self.bucket_bytes = setup.get("bucket_bytes", 1)
        self.overlapping = "same elements" in self.kinds
        self.optimizers = [self.wrap(self.make(spec)) for spec in setup["optimizers"]]
        self.specs = list(setup["optimizers"])

    # ---- optimizers

    def make(self, spec):
        chosen = self.chosen(spec["over"])
        groups = [{"params": chosen}]
        if spec["groups"] == 2 and len(chosen) > 1:
            groups = [{"params": chosen[::2]}, {"params": chosen[1::2], "lr": 0.03}]
        options = dict(spec["options"])
        if spec["tensor_lr"]:
            options["lr"] = torch.tensor(options["lr"])
        if spec["kind"] in FUSED:
            options["fused"] = True
        return getattr(torch.optim, spec["kind"])(groups, **options)

    def chosen(self, over):
        if over == "last model":
            return list(self.models[-1].parameters())
        params = list(dict.fromkeys(p for m in self.models for p in m.parameters()))
        if over == "first models" and len(self.models) > 1:
            last = set(self.models[-1].parameters())
            return [p for p in params if p not in last]
        return {"even": params[::2], "odd": params[1::2]}.get(over, params)

    def wrap(self, optimizer):
        if self.mode == "stock":
            optimizer._step_supports_amp_scaling = False  # see reference.py
            self.references.append(Dense(optimizer, self.max_norm))
            return optimizer
        mode = optfuse.Forward(max_grad_norm=self.max_norm)
        if self.mode == "backward":
            if self.max_norm is not None:
                raise optfuse.Error("optfuse.Backward() has no max_grad_norm=")
            mode = optfuse.Backward(accumulate=self.passes, ddp=self.ddp)
        return optfuse.fuse(optimizer, mode, bucket_bytes=self.bucket_bytes)

    @property
    def fused(self):
        return self.mode != "stock"

    # ---- what an index means

    def model(self, i):
        return self.models[i % len(self.models)]

    def optimizer(self, i):
        return self.optimizers[i % len(self.optimizers)]

    def params(self):
        return [*dict.fromkeys(p for m in self.models for p in m.parameters()), *self.extra]

    def param(self, i):
        params = self.params()
        return params[i % len(params)]

    def grad(self, i):
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
                    found += [(entry, k) for k, v in entry.items() if torch.is_tensor(v)]
        return found

    def state(self, i):
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
        self.in_backward = True
        self.unsettled.update(range(len(self.optimizers)))
        loss.backward(**options)
        self.in_backward = False

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

    def train(self, loss, set_to_none=True):
        """One iteration of all optimizers; loss: a function, or None for the first model."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        value = loss()
        self.backward(value)
        for i in range(len(self.optimizers)):
            self.step(i)
        self.see("loss", value)

    def launch(self):
        """Launches pending updates; those of other programs are not looked at."""
        for optimizer in self.optimizers if self.fused else ():
            optfuse.flush(optimizer)

    def add_step_hook(self, i, hook):
        self.handles.append(self.optimizer(i).register_step_pre_hook(hook))
        for reference in self.references:
            reference.last()

    def clean_up(self):
        """After an exception."""
        for reference in self.references:
            reference.put_back()

    # ---- observations

    def see(self, what, value):
        self.seen.append((f"{self.label}: {what}", snapshot(comparable(value))))

    def look(self, gradients=True):
        """Everything that stock shows."""
        self.see("weights", [p.detach() for p in self.params()])
        self.see("buffers", [b for m in self.models for b in m.buffers()])
        self.see("state", [o.state_dict() for o in self.optimizers])
        if gradients:
            self.see("gradients", [p.grad for p in self.params()])
        self.see_held()

    def see_held(self):
        for what, value in self.held:
            self.see(f"held {what}", torch.as_tensor(value))

    def replace(self, models, optimizers):
        """Goes on with copies; what belonged to the originals is left behind."""
        self.models, self.optimizers = models, optimizers
        self.schedulers.clear()
        self.handles.clear()
