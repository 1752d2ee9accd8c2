# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that a traced step() keeps in the state, as tensors without dimensions, and computes
with: each instruction has them as one number for all elements, in branches that no trial met, too.
docs/traced.md"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import traced_programs
from test_traced_recorder import recorded_of
from torch import Tensor, nn
from torch.optim import Optimizer

import optfuse
from optfuse._library.bindings import Error
from optfuse._link import link_of
from optfuse._traced.guide import Place
from optfuse._traced.parts import Parts
from optfuse._traced.program import NAMES, TEMPORARY, Program, make_program
from optfuse._traced.standin import Later, Untraceable
from optfuse._trials.compare import difference

MODES = ("forward", "backward")
# How the state begins, and a line of step().
PLAIN = [
    ("g.norm()", "t = torch.where(g > s, s, g); t = torch.rsub(t, s); p.add_(t, alpha=-lr)"),
    ("g.norm()", "t = torch.rsub(g, s); p.add_(t, alpha=-lr)"),
    ("g.norm()", "t = s - g; p.add_(t, alpha=-lr)"),
    ("g.norm()", "t = torch.where(g > s, s, g); p.add_(t, alpha=-lr)"),
    ("p.new_zeros(())", "t = s + g; p.lerp_(t, lr)"),
    ("p.new_zeros(())", "t = s + torch.zeros_like(p); p.lerp_(t, lr)"),
    ("torch.zeros_like(p)", "p.lerp_(s, lr)"),
    ("torch.zeros_like(p)", "p.copy_(p); p.lerp_(s, lr)"),
]
NUMBERS = ("g.norm()", "p.new_zeros(())", "p.new_ones(()) * 3")
LATE = [
    "t = s - g; p.add_(t, alpha=-lr)",
    "t = torch.rsub(g, s); p.add_(t, alpha=-lr)",
    "t = torch.where(g > s, s, g); p.add_(t, alpha=-lr)",
    "t = s + g; p.lerp_(t, lr)",
    "p.lerp_(s, lr)",
]


def class_of(init: str, body: str, late: int = 0) -> type[Optimizer]:
    source = f"""
@torch.no_grad()
def step(self, closure=None):
    for group in self.param_groups:
        lr = group["lr"]
        for p in group["params"]:
            if p.grad is None:
                continue
            g, state = p.grad, self.state[p]
            if not state:
                state["c"], state["s"] = 0, {init}
            state["c"] += 1
            s = state["s"]
            if state["c"] > {late}:
                {body}
            else:
                p.add_(g, alpha=-lr)
"""
    return traced_programs.class_of(source, f"<{init} {body} {late}>")


def train(cls: type[Optimizer], shapes: Any, steps: int, mode: str | None) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer: Optimizer = cls(params)  # type: ignore[call-arg]
    if mode is not None:
        optfuse.fuse(optimizer, mode=mode)
        traced = link_of(optimizer).traced
        assert traced is not None
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([p.square().sum() for p in params]).sum().backward()
        optimizer.step()
    assert mode is None or not traced.untraced
    return [[p.detach().clone() for p in params], [optimizer.state[p] for p in params]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("init, body", PLAIN)
def test_they_are_traced(init: str, body: str, mode: str) -> None:
    cls = class_of(init, body)
    shapes = ((4, 3), (100,))
    ours = train(cls, shapes, 5, mode)
    assert difference("", ours, train(cls, shapes, 5, None)) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("init", NUMBERS)
@pytest.mark.parametrize("body", LATE)
def test_branches_that_begin_after_the_trial(init: str, body: str, mode: str) -> None:
    cls = class_of(init, body, late=50)
    shapes = ((5,), (100,), (5000,))
    ours = train(cls, shapes, 55, mode)
    assert difference("", ours, train(cls, shapes, 55, None)) is None


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    """Thousands were played, also under sanitizers; these are a sample."""
    word = traced_programs.play(seed)
    assert not word.startswith(("different", "error")), word


# ---- the program's constructor


def test_a_number_makes_a_program_of_parts() -> None:
    """Plain programs have their numbers in them, and can't wait for one."""

    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        p.sub_(state["s"])

    entry = {"s": Place(0, None, ((), ()))}
    program = recorded_of(update, entry, ("s",)).program
    assert isinstance(program, Parts)
    assert isinstance(recorded_of(lambda o, g, p, s: p.sub_(1.0), None).program, Program)


def test_a_line_of_tensors_of_different_sizes_is_no_program() -> None:
    line = ("add", 0, 0, 2, 0, 1.0, 0.0)
    make_program([line], frozenset(), 1)
    with pytest.raises(Untraceable, match="different sizes"):
        make_program([line], frozenset(), 1, frozenset({2}))


def set_program(code: list[int], numbers: list[Any]) -> None:
    optimizer = optfuse.fuse(class_of("g.norm()", "p.add_(g)")([nn.Parameter(torch.ones(9))]))
    torch.ops.optfuse.set_program(link_of(optimizer).plan, 0, [0], code, numbers)


def set_parts(forms: list[int], code: list[int]) -> None:
    optimizer = optfuse.fuse(class_of("g.norm()", "p.add_(g)")([nn.Parameter(torch.ones(9))]))
    plan = link_of(optimizer).plan
    torch.ops.optfuse.set_program_with_calls(
        plan, 0, [0], 10, 0b101, 0b1, forms, [], code, [1.0, 0.0]
    )


def test_the_library_takes_no_number_that_is_not_known() -> None:
    code = [NAMES.index("add_number"), 0, 0, 0, 0]
    set_program(code, [1.0, 0.0])
    with pytest.raises(RuntimeError):
        set_program(code, [Later(2), 0.0])


def test_the_library_refuses_a_segment_of_tensors_of_different_sizes() -> None:
    # A segment with two registers in memory, the parameter and state 0; no patches; one line.
    memory = [0, 2, *(TEMPORARY - 2) * [-1]]
    segment = [0, *memory, 0, 0, 1, NAMES.index("add"), 0, 0, 1, 0, 0]
    float32 = 6
    set_parts([], segment)
    with pytest.raises(Error, match="different numbers of elements"):
        set_parts([0, float32, 0], segment)


def test_the_library_refuses_a_branch_that_leads_beyond_the_end() -> None:
    nothing_freed = 0
    set_parts([], [2, 0, 0, nothing_freed])
    for skipped in (1, -1, 1 << 40):
        with pytest.raises(Error, match="beyond its end"):
            set_parts([], [2, 0, skipped, nothing_freed])
