# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() is drawn from a seed: statements on tensors of the parameter's shape, on
tensors without dimensions, on numbers; state, options of every kind, counters, conditions, looks,
coupling."""

from __future__ import annotations

import enum
import random
import types
from typing import Any

import torch

# x, y, z: names of tensors; n: a number or an expression of one; s: a tensor without dimensions.
TENSORS = (
    "{x} = {y} + {z}",
    "{x} = {y} * {n}",
    "{x} = {y} * {z}",
    "{x} = {y} - {z} * {n}",
    "{x} = {n} - {y}",
    "{x} = {y} / ({z}.abs() + 1)",
    "{x} = {y}.clone()",
    "{x} = {y}.abs().sqrt()",
    "{x} = {y}.square()",
    "{x} = {y}.sign()",
    "{x} = -{y}",
    "{x} = {y}.tanh()",
    "{x} = {y}.clamp(-1, {n} + 1)",
    "{x} = torch.maximum({y}, {z})",
    "{x} = torch.where({y} > {z}, {y}, {z} * {n})",
    "{x} = {y}.lerp({z}, {n})",
    "{x} = torch.addcmul({y}, {z}, {y}, value={n})",
    "{x} = torch.addcdiv({y}, {z}, {y}.abs() + 1, value={n})",
    "{x} = {y}.detach()",
    "{x} = {y}.data * 1",
    "{x} = torch.zeros_like({y}).add_({z})",
    "{x} = torch.empty_like({y}).copy_({z})",
    "{x} = ({y} > 0).to({y}.dtype)",
    "{x} = torch.randn_like({y}) * 0.01",
    "{x} = {y} * ({y} * {z} > 0)",
    "{x} = torch.nan_to_num({y})",
    "{x} = {y}.pow(3)",
    "{x} = {y}.softmax(0) if {y}.dim() else {y}",
    "{x} = {y}.flip(0) if {y}.dim() else {y}",
    "{x} = torch.stack([{y}, {z}]).mean(0)",
    "{x} = {y}.double().mul({n}).to({z}.dtype)",
)
IN_PLACE = (
    "{x}.mul_({n})",
    "{x}.add_({y}, alpha={n})",
    "{x}.sub_({y} * {n})",
    "{x}.lerp_({y}, {n})",
    "{x}.addcmul_({y}, {z}, value={n})",
    "{x}.addcdiv_({y}, {z}.square() + 1, value={n})",
    "{x}.copy_({y})",
    "{x}.fill_({n})",
    "{x}.zero_()",
    "{x}.clamp_(min={n})",
    "{x}.masked_fill_({y} > {n}, 0.25)",
    "{x}.view(-1)[::2].mul_({n})",
    "{x}.view(-1)[1:].add_({y}.reshape(-1)[1:], alpha={n})",
    "{x}.data.mul_({n})",
    "{x}.mul_({s})",
    "{x}.add_({s})",
    "{x}.div_({s} + 1)",
    "{x} /= {s}.abs() + 1",
    "{x}.div_({y}.norm() + 1)",
    "torch._foreach_mul_([{x}, {y}], {n})",
    "torch._foreach_add_([{x}, {y}], [{z}, {z} * 2], alpha={n})",
    "torch.mul({y}, {n}, out={x})",
    "{x}.data = {y} * {n}",
    "{x}.bernoulli_(0.5)",
    "{x}.numpy()[...] *= 0.5",
    "{x}.sort(0)",
    "{x}[{x} > 1] = 1",
    "np.multiply({x}.numpy(), 0.5, out={x}.numpy())",
)
POINTS = (
    "{s} = {x}.norm()",
    "{s} = {x}.sum()",
    "{s} = {x}.mean().abs()",
    "{s} = ({x} * {y}).sum()",
    "{s} = {x}.abs().max()",
    "{s} = {s} * 0.5",
    "{s} = torch.tensor({n})",
    "{s} = {s}.clone().add_(1)",
    "{s} = shared['sum']",
    "shared['sum'] = shared['sum'] + {x}.sum() * 0.01",
    "shared['sum'].mul_(0.9)",
)
LOOKS = (
    "log.append({s}.item())",
    "if {s} > 0.5: {x}.mul_(0.5)",
    "if bool(({x} > 0).any()): {x}.sub_(0.01)",
    "log.append({x}.tolist())",
    "log.append(float({x}.view(-1)[0]))",
    "log.append({x}.numpy().sum().item())",
    "log.append(torch.equal({x}, {y}))",
    "log.append(int({x}.argmax()))",
    "log.append({x}.nonzero().numel())",
    "log.append({x}._version)",
)
STATE = (
    "st['a'] = {x}",
    "st['b'].copy_({x})",
    "st['b'] = st['b'] * 0.9 + {x}",
    "st['b'].lerp_({x}, 0.1)",
    "st['n'] += 1; {x}.mul_(1 / st['n'])",
    "st['t'] += 1; {x}.mul_(1 / st['t'])",
    "st['t'].add_(1); {x}.div_(st['t'])",
    "st['list'].append({x}.clone()); {x}.add_(st['list'].pop(0) if len(st['list']) > 3 else 0)",
    "{x} = st['b']",
    "{x} = st.get('a', {y})",
)
CONDITIONS = (
    "",
    "",
    "",
    "if self.n % 3 == 0: ",
    "if i % 2: ",
    "if i == len(group['params']) - 1: ",
    "if gi: ",
    "if group['flag']: ",
    "if self.kind is Kind.SECOND: ",
    "if counts['all'] > 7: ",
    "if p.dim() > 1: ",
    "if p.numel() > 20: ",
    "if group is self.param_groups[0]: ",
)
NUMBERS = (
    "0.5",
    "0.9",
    "-0.01",
    "1",
    "2",
    "lr",
    "-lr",
    "group['lr'] ** 0.5",
    "(1 - 0.9 ** self.n)",
    "self.options['scale']",
    "self.other.rate",
    "helper(self.n)",
    "1 / len(group['params'])",
    "self.param_groups[0]['lr']",
    "0.1 * gi",
    "group['tensor']",
)
END = (
    "p.add_({x}.nan_to_num(0, 1, -1).clamp(-1, 1), alpha=-lr)",
    "p.data.add_({x}.nan_to_num(0, 1, -1).clamp(-1, 1), alpha=-lr)",
    "p.copy_(p - {x}.nan_to_num(0, 1, -1).clamp(-1, 1) * lr)",
    "p.data = p.data - lr * {x}.nan_to_num(0, 1, -1).clamp(-1, 1)",
    "p.sub_(g, alpha=lr)",
)


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


def source(seed: int) -> str:
    """That of a function step(self, closure) with the names that make() gives it."""
    draw = random.Random(seed)

    def statement() -> str:
        kind = draw.choices(
            (TENSORS, IN_PLACE, POINTS, LOOKS, STATE), (8, 8, 3, draw.choice((0, 0, 1, 3)), 3)
        )[0]
        form = draw.choice(kind)
        condition = draw.choice(CONDITIONS) if not form.startswith("if ") else ""
        if form.startswith("{x} = ") and kind is not STATE and draw.random() < 0.3:
            condition = ""
        names = {
            "x": draw.choice("abcg"),
            "y": draw.choice("abcgp"),
            "z": draw.choice("abcg"),
            "s": draw.choice(("s", "q")),
            "n": draw.choice(NUMBERS),
        }
        return condition + form.format(**names)

    body = [statement() for _ in range(draw.randint(2, 14))]
    end = draw.choice(END).format(x=draw.choice("abcg"))
    closure = draw.choice(("loss = closure()", "loss = closure(); loss = closure()"))
    lines = [
        "def step(self, closure=None):",
        "    loss = None",
        "    if closure is not None:",
        f"        with torch.enable_grad(): {closure}",
        "    self.n += 1",
        "    counts['all'] += 1",
        "    for gi, group in enumerate(self.param_groups):",
        "        lr = group['lr']",
        "        for i, p in enumerate(group['params']):",
        "            if p.grad is None: continue",
        "            g = p.grad; st = self.state[p]",
        "            if not st: st.update(b=p.detach() * 0, t=torch.tensor(0.0), n=0, list=[])",
        "            a = g * 1.0; b = g; c = g.clone(); s = torch.tensor(0.5); q = g.abs().mean()",
        *("            " + x for x in body),
        "            " + end,
    ]
    lines.append("    " + draw.choice(("return loss", "return loss", "return {'n': self.n}")))
    return "\n".join(lines)


def make(seed: int) -> type[torch.optim.Optimizer]:
    """A new class, with counters and other objects of its own."""
    import numpy as np

    draw = random.Random(seed + 1)
    helpers = types.ModuleType("helpers")
    exec("def helper(n): return 1 / (1 + n)", vars(helpers))
    names: dict[str, Any] = {
        "torch": torch,
        "np": np,
        "Kind": Kind,
        "helper": helpers.helper,
        "counts": {"all": 0},
        "shared": {"sum": torch.tensor(0.25)},
        "log": [],
    }
    exec(compile(source(seed), f"<seed {seed}>", "exec"), names)
    step = torch.no_grad()(names["step"]) if draw.random() < 0.8 else names["step"]
    in_slots = draw.random() < 0.3

    class Drawn(torch.optim.Optimizer):
        if in_slots:
            __slots__ = ("n",)
        log = names["log"]

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr, "flag": True, "tensor": torch.tensor(0.5)})
            self.n = 0
            self.kind = Kind.SECOND if draw.random() < 0.5 else Kind.FIRST
            self.options = {"scale": 0.75}
            self.other = types.SimpleNamespace(rate=0.3)

    Drawn.step = step  # type: ignore[assignment, method-assign]
    return Drawn
