# SPDX-License-Identifier: BSD-3-Clause
"""Traced optimizers that call PyTorch's operators between segments of a program: norms, means,
views, other dtypes and what else no kernel runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import traced_classes
from test_traced_recorder import recorded_of
from torch import Tensor, nn
from traced_classes import Base, beside_stock

import optfuse
from optfuse._link import link_of
from optfuse._traced.parts import Parts

Formula = Callable[[Tensor, Tensor], Any]

# Functions of a parameter p and its gradient g, a matrix each.
OPERATORS: dict[str, Formula] = {
    "norm": lambda p, g: p.sub_(g / g.norm()),
    "norm of 1": lambda p, g: p.sub_(g, alpha=0.1).mul_(1 / g.norm(1)),
    "minus a norm": lambda p, g: p.sub_(g.norm()),
    "a norm minus": lambda p, g: p.copy_(g.norm() - p),
    "a norm over": lambda p, g: p.copy_(p.norm() / (2 + g)),
    "power of a norm": lambda p, g: p.mul_(g.norm() ** -0.5),
    "mean": lambda p, g: p.sub_(g - g.mean()),
    "sum of all": lambda p, g: p.add_(torch.sum(g), alpha=-1),
    "sums": lambda p, g: p.sub_(g.sum(0)),
    "columns": lambda p, g: p.sub_(g.sum(1, keepdim=True)),
    "cumulative": lambda p, g: p.sub_(g.cumsum(0)),
    "largest": lambda p, g: p.sub_(g / g.abs().max()),
    "largest of rows": lambda p, g: p.sub_(g.max(dim=1, keepdim=True)[0]),
    "standard deviation": lambda p, g: p.sub_(g / g.std()),
    "dot": lambda p, g: p.sub_(g, alpha=0.1).add_(torch.dot(p.flatten(), g.flatten())),
    "weight of data": lambda p, g: p.lerp_(g, torch.sigmoid(g.mean())),
    "weights": lambda p, g: p.lerp_(g, g.sigmoid()),
    "clamped by data": lambda p, g: p.sub_(g.clamp(max=p.abs().mean())),
    "larger than data": lambda p, g: p.sub_(torch.where(g > g.mean(), g, 0.0)),
    "equal to data": lambda p, g: p.sub_((g == g.max()).to(g.dtype)),
    "maximum": lambda p, g: p.copy_(torch.maximum(p, g.mean())),
    "chosen number": lambda p, g: p.sub_(torch.where(g > 0, g.norm(), p.norm())),
    "all or nothing": lambda p, g: p.sub_(torch.where((g > 0).any(), g, p)),
    "topk": lambda p, g: p.sub_(g.topk(1)[0]),
    "sort": lambda p, g: p.sub_(g.sort()[0]),
    "matrices": lambda p, g: p.sub_(g @ g.T @ g, alpha=0.1),
    "transposed": lambda p, g: p.sub_(g.T.contiguous().T),
    "exp": lambda p, g: p.sub_(g.exp()),
    "flat": lambda p, g: p.flatten().sub_(g.flatten()),
    "in place through a view": lambda p, g: p.view(-1).sub_(g.view(-1)),
    "expanded": lambda p, g: p.sub_(g.mean(0).expand(p.shape)),
    "other shape": lambda p, g: p.sub_(g.new_ones(1) * g),
    "fourth root": lambda p, g: p.sub_(g.abs().pow(0.25)),
    "tensor exponent": lambda p, g: p.sub_(g.abs().pow(torch.tensor(1.5))),
    "power of a number": lambda p, g: p.sub_(1.5**g),
    "floor": lambda p, g: p.sub_(g.div(2, rounding_mode="floor")),
    "alpha": lambda p, g: p.sub_(g).add_(1, alpha=2),
    "masks add": lambda p, g: p.sub_(((g > 0).float() + (p > 0)).to(g.dtype)),
    "masks of masks": lambda p, g: p.sub_(((g > 0) ^ (p > 0)).to(g.dtype)),
    "compares in place": lambda p, g: p.sub_(g.clone().gt_(0)),
    "half": lambda p, g: p.sub_(g.half().to(g.dtype)),
    "double": lambda p, g: p.sub_((g.double() * 0.1).to(g.dtype)),
    "integers": lambda p, g: p.sub_(g.clamp(-9, 9).nan_to_num().to(torch.int64)),
    "a list": lambda p, g: torch._foreach_sub_([p], torch._foreach_div([g], [g.norm()])),
    "norms of a list": lambda p, g: p.sub_(g / torch._foreach_norm([g, p])[0]),
    "stacked": lambda p, g: p.sub_(g / torch.stack([g.norm(), p.norm()]).norm()),
    "several": lambda p, g: p.sub_(torch.var_mean(g)[0]).sub_(torch.var_mean(g)[1]),
    "parts": lambda p, g: [x.sub_(y) for x, y in zip(p.split(3), g.split(3), strict=True)],
    "row": lambda p, g: p[0].sub_(g[0]),
    "rows": lambda p, g: [x.sub_(y) for x, y in zip(p, g, strict=True)],
    "an element": lambda p, g: p.sub_(g[0, 0]),
    "last column": lambda p, g: p.sub_(g[..., -1:]),
    "column written": lambda p, g: p.__setitem__((slice(None), 0), g[:, 0]),
    "row written": lambda p, g: p.__setitem__(0, 1.0),
    "into": lambda p, g: torch.sub(p, g.exp(), out=p),
    "many tensors": lambda p, g: _many(p, g),
}


def _many(p: Tensor, g: Tensor) -> None:
    """More than a segment has room for, before a call and after it."""
    made = [(g + i) * p for i in range(30)]
    norm = made[7].norm()
    for x in made:
        p.add_(x / (1 + norm), alpha=-1e-3)


class Applies(Base):
    formula: Formula

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.mul_(0.5)
        type(self).formula(p, grad * 0.5)


def applying(name: str) -> type[Applies]:
    return type("Applies", (Applies,), {"formula": staticmethod(OPERATORS[name])})


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    """fuse() compares by bits; here that nothing but the program runs, in several shapes."""
    cls = applying(name)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((6, 7), (40, 9), (30, 1))]
    ours = beside_stock(cls, params, steps=3)
    traced = link_of(ours).traced
    assert traced is not None and not traced.untraced
    assert optfuse.summary(ours).created == 9


def test_norms_need_no_guide_for_each_shape() -> None:
    params = [nn.Parameter(torch.randn(n, 3)) for n in range(2, 9)]
    optimizer = optfuse.fuse(applying("norm")(params))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert link_of(optimizer).traced.guides == 1
    shown = optfuse.explain(optimizer)
    assert "t1 = aten::linalg_vector_norm.(t0)\nt2 = t0 / t1\n" in shown, shown


def test_shapes_that_a_call_depends_on_have_guides_of_their_own() -> None:
    params = [nn.Parameter(torch.randn(n, 3)) for n in (2, 3, 2)]
    optimizer = optfuse.fuse(applying("columns")(params))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert link_of(optimizer).traced.guides == 2


def test_a_result_of_the_parameters_shape_by_chance() -> None:
    """A stack of one norm has the shape of a parameter of one element."""
    cls = applying("stacked")
    params = [nn.Parameter(torch.randn(n, 1)) for n in (2, 5)]
    vectors = [nn.Parameter(torch.randn(n)) for n in (2, 1, 5)]
    beside_stock(cls, [*vectors, *params], steps=1)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_an_operator_that_fails_names_the_parameter(mode: str) -> None:
    class Inverts(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            p.sub_(torch.linalg.inv(grad))

    p = nn.Parameter(torch.randn(3, 3))
    optimizer = optfuse.fuse(Inverts([p]), mode=mode)
    with pytest.raises(Exception, match="parameter 0 of group 0 .* failed: linalg.inv") as found:
        p.sum().backward()  # a gradient that has no inverse
        optimizer.step()
        optfuse.flush(optimizer)
    assert "Load them from a checkpoint" in str(found.value)


def test_gradients_of_other_strides() -> None:
    """Operators would see them: forward mode takes the class's own step()."""
    cls = traced_classes.TrustRatio
    p = nn.Parameter(torch.randn(5, 6))
    twin = nn.Parameter(p.detach().clone())
    ours, stock = optfuse.fuse(cls([p])), cls([twin])
    for _ in range(2):
        p.grad = torch.randn(6, 5).t()
        twin.grad = p.grad.clone(memory_format=torch.preserve_format)
        ours.step()
        stock.step()
    assert torch.equal(p, twin)
    assert link_of(ours).traced.untraced == 2
    assert "strides" in link_of(ours).traced.why_not[1]


def test_segments_and_what_lives_between_them() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        scaled = p.grad * 3  # type: ignore[operator]
        norm = scaled.norm()
        p.sub_(scaled * norm)

    program = recorded_of(update, names=("m",)).program
    assert isinstance(program, Parts)
    structure = program.structure
    assert structure.words == ["aten::linalg_vector_norm", ""]
    assert structure.touches == 0b11 and structure.writes == 0b01
    kinds = [step if isinstance(step, tuple) else step.operator for step in program.tape]
    assert kinds[1] == "aten::linalg_vector_norm."
    assert [kind[0] for kind in (kinds[0], *kinds[2:])] == ["mul_number", "mul_number", "add"]


def test_what_a_view_writes_is_the_gradients() -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        p.grad.view(-1).mul_(2)  # type: ignore[union-attr]

    program = recorded_of(update).program
    assert isinstance(program, Parts)
    assert program.structure.writes == 0b10


def test_what_compiles_is_not_spoiled_by_a_trial() -> None:
    """A function that torch.compile meets while a mode is active runs no more."""

    @torch.compile(backend="eager", fullgraph=True)
    def update(p: Tensor, g: Tensor) -> None:
        p.add_(g, alpha=-0.1)

    class Compiles(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            if not state:
                state["n"] = torch.zeros(1)
            state["n"].add_(grad.sum())  # a tensor from nothing
            update(p, grad)

    p = nn.Parameter(torch.ones(3))
    optimizer = Compiles([p])
    with pytest.raises(optfuse.Error, match="compile"):
        optfuse.fuse(optimizer)
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(p, torch.full((3,), 0.9))


def test_a_name_is_a_tensor_for_some_and_a_counter_for_others() -> None:
    """Counters that differ have guides of their own, whatever else has their name."""

    class OneName(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            if not state:
                state["x"] = torch.zeros_like(p) if p.dim() > 1 else torch.tensor(0.0)
            if p.dim() > 1:
                p.sub_(state["x"].lerp_(grad, 0.1))
            else:
                state["x"] += 1
                p.sub_(grad, alpha=1 / float(state["x"]))

    shapes = ((5, 4), (6,), (6,))
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ours, stock = optfuse.fuse(OneName(params)), OneName(twins)
    for step in range(5):
        for i, (a, b) in enumerate(zip(params, twins, strict=True)):
            a.grad = None if i == 1 and step < 2 else torch.randn_like(a)
            b.grad = None if a.grad is None else a.grad.clone()
        ours.step()
        stock.step()
    for a, b in zip(params, twins, strict=True):
        assert torch.equal(a, b)
    assert link_of(ours).traced.guides == 3


def test_a_step_that_could_not_be_traced_keeps_nothing_alive() -> None:
    class FailsLate(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            state["n"] = state.get("n", 0) + 1
            if state["n"] > 60 and float(grad.sum()) > 0:
                p.mul_(0.5)
            p.sub_(grad, alpha=0.1)

    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(FailsLate([p]))
    p.grad = torch.ones(3)
    gc.collect()
    gc.disable()
    try:
        for _ in range(62):
            optimizer.step()
        assert link_of(optimizer).traced.untraced == 2
        watched = weakref.ref(optimizer)
        del optimizer
        assert watched() is None
    finally:
        gc.enable()
