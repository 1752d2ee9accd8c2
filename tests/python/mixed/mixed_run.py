# SPDX-License-Identifier: BSD-3-Clause
"""Plays a program, by stock or fused, and notes all that is seen."""

import copy
import io
import threading

import torch
from common import snapshot
from mixed_models import HAVE_ATTRIBUTES, IGNORES_STRIDES, OPTIMIZERS, WIDTH, Plain, Shared
from pytorchs_own import pytorchs_own
from torch import nn
from torch.nn import utils
from torch.optim.swa_utils import AveragedModel

import optfuse


class Run:
    """One play of a program: by stock, or fused."""

    def __init__(self, program, fused):
        self.p, self.fused = program, fused
        self.seen = []
        self.turns = program.optimizer not in IGNORES_STRIDES
        self.has_attributes = program.optimizer in HAVE_ATTRIBUTES
        self.kept = []
        self.saved = None
        self.reordering = None
        torch.manual_seed(program.seed)
        self.model = program.model().to(program.dtype)
        params = list(self.model.parameters())
        groups = [{"params": params}]
        if program.groups == 2:
            groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.03}]
        self.optimizer = OPTIMIZERS[program.optimizer](groups)
        self.averaged = AveragedModel(self.model, **program.averages())

    def see(self, what, value):
        self.seen.append((what, snapshot(value)))

    def look(self, what):
        self.see(f"{what}: weights", [p.detach() for p in self.model.parameters()])
        self.see(f"{what}: state", self.optimizer.state_dict())

    def param(self, pick):
        params = list(self.model.parameters())
        return params[pick % len(params)]

    def with_gradient(self, pick):
        params = [p for p in self.model.parameters() if p.grad is not None]
        return params[pick % len(params)] if params else None

    # ---- actions

    def fuse(self):
        if not self.fused:
            return
        mode = optfuse.Forward()
        if self.p.mode == "backward":
            mode = optfuse.Backward(accumulate=self.p.passes)
        optfuse.fuse(self.optimizer, mode, bucket_bytes=self.p.bucket_bytes)

    def is_fused(self):
        return self.fused and hasattr(self.optimizer, "_optfuse_link")

    def before(self, what, step):
        pick = step["pick"]
        # unfuse() leaves None where there were gradients that backward mode has used.
        can_unfuse = self.p.mode == "forward" or self.p.set_to_none
        if what == "unfuse and fuse" and self.fused and self.begun and can_unfuse:
            optfuse.unfuse(self.optimizer)
            self.fuse()
        elif what == "reorder":
            self.reorder(step["how"])
        elif what == "deepcopy":
            self.stop_reordering()
            both = copy.deepcopy((self.model, self.optimizer, self.averaged))
            self.model, self.optimizer, self.averaged = both
        elif what == "pickle" and not self.has_attributes:
            self.stop_reordering()
            memory = io.BytesIO()
            torch.save((self.model, self.optimizer), memory)
            memory.seek(0)
            self.model, self.optimizer = torch.load(memory, weights_only=False)
            if self.begun:
                self.fuse()
        elif what == "save":
            self.saved = copy.deepcopy(self.optimizer.state_dict())
        elif what == "load" and self.saved is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self.saved))
        elif what == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        elif what == "freeze":
            p = self.param(pick)
            p.requires_grad_(not p.requires_grad)
            p.grad = None
        elif what == "empty state":
            self.optimizer.state.clear()
        elif what == "set state":
            for p in self.model.parameters():
                for key, value in self.optimizer.state.get(p, {}).items():
                    if torch.is_tensor(value):
                        self.optimizer.state[p][key] = value.clone()
        elif what == "new group":
            extra = nn.Parameter(torch.ones(3, dtype=self.p.dtype))
            self.model.register_parameter(f"extra{len(self.optimizer.param_groups)}", extra)
            self.optimizer.add_param_group({"params": [extra]})
            self.averaged = AveragedModel(self.model, **self.p.averages())
        elif what == "turn" and self.turns:
            p = self.param(pick)
            if p.dim() == 2:
                p.data = p.data.t().contiguous().t()

    def stop_reordering(self):
        if self.reordering is not None:
            self.reordering.remove()
            self.reordering = None

    def reorder(self, how):
        """The bits are stock's in any order."""
        if not self.fused:
            return
        if self.reordering is not None:
            self.stop_reordering()
            return
        options = {"reverse_first": {"k": 1}, "budget": {"memory": 1 << 20}}.get(how, {})
        if how == "auto":
            options = {"network": (0.0, 1e-6)}
        self.reordering = optfuse.reorder(self.model, how, **options)

    def inputs(self, i, n):
        random = torch.Generator().manual_seed(1000 * i + n)
        return torch.randn(self.p.rows, WIDTH, generator=random).to(self.p.dtype)

    def loss(self, kind, part, x):
        model = self.model
        if kind == "functional":
            named = {name: p * 1.0 for name, p in model.named_parameters()}
            out = torch.func.functional_call(model, named, (x, part), tie_weights=True)
        elif kind == "vmap" and type(model) in (Plain, Shared):
            out = torch.vmap(lambda row: model(row, part))(x)
        elif kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16, enabled=self.p.dtype == torch.float32):
                out = model(x, part).to(self.p.dtype)
        else:
            out = model(x, part)
        if kind == "hook on output" and out.requires_grad:
            out.register_hook(lambda g: g.mul_(2) if g.is_contiguous() else g * 2)
        loss = out.square().mean()
        for name, p in model.named_parameters():
            if name.startswith("extra"):
                loss = loss + p.square().sum()
        return loss

    def one_pass(self, i, n, kind, part, how):
        x = self.inputs(i, n)
        if kind == "penalty":
            x.requires_grad_()
            loss = self.loss(kind, part, x)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        elif kind == "gradients first":
            loss = self.loss(kind, part, x)
            params = [p for p in self.model.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            self.see("gradients by themselves", [g for g in found if g is not None])
        else:
            loss = self.loss(kind, part, x)
        if not loss.requires_grad:
            return
        if how == "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif how == "create graph":
            loss.backward(create_graph=True)
        elif how == "thread":
            self.in_a_thread(loss.backward)
        else:
            loss.backward()
        self.see("loss", loss)

    def hook(self, what, pick):
        p = self.param(pick)
        if not p.requires_grad:
            return None
        kept, turns = self.kept, self.turns

        def after(param):
            if what == "after: in place":
                param.grad.mul_(0.5)
            elif what == "after: add to itself":
                param.grad.add_(param.grad)
            elif what == "after: turned" and param.dim() == 2 and turns:
                param.grad = param.grad.t().contiguous().t()
            elif what == "after: keep":
                kept[:] = [param.grad]

        if what.startswith("after"):
            return p.register_post_accumulate_grad_hook(after)
        before = {
            "double": lambda g: g * 2,
            "add to itself": lambda g: g + g,
            "in place": lambda g: g.mul_(3) if g.is_contiguous() else g,
            "new": lambda g: torch.ones_like(g),
        }
        return p.register_hook(before[what]) if what else None

    def between(self, what, pick):
        params = [p for p in self.model.parameters() if p.grad is not None]
        p = self.with_gradient(pick)
        if p is None:
            return
        if what == "clip":
            self.see("norm", utils.clip_grad_norm_(self.model.parameters(), 0.01))
        elif what == "clip twice":
            self.see("norm", utils.clip_grad_norm_(params, 0.05))
            self.see("norm", utils.clip_grad_norm_(params, 0.01))
        elif what == "clip doubled":
            self.see("norm", utils.clip_grad_norm_([*params, params[0]], 0.01))
        elif what == "clip some":
            self.see("norm", utils.clip_grad_norm_(params[::2], 0.01, error_if_nonfinite=True))
        elif what == "clip other norm":
            self.see(
                "norm", utils.clip_grad_norm_(params, 0.01, (1.0, 3.0, float("inf"))[pick % 3])
            )
        elif what == "clip values":
            utils.clip_grad_value_(params, 1e-3)
        elif what == "clip with norm":
            norm = utils.get_total_norm([q.grad for q in params])
            utils.clip_grads_with_norm_(params, 0.01, norm)
            self.see("norm", norm)
        elif what == "look":
            self.see("gradients", [q.grad for q in params])
        elif what == "write":
            p.grad.mul_(0.5)
        elif what == "add to itself":
            p.grad.add_(p.grad)
        elif what == "turned" and p.dim() == 2 and self.turns:
            p.grad = p.grad.t().contiguous().t()
        elif what == "swap":
            p.grad = p.grad.clone()
        elif what in ("of another", "is state"):
            self.take_memory(what, p, pick)
        elif what == "drop one":
            p.grad = None
        elif what == "deepcopy":
            self.see("copy", [q.grad for q in copy.deepcopy(self.model).parameters()])

    def take_memory(self, what, p, pick):
        """The gradient is another parameter, or its state; perhaps by other strides."""
        others = [q for q in self.model.parameters() if q is not p]
        q = others[pick % len(others)]
        found = [q.detach()]
        if what == "is state":
            entry = self.optimizer.state.get(q, {})
            found = [t for t in entry.values() if torch.is_tensor(t) and t.dim()]
        for t in found[:1]:
            if t.shape == p.shape:
                p.grad = t.detach() if pick % 2 else t
            elif t.numel() == p.numel() and p.dim() == 2 and t.is_contiguous() and self.turns:
                p.grad = t.view(p.shape[1], p.shape[0]).t()
            if pick % 3 == 0 and p.dim() == 2 and p.shape[0] == p.shape[1] and self.turns:
                p.grad = p.grad.t()

    def average(self):
        if self.fused:
            self.averaged.update_parameters(self.model)
            return
        with pytorchs_own():
            self.averaged.update_parameters(self.model)

    def after(self, what, pick):
        p = self.param(pick)
        if what.startswith("average"):
            for _ in range(2 if what == "average twice" else 1):
                self.average()
        elif what == "another thread":
            self.in_a_thread(lambda: self.see("weight", p.detach()))
        elif what == "look":
            self.look("in between")
        elif what == "look at average":
            self.see("average", [a.detach() for a in self.averaged.parameters()])
        elif what == "look at state":
            self.see("state", [*self.optimizer.state.values()])
        elif what == "flush" and self.is_fused():
            self.in_a_thread(lambda: optfuse.flush(self.optimizer))
        elif what == "write weight":
            with torch.no_grad():
                p.mul_(0.9)
        elif what == "alias":
            self.kept[:] = [p.detach()]
        elif what == "gradient":
            self.see("gradients", [q.grad for q in self.model.parameters()])
        elif what == "step again":
            self.optimizer.step()
        elif what == "swap weights":
            self.model.load_state_dict({k: v * 1.5 for k, v in self.model.state_dict().items()})

    @staticmethod
    def in_a_thread(call):
        raised = []

        def catching():
            try:
                call()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=catching)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    # ---- the program

    def play(self):
        """An optimizer of a class that stock refuses, or that can't be fused, ends it."""
        self.begun = False
        try:
            for i, step in enumerate(self.p.steps):
                if i == self.p.fused_from:
                    self.begun = True
                    self.fuse()
                self.iteration(i, step)
            self.end = "equal"
        except optfuse.Error as error:
            self.end = f"raised: {error}"
        except Exception as error:
            self.end = f"error: {type(error).__name__}: {error}"
        finally:
            self.stop_reordering()
        return self

    def iteration(self, i, step):
        for what in step["before"]:
            self.before(what, step)
        self.optimizer.zero_grad(self.p.set_to_none)
        handle = self.hook(step["hook"], step["pick"])
        for n, (kind, part, how) in enumerate(step["passes"]):
            self.one_pass(i, n, kind, part, how)
        if handle is not None:
            handle.remove()
        for what in step["between"]:
            self.between(what, step["pick"])
        self.optimizer.step()
        for what in step["after"]:
            self.after(what, step["pick"])
        self.see("kept", [k.detach() for k in self.kept])
        if i % 3 == 2 or i == len(self.p.steps) - 1:
            self.look(f"step {i}")
            self.see("averages", [a.detach() for a in self.averaged.parameters()])
        self.kept = []
