# SPDX-License-Identifier: BSD-3-Clause
"""Loops of those who fine-tune with a fused back pass, made of parts that are drawn by a seed. The
reference is their own hook: step() of one parameter, then .grad = None. Whatever a part looks at,
also inside backward(), is noted, to be compared."""

from __future__ import annotations

import copy
import os
import random
import traceback

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse

SIZE = 24


class Eager:
    """The hooks that trainers write, of any class: an optimizer for each parameter, which has the
    options and the state of `whole`."""

    def __init__(self, make, groups, accumulate=1):
        self.whole = make(groups)
        self.make, self.accumulate = make, accumulate
        self.passes = 0
        self.steppers = {}
        self.handles = []
        self.attach()

    def attach(self):
        for group in self.whole.param_groups:
            for p in group["params"]:
                if p not in self.steppers:
                    self.steppers[p] = self.make([p])
                    p.register_post_accumulate_grad_hook(self.hook)

    def group_of(self, p):
        groups = self.whole.param_groups
        return next(g for g in groups if any(p is q for q in g["params"]))

    def hook(self, p):
        if (self.passes + 1) % self.accumulate:
            return
        stepper, group = self.steppers[p], self.group_of(p)
        stepper.state = self.whole.state
        stepper.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
        stepper.step()
        p.grad = None

    def end(self):
        self.passes += 1

    def step(self):
        if any(p.grad is not None for g in self.whole.param_groups for p in g["params"]):
            self.whole.step()


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(SIZE, dtype=dtype))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.scale


class Model(nn.Module):
    """how: the checkpoint around each block. twice: the first block is used again at the end."""

    def __init__(self, draw, dtype):
        super().__init__()
        self.how = draw.choice([None, None, "reentrant", "saved"])
        self.twice = draw.random() < 0.3
        self.first = nn.Linear(SIZE, SIZE, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(draw.randint(1, 4)))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.before_block = lambda _: None

    def through(self, i, x):
        def run(x):
            self.before_block(i)
            return self.blocks[i](x)

        if self.how is None:
            return run(x)
        return checkpoint(run, x, use_reentrant=self.how == "reentrant")

    def forward(self, x):
        x = self.first(x)
        for i in range(len(self.blocks)):
            x = self.through(i, x)
        return self.through(0, x) if self.twice else x


def adamw(**options):
    return lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True, **options)


class Factored(torch.optim.Optimizer):
    """A class that nobody knows, with rows and columns as Adafactor has them."""

    def __init__(self, groups, lr=1e-2):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, g = self.state[p], p.grad.float()
                if not state:
                    state["step"] = 0
                    state["rows"] = torch.zeros(g.shape[:-1])
                state["step"] += 1
                state["rows"].lerp_((g * g).mean(-1), 0.1)
                p.sub_((g / (state["rows"].unsqueeze(-1).sqrt() + 1e-3)).to(p.dtype) * group["lr"])


class ByScale(torch.optim.Optimizer):
    """Adafactor as transformers has it, with scale_parameter: a Python max() of a tensor."""

    def __init__(self, groups, lr=1e-2, eps=(1e-30, 1e-3), clip=1.0, decay=-0.8):
        super().__init__(groups, {"lr": lr, "eps": eps, "clip": clip, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(group, p, self.state[p])

    def one(self, group, p, state):
        def rms(tensor):
            return tensor.norm(2) / tensor.numel() ** 0.5

        wide, grad = p.float(), p.grad.float()
        if not state:
            state["step"] = 0
            if grad.dim() > 1:
                state["rows"] = torch.zeros(grad.shape[:-1]).to(grad)
                state["columns"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:]).to(grad)
            else:
                state["square"] = torch.zeros_like(grad)
        state["step"] += 1
        state["RMS"] = rms(wide)
        rate = max(group["eps"][1], state["RMS"]) * min(group["lr"], state["step"] ** -0.5)
        beta = 1.0 - state["step"] ** group["decay"]
        square = grad**2 + group["eps"][0]
        if grad.dim() > 1:
            state["rows"].mul_(beta).add_(square.mean(-1), alpha=1 - beta)
            state["columns"].mul_(beta).add_(square.mean(-2), alpha=1 - beta)
            rows = (state["rows"] / state["rows"].mean(-1, keepdim=True)).rsqrt_()
            update = rows.unsqueeze(-1) * state["columns"].unsqueeze(-2).rsqrt() * grad
        else:
            state["square"].mul_(beta).add_(square, alpha=1 - beta)
            update = state["square"].rsqrt().mul_(grad)
        update.div_((rms(update) / group["clip"]).clamp_(min=1.0)).mul_(rate)
        p.copy_(wide - update)


OPTIMIZERS = {
    "adamw": adamw(),
    "amsgrad": adamw(amsgrad=True, weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, foreach=False),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2, foreach=False),
    "factored": Factored,
    "by scale": ByScale,
    "ours": lambda groups: optfuse.optim.Adafactor(groups, lr=1e-2, relative_step=False),
    "came": lambda groups: optfuse.optim.CAME(groups, lr=1e-2, weight_decay=0.1),
}


WRONG_IN_16_BITS = ("sgd", "momentum")  # stock's fused=True


class Trainer:
    """One training, eager or fused, with the same draws."""

    def __init__(self, seed, fused):
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        self.fused, self.seen = fused, []
        self.kind = draw.choice(sorted(OPTIMIZERS))
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        if self.kind in WRONG_IN_16_BITS:
            self.dtype = torch.float32
        self.model = Model(draw, self.dtype)
        self.slab = draw.random() < 0.2
        if self.slab:
            self.into_slab()
        self.accumulate = draw.choice([1, 1, 1, 2])
        self.calls_step = draw.random() < 0.5
        self.old = []  # memory that a move has left
        self.in_backward = False
        self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.parts = draw.sample(sorted(PARTS), draw.randint(0, 4))
        if os.environ.get("OPTFUSE_TEST_ON") == "fakecuda":  # .data = of what waits can't be played
            self.parts = [part for part in self.parts if part != "move_after_block"]
        self.turn = 0

    def groups(self):
        params = list(self.model.parameters())
        half = self.draw.randint(1, len(params) - 1)
        return [{"params": params[:half]}, {"params": params[half:], "lr": 3e-3}]

    def make_optimizer(self):
        make, groups = OPTIMIZERS[self.kind], self.groups()
        bucket = self.draw.choice([0, 1])
        if not self.fused:
            self.eager = Eager(make, groups, self.accumulate)
            self.optimizer = self.eager.whole
            return
        mode = optfuse.Backward(final=True, accumulate=self.accumulate)
        self.optimizer = optfuse.fuse(make(groups), mode, bucket_bytes=bucket)

    def into_slab(self):
        """All parameters are slices of one memory, as an offloader has them."""
        params = list(self.model.parameters())
        slab = torch.empty(sum(p.numel() for p in params), dtype=self.dtype)
        begin = 0
        for p in params:
            place = slab[begin : begin + p.numel()].view_as(p)
            place.copy_(p.data)
            p.data = place
            begin += p.numel()

    def param(self, n):
        params = list(self.model.parameters())
        return params[n % len(params)]

    def see(self, what, tensor):
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.detach().clone()
        self.seen.append((self.turn, what, tensor))

    def see_state(self, p):
        for key, value in (
            sorted(self.optimizer.state[p].items()) if p in self.optimizer.state else ()
        ):
            self.see(key, value)

    def train(self):
        for part in self.parts:
            if begin := PARTS[part][0]:
                begin(self)
        g = torch.Generator("cpu").manual_seed(5)
        for self.turn in range(6):
            x = torch.randn(5, SIZE, generator=g, device="cpu")
            x = x.to(self.model.first.weight.device, self.dtype).requires_grad_()
            loss = self.model(x).float().square().mean()
            self.in_backward = True
            loss.backward()
            self.in_backward = False
            self.see("loss", loss)
            if not self.fused:
                self.eager.end()
            if (self.turn + 1) % self.accumulate == 0:
                if self.calls_step:
                    self.optimizer.step() if self.fused else self.eager.step()
                    self.optimizer.zero_grad()
                self.scheduler.step()
            for part in self.parts:
                if between := PARTS[part][1]:
                    between(self)
        for p in self.model.parameters():
            self.see("weight", p)
            self.see_state(p)
            self.see("is None", p.grad is None)
        return self.seen


# ---- parts: what is done before the training, and between two iterations


def clip_each(t):
    """A hook in front of the update, or behind the registration of it."""
    for p in t.model.parameters():
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


def clip_by_norm(t):
    """Each gradient by itself, before the update: the eager hook was there first."""
    for p in t.model.parameters():
        if not t.fused:
            p._post_accumulate_grad_hooks.clear()
        p.register_post_accumulate_grad_hook(lambda p: nn.utils.clip_grad_norm_(p, 1e-3) and None)
        if not t.fused:
            p.register_post_accumulate_grad_hook(t.eager.hook)


def look_inside(t):
    """Another weight and its state, while the pass is under way."""
    n = t.draw.randint(0, 9)

    def look(_):
        t.see("inside", t.param(n))
        t.see_state(t.param(n))
        t.see("grad", t.param(n).grad is None)

    t.param(t.draw.randint(0, 9)).register_hook(look)


def data_inside(t):
    """Through .data, as offloaders read."""
    n = t.draw.randint(0, 9)
    t.param(t.draw.randint(0, 9)).register_hook(lambda _: t.see("data", t.param(n).data + 0))


def move(t, p):
    new = torch.empty_like(p)
    new.copy_(p.data)
    old, p.data = p.data, new
    if not t.slab:
        old.fill_(float("nan"))


def move_blocks(t):
    """When a block is computed, in whichever pass, those behind it go elsewhere."""

    def before(i):
        for block in t.model.blocks[i + 1 :]:
            if t.in_backward:
                for p in block.parameters():
                    t.see("grad", p.grad is None)
                    move(t, p)

    if t.accumulate == 1 and not t.model.twice and t.model.how != "saved":
        t.model.before_block = before


def move_after_block(t):
    def moved(block, *_):
        for p in block.parameters():
            move(t, p)

    if t.accumulate == 1:
        t.model.blocks[-1].register_full_backward_hook(moved)


def hold_gradients(t):
    held = t.held = []
    p = t.param(t.draw.randint(0, 9))
    p.register_hook(lambda g: held.append(g))


def see_held(t):
    for g in t.held:
        t.see("held", g)


def replace_state(t):
    """Inside backward, before or behind the update of its parameter."""
    p = t.param(t.draw.randint(0, 9))

    def replace(_):
        entry = t.optimizer.state.get(p, {})
        for key, value in list(entry.items()):
            if isinstance(value, torch.Tensor) and value.dim():
                entry[key] = value * 0.5

    t.param(t.draw.randint(0, 9)).register_hook(replace)


def change_lr_inside(t):
    group = t.optimizer.param_groups[0]

    def change(_):
        group["lr"] = group["lr"] * 0.9

    t.param(t.draw.randint(0, 9)).register_hook(change)


def reload(t):
    if t.turn == 2:
        t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


def set_by_hand(t):
    if t.turn == 3 and t.accumulate == 1:
        p = t.param(1)
        p.grad = torch.full_like(p, 0.25)
        t.optimizer.step()
        t.optimizer.zero_grad()


def evaluate(t):
    with torch.no_grad():
        t.see("output", t.model(torch.ones(2, SIZE, dtype=t.dtype)))


def freeze(t):
    t.param(2).requires_grad_(t.turn % 2 == 0)


PARTS = {
    "clip_by_norm": (clip_by_norm, None),
    "clip_each": (clip_each, None),
    "look_inside": (look_inside, None),
    "data_inside": (data_inside, None),
    "move_blocks": (move_blocks, None),
    "move_after_block": (move_after_block, None),
    "hold_gradients": (hold_gradients, see_held),
    "replace_state": (replace_state, None),
    "change_lr_inside": (change_lr_inside, None),
    "reload": (None, reload),
    "set_by_hand": (None, set_by_hand),
    "evaluate": (None, evaluate),
    "freeze": (None, freeze),
}


def outcome(seed, fused):
    trainer = Trainer(seed, fused)
    try:
        return trainer, trainer.train(), None
    except Exception as error:  # noqa: BLE001 - to be compared
        return trainer, trainer.seen, error


def first_difference(seed):
    """None: equal. Else words."""
    stock, expected, raised = outcome(seed, False)
    ours, got, error = outcome(seed, True)
    about = f"{seed}: {stock.kind} {stock.dtype} {stock.model.how} twice={stock.model.twice} "
    about += f"slab={stock.slab} accumulate={stock.accumulate} step={stock.calls_step} "
    about += str(stock.parts)
    if error is not None and type(error) is not type(raised):
        return f"{about}: " + "".join(traceback.format_exception(error)[-4:])
    if raised is not None and error is None:
        return f"{about}: stock raises {raised!r}"
    for a, b in zip(expected, got, strict=raised is None):
        if a[:2] != b[:2] or not same(a[2], b[2]):
            return f"{about}: {a} {b}"
    return None


def same(a, b):
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
