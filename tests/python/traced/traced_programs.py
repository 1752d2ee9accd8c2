# SPDX-License-Identifier: BSD-3-Clause
"""Random step()s that compute with numbers of their state (tensors without dimensions), and whose
branches begin at steps 1, 21 and 41, the last two of which no trial has met. Run as a script it
plays many: python traced_programs.py FIRST N."""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import optfuse
from optfuse._link import link_of
from optfuse._trials.compare import difference

STEPS = 44
LATE = (0, 20, 40)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (1,), (5,), (16,), (3, 4), (37,), (9, 130))

# x, y, z: tensors of the parameter's shape; s: a number of the state; n: one of Python's.
NUMBERS = ("g.norm()", "p.new_zeros(())", "p.new_ones(()) * 3", "g.abs().sum()", "p.mean()")
TENSORS = ("torch.zeros_like(p)", "g.clone()", "torch.full_like(p, 0.5)")
MAKE = (
    *("{s} - {x}", "torch.rsub({x}, {s})", "{s} + {x}", "{x} - {s}", "{x} * {s}", "{s} * {x}"),
    *("{x} / ({s} + 1)", "{s} / ({x}.abs() + 1)", "torch.add({s}, {x}, alpha={n})"),
    *("torch.add({x}, {s}, alpha={n})", "torch.where({x} > {s}, {s}, {x})", "-{s} + {x}"),
    *("torch.where({x} > {y}, {s}, {y})", "torch.where({x} >= 0, {x}, {s})", "{x}.clamp(max={s})"),
    *("torch.maximum({x}, {s})", "torch.lerp({x}, {y}, {n})", "torch.lerp({x}, {y}, {s})"),
    *("{x}.addcmul({y}, {z}, value={n})", "{x}.masked_fill({y} > 0, {s})", "({x} > {s}).to(p)"),
    *("{x}.lerp({s}, {n})", "torch.full_like({x}, {n})", "{x} * {n} + {y}", "{x}.sign() * {s}"),
    *("torch.where({x} == {s}, {n}, {x})", "{x} / {s}", "{s}.sqrt() - {x}", "{x} - {y}.norm()"),
)
WRITE = (
    *("{m}.mul_({s})", "{m}.add_({x}, alpha={n})", "{m}.lerp_({x}, {n})", "{m}.copy_({x})"),
    *("{m}.fill_({s})", "{m}.sub_({s})", "{m}.div_({s} + 1)", "{m}.copy_({s})"),
    *("{s}.mul_(0.9).add_(0.1)", "{s}.copy_({x}.norm())", "{s}.fill_({n})", "{s}.add_({s})"),
    *("{m}.copy_({s} - {m})", "{m}.lerp_({s}, {n})", "{m}[{x} > {s}] = {n}"),
)


@dataclass
class Program:
    source: str
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    late: int
    seed: int


def _lines(draw: random.Random) -> list[str]:
    """The lines of a branch."""
    known, lines = ["p", "g", 'st["m"]', 'st["w"]'], []

    def names() -> dict[str, str]:
        x, y, z = (draw.choice(known) for _ in range(3))
        s = draw.choice(('st["s"]', 'st["r"]'))
        n = draw.choice(("0.1", "-0.5", "1.0", "2", "lr", 'st["c"] / 10'))
        return {"x": x, "y": y, "z": z, "s": s, "n": n, "m": draw.choice(known[2:4])}

    for i in range(draw.randint(1, 5)):
        if draw.random() < 0.6:
            lines.append(f"t{i} = {draw.choice(MAKE).format(**names())}")
            known.append(f"t{i}")
        else:
            lines.append(draw.choice(WRITE).format(**names()))
    lines.append(f"p.add_({known[-1]}.clamp(-1, 1), alpha=-lr)")
    return lines


def drawn(seed: int) -> Program:
    draw = random.Random(seed)
    late = LATE[seed % len(LATE)]
    indent = "\n" + 16 * " "
    early = ["p.add_(g, alpha=-lr)"] if draw.random() < 0.6 else _lines(draw)
    source = f"""
@torch.no_grad()
def step(self, closure=None):
    for group in self.param_groups:
        lr = group["lr"]
        for p in group["params"]:
            if p.grad is None:
                continue
            g, st = p.grad, self.state[p]
            if not st:
                st["c"] = 0
                st["s"] = {draw.choice(NUMBERS)}
                st["m"] = {draw.choice(TENSORS)}
                st["r"] = {draw.choice(NUMBERS)}
                st["w"] = {draw.choice(TENSORS)}
            st["c"] += 1
            if st["c"] > {late}:
                {indent.join(_lines(draw))}
            else:
                {indent.join(early)}
"""
    shapes = draw.sample(SHAPES, draw.randint(1, 3))
    return Program(source, shapes, draw.choice(DTYPES), late, seed)


def class_of(source: str, name: str) -> type[Optimizer]:
    """With a step() whose code can be looked at."""
    made: dict[str, Any] = {"torch": torch}
    exec(compile(source, name, "exec"), made)
    linecache.cache[name] = (1, None, source.splitlines(True), name)

    def init(self: Any, params: Any) -> None:
        Optimizer.__init__(self, params, {"lr": 1e-2})

    return type("Drawn", (Optimizer,), {"__init__": init, "step": made["step"]})


def trained(program: Program, cls: type[Optimizer], mode: str | None) -> Any:
    random = torch.Generator().manual_seed(program.seed)
    params = [
        nn.Parameter(torch.randn(shape, generator=random).to(program.dtype))
        for shape in program.shapes
    ]
    optimizer: Optimizer = cls(params)  # type: ignore[call-arg]
    if mode is not None:
        optfuse.fuse(optimizer, mode=mode)
    for _ in range(STEPS):
        optimizer.zero_grad()
        weights = [torch.randn(p.shape, generator=random).to(p.dtype) for p in params]
        torch.stack([(p * w).sum() for p, w in zip(params, weights, strict=True)]).sum().backward()
        optimizer.step()
    entries = [optimizer.state[p] for p in params]
    untraced = 0 if mode is None else link_of(optimizer).traced.untraced  # type: ignore[union-attr]
    return [[p.detach().clone() for p in params], entries], untraced


def play(seed: int) -> str:
    """How it went: equal, refused, or what stock says."""
    program = drawn(seed)
    cls = class_of(program.source, f"<program {seed}>")
    try:
        stock, _ = trained(program, cls, None)
    except RuntimeError as error:
        return f"stock: {type(error).__name__}"
    words = set()
    for mode in ("forward", "backward"):
        try:
            ours, untraced = trained(program, cls, mode)
        except optfuse.Error as error:
            words.add("refused" if "can't be traced" in str(error) else f"error: {error}")
            continue
        place = difference("", ours, stock)
        if place is not None:
            return f"different: {mode}, {place}\n{program}\n{program.source}"
        words.add("equal, own steps" if untraced else "equal")
    return " and ".join(sorted(words))


def main() -> None:
    torch.set_num_threads(1)
    first, n = map(int, sys.argv[1:])
    found: Counter[str] = Counter()
    for seed in range(first, first + n):
        word = play(seed)
        found[word] += 1
        if word.startswith(("different", "error")):
            print(seed, word, flush=True)
        if (seed + 1 - first) % 100 == 0:
            print(seed + 1 - first, "played", flush=True)
    for word, count in found.most_common():
        print(count, word.splitlines()[0])


if __name__ == "__main__":
    main()
