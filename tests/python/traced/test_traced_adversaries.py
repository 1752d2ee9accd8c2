# SPDX-License-Identifier: BSD-3-Clause
"""A step() that is more than a line of elementwise operators on a parameter, its gradient and its
state is refused, and the reason says what it does."""

from __future__ import annotations

import copy
import io
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_traced_recorder import recorded_of
from torch import Tensor, nn
from torch.optim import Optimizer
from traced_classes import Base, WritesGradient

import optfuse
from optfuse._link import link_of
from optfuse._traced.guide import Place, like
from optfuse._traced.parts import Parts
from optfuse._traced.program import Program
from optfuse._traced.standin import Untraceable
from optfuse._trials.compare import difference

# The work of a step(): it gets the optimizer, a parameter, its gradient and its state.
Act = Callable[[Any, Tensor, Tensor, dict[str, Any]], Any]
SAME = (3, 4)
BUFFER = torch.zeros(SAME)
COUNTER = torch.tensor(0.0)
kept: list[Any] = []


def refused(act: Act, reason: str, entry: Any = None, **more: Any) -> None:
    def update(optimizer: Any, group: Any, p: Tensor, state: dict[str, Any]) -> None:
        act(optimizer, p, p.grad, state)  # type: ignore[arg-type]
        p.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]

    kept.clear()
    with pytest.raises(Untraceable, match=reason):
        recorded_of(update, entry, tuple(entry or ()), **more)
    kept.clear()


def _set(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


def _item(target: Any, key: Any, value: Any) -> None:
    target[key] = value


def _hidden(act: Callable[[], Any]) -> None:
    try:
        act()
    except Exception:
        return


LOOKS: dict[str, tuple[Act, str]] = {
    "item": (lambda o, p, g, s: g.sum().item(), "item"),
    "item of one": (lambda o, p, g, s: g.item(), "item"),
    "bool": (lambda o, p, g, s: bool(g > 0), "__bool__"),
    "float": (lambda o, p, g, s: float(g), "__float__"),
    "int": (lambda o, p, g, s: int(g), "__int__"),
    "math": (lambda o, p, g, s: math.sqrt(g), "__float__"),
    "tolist": (lambda o, p, g, s: g.tolist(), "tolist"),
    "numpy": (lambda o, p, g, s: g.numpy(), "numpy"),
    "array": (lambda o, p, g, s: memoryview(g.__array__()), "__array__"),
    "data_ptr": (lambda o, p, g, s: p.data_ptr(), "data_ptr"),
    "storage": (lambda o, p, g, s: p.untyped_storage(), "untyped_storage"),
    "dlpack": (lambda o, p, g, s: torch.from_dlpack(p), "aten.is_pinned"),
    "dlpack in C": (lambda o, p, g, s: torch.utils.dlpack.to_dlpack(p), "RuntimeError"),
    "is_shared": (lambda o, p, g, s: p.is_shared(), "_typed_storage"),
    "version": (lambda o, p, g, s: p._version, "_version"),
    "repr": (lambda o, p, g, s: repr(g), "__repr__"),
    "print": (lambda o, p, g, s: print(g, file=io.StringIO()), "__repr__"),
    "format": (lambda o, p, g, s: f"{g}", "__format__"),
    "elements": (lambda o, p, g, s: g[g > 0], "aten.index"),
    "membership": (lambda o, p, g, s: 3.0 in g, "__contains__"),
    "equal": (lambda o, p, g, s: torch.equal(p, g), "aten.equal"),
    "allclose": (lambda o, p, g, s: torch.allclose(p, g), "aten"),
    "is_nonzero": (lambda o, p, g, s: torch.is_nonzero(g), "ambiguous"),
    "copy": (lambda o, p, g, s: copy.copy(g), "__reduce_ex__"),
    "save": (lambda o, p, g, s: torch.save(g, io.BytesIO()), "__reduce_ex__|storage"),
    "a number of another tensor": (
        lambda o, p, g, s: p.mul_(torch.full((), g.norm())),  # type: ignore[arg-type]
        "numbers out of a tensor",
    ),
    "a number that nobody takes": (
        lambda o, p, g, s: torch.full((2,), g.norm()),  # type: ignore[arg-type]
        "numbers out of a tensor",
    ),
    "a number on its way to a size": (
        lambda o, p, g, s: p.add_(torch.arange(g.norm()).sum()),
        "numbers out of a tensor",
    ),
    "hidden": (lambda o, p, g, s: _hidden(lambda: g.max().item()), "item"),
    "hidden operand": (lambda o, p, g, s: _hidden(lambda: g.add_(BUFFER)), "none of its state"),
}

OPERATORS: dict[str, tuple[Act, str]] = {
    "random like": (lambda o, p, g, s: p.add_(torch.rand_like(g)), "aten.rand_like"),
    "random in place": (lambda o, p, g, s: g.normal_(), "aten.normal_"),
    "random mask": (lambda o, p, g, s: torch.bernoulli(g), "aten.bernoulli"),
    "dropout": (lambda o, p, g, s: nn.functional.dropout(g), "aten"),
    "a gradient of a gradient": (
        lambda o, p, g, s: torch.autograd.grad(g, p),
        "raises RuntimeError without data",
    ),
    "another device": (lambda o, p, g, s: g.to("meta"), "meta"),
    "made elsewhere": (lambda o, p, g, s: torch.zeros_like(g, device="meta"), "meta"),
    "sparse": (lambda o, p, g, s: torch.zeros_like(g, layout=torch.sparse_coo), "sparse"),
    "empty": (lambda o, p, g, s: p.add_(torch.empty_like(g)), "made without values"),
    "memory": (lambda o, p, g, s: p.set_(g), "aten.set_"),
    "resize": (lambda o, p, g, s: g.resize_(2), "aten.resize_"),
    "swap": (lambda o, p, g, s: torch.utils.swap_tensors(p, g), "swap"),
}

REAL: dict[str, tuple[Act, str]] = {
    "buffer operand": (lambda o, p, g, s: p.mul_(BUFFER), "none of its state"),
    "buffer first": (lambda o, p, g, s: BUFFER + g, "none of its state"),
    "buffer of one": (lambda o, p, g, s: p.mul_(torch.ones(1)), "none of its state"),
    "by shape": (lambda o, p, g, s: p.add_(torch.zeros(p.shape)), "none of its state"),
    "buffer in a product": (lambda o, p, g, s: p.addcmul_(g, BUFFER), "none of its state"),
    "buffer mask": (lambda o, p, g, s: torch.where(BUFFER > 0, p, g), "none of its state"),
    "array": (lambda o, p, g, s: p.add_(torch.from_numpy(BUFFER.numpy())), "none of its state"),
    "copy into": (lambda o, p, g, s: BUFFER.copy_(g), "writes into a tensor"),
    "add into": (lambda o, p, g, s: BUFFER.add_(g), "writes into a tensor|none of its state"),
    "out": (lambda o, p, g, s: torch.add(p, g, out=BUFFER), "writes into a tensor"),
    "item": (lambda o, p, g, s: _item(BUFFER, slice(None), g), "writes into a tensor"),
    "mask of real": (lambda o, p, g, s: BUFFER.masked_fill_(g > 0, 1.0), "writes into a tensor"),
    "counter": (lambda o, p, g, s: COUNTER.add_(g.sum()), "writes into a tensor"),
    "counter of all": (lambda o, p, g, s: COUNTER.copy_(g), "writes into a tensor"),
    "stack": (lambda o, p, g, s: torch.stack([g, BUFFER]), "none of its state"),
    "lists": (lambda o, p, g, s: torch._foreach_add_([BUFFER], [g]), "writes into|none of its"),
}

TIES: dict[str, tuple[Act, str]] = {
    ".data": (lambda o, p, g, s: _set(p, "data", p - g), r"into \.data"),
    ".data of a gradient": (lambda o, p, g, s: _set(g, "data", g * 2), r"into \.data"),
    "no gradient": (lambda o, p, g, s: _set(p, "grad", None), "another gradient|raises"),
    "new gradient": (lambda o, p, g, s: _set(p, "grad", g * 2), "another gradient"),
    "freezes": (lambda o, p, g, s: p.requires_grad_(False), "requires_grad"),
    "marks": (lambda o, p, g, s: _set(p, "seen", True), "attributes: seen"),
    "looks for a mark": (lambda o, p, g, s: getattr(p, "decay", 0.1), "attribute 'decay'"),
    "has a mark": (lambda o, p, g, s: hasattr(p, "decay"), "attribute 'decay'"),
    "kind of tensor": (lambda o, p, g, s: isinstance(p, nn.Parameter), "attribute '_is_param'"),
    "hooks": (lambda o, p, g, s: p.register_hook(print), "register_hook"),
    "keeps in an attribute": (lambda o, p, g, s: _set(o, "last", g * 1), "keeps a tensor"),
    "keeps the gradient": (lambda o, p, g, s: _set(o, "last", g), "keeps a tensor"),
    "keeps in a list": (lambda o, p, g, s: kept.append(g.clone()), "keeps a tensor"),
    "keeps the parameter": (lambda o, p, g, s: kept.append(p), "keeps a tensor"),
    "keeps in a closure": (lambda o, p, g, s: kept.append(lambda: g), "keeps a tensor"),
    "keeps in an option": (
        lambda o, p, g, s: _item(o.param_groups[0], "last", g + 1),
        "keeps a tensor",
    ),
    "keeps in a queue": (
        lambda o, p, g, s: s.setdefault("past", deque()).append(g.clone()),
        r"keeps a tensor of this step in state\['past'\], a deque",
    ),
    "keeps in a list of state": (lambda o, p, g, s: _item(s, "past", [g * 1]), "keeps a tensor"),
    "state of the gradient": (lambda o, p, g, s: o.state[g].update(n=1), "what is no parameter"),
    "the parameter as state": (lambda o, p, g, s: _item(s, "x", p), "another place"),
    "its memory as state": (lambda o, p, g, s: _item(s, "x", p.data), "another place"),
    "the gradient as state": (lambda o, p, g, s: _item(s, "x", g), "another place"),
    "one as two": (lambda o, p, g, s: s.update(dict.fromkeys("xy", g * 1)), "another place"),
    "state by shape": (lambda o, p, g, s: _item(s, "x", torch.zeros(p.shape)), "not made from"),
    "empty state": (lambda o, p, g, s: _item(s, "x", torch.empty_like(p)), "without values"),
    "nine": (lambda o, p, g, s: s.update((n, g * 1) for n in "abcdefghi"), "more than 8"),
    "raises": (lambda o, p, g, s: 1 // 0, "raises ZeroDivisionError"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_values_can_not_be_looked_at(name: str) -> None:
    refused(*LOOKS[name])


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_programs_have_not(name: str) -> None:
    refused(*OPERATORS[name])


@pytest.mark.parametrize("name", REAL)
def test_other_tensors_neither_give_nor_take_values(name: str) -> None:
    refused(*REAL[name])
    assert not BUFFER.any() and not COUNTER


@pytest.mark.parametrize("name", TIES)
def test_what_a_program_would_leave_out(name: str) -> None:
    refused(*TIES[name])


def test_state_that_changes_places() -> None:
    def swap(o: Any, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        s["x"], s["y"] = s["y"], s["x"]

    refused(swap, "another place", {"x": Place(0), "y": Place(1)})


def test_old_state_that_is_kept() -> None:
    def keep(o: Any, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        kept.append(s["x"])
        s["x"] = s["x"] * 2

    refused(keep, "keeps a tensor", {"x": Place(0)})


def test_a_number_that_becomes_a_tensor() -> None:
    refused(lambda o, p, g, s: _item(s, "x", g * 1), "after it was none", {"x": None})


def test_tensors_of_an_earlier_step() -> None:
    earlier: list[Tensor] = []

    def keep(o: Any, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
        earlier.append(g * 1)

    refused(keep, "keeps a tensor")
    for act in (
        lambda o, p, g, s: p.add_(earlier[0]),
        lambda o, p, g, s: earlier[0].add_(p),
        lambda o, p, g, s: p.mul_(earlier[0]),
        lambda o, p, g, s: torch.where(g > 0, g, earlier[0]),
        lambda o, p, g, s: torch.where(earlier[0] > 0, g, p),
        lambda o, p, g, s: p.copy_(earlier[0]),
        lambda o, p, g, s: torch.add(p, g, out=earlier[0]),
    ):
        refused(act, "earlier step")


def test_a_parameter_without_dimensions_takes_the_dtype_of_a_counter() -> None:
    counter = torch.tensor(2.0, dtype=torch.float64)

    def update(optimizer: Any, group: Any, p: Tensor, state: Any) -> None:
        p.mul_(counter)

    assert isinstance(recorded_of(update).program, Program)
    assert isinstance(recorded_of(update, shape=()).program, Parts)


def test_compiled_functions() -> None:
    @torch.compile(backend="eager")
    def update(p: Tensor, g: Tensor) -> None:
        p.add_(g, alpha=-0.1)

    refused(lambda o, p, g, s: update(p, g), "compiles what it computes")


STATE: dict[str, tuple[Any, str]] = {
    "kind": (nn.Parameter(torch.zeros(SAME)), "Parameter"),
    "device": (torch.zeros((), device="meta"), "device"),
    "list": ([torch.zeros(SAME)], "a list that holds tensors"),
    "dictionary": ({"x": torch.zeros(SAME)}, "a dict that holds tensors"),
    "queue": (deque([torch.zeros(SAME)]), "a deque that holds tensors"),
}


@pytest.mark.parametrize("name", STATE)
def test_state_that_programs_do_not_know(name: str) -> None:
    value, reason = STATE[name]
    with pytest.raises(Untraceable, match=reason):
        like({"x": value}, torch.zeros(SAME), [])
    with pytest.raises(Untraceable, match=reason):
        like({"x": value}, torch.zeros(SAME), ["x"])


def test_known_state_has_any_shape() -> None:
    """The same name may be a matrix for some parameters and one number for others; unknown, that
    is a counter."""
    assert like({"x": torch.zeros(SAME)}, torch.zeros(SAME), ["x"]) == {"x": Place(0)}
    assert like({"x": torch.zeros(())}, torch.zeros(()), ["x"]) == {"x": Place(0)}
    number = {"x": torch.zeros(())}
    assert like(number, torch.zeros(SAME), ["x"]) == {"x": torch.tensor(0.0)}
    point = Place(0, None, ((), ()))
    assert like(number, torch.zeros(SAME), ["x"], {"x"}) == {"x": point}
    four = {"x": torch.zeros(4, dtype=torch.int8)}
    found = like(four, torch.zeros(SAME), ["x"], {"x"})
    assert found == {"x": Place(0, torch.int8, ((4,), (1,)))}
    with pytest.raises(Untraceable, match="another shape"):
        like({"x": torch.zeros(4)}, torch.zeros(SAME), [])


def test_counters_are_copies() -> None:
    counter, table = torch.tensor(1.0), {"a": [1]}
    entry = like({"n": counter, "t": table, "none": None}, torch.zeros(SAME), [])
    assert entry == {"n": counter, "t": table, "none": None}
    assert entry["n"] is not counter and entry["t"]["a"] is not table["a"]


# ---- fused


class ByAttribute(Base):
    """Decay as each parameter says."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.mul_(1 - group["lr"] * getattr(p, "decay", 0.0))
        p.add_(grad, alpha=-group["lr"])


def test_attributes_of_parameters() -> None:
    """Copies in a trial have none."""
    params = [nn.Parameter(torch.ones(9)) for _ in range(2)]
    params[0].decay = 0.5  # type: ignore[attr-defined]
    with pytest.raises(optfuse.Error, match="attribute 'decay'"):
        optfuse.fuse(ByAttribute(params))


class Contiguous(Base):
    """Halves the parameter where contiguous() makes no copy."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.contiguous().mul_(0.5)
        p.add_(grad, alpha=-group["lr"])


def test_copies_of_what_is_not_contiguous() -> None:
    def training(fused: bool) -> Any:
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(2, 3, 4, 5)),
            nn.Parameter(torch.randn(7, 5).t()),
        ]
        optimizer: Optimizer = Contiguous(params)
        if fused:
            optimizer = optfuse.fuse(optimizer)
            assert link_of(optimizer).traced is not None
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach().clone() for p in params]

    assert difference("", training(True), training(False)) is None


def test_an_expanded_gradient_that_step_writes_is_refused() -> None:
    param = nn.Parameter(torch.ones(9))
    optimizer = optfuse.fuse(WritesGradient([param]))
    param.grad = torch.full((1,), 2.0).expand(9)
    with pytest.raises(optfuse.Error, match=r"is expanded.*the update writes to it.*nothing was"):
        optimizer.step()
    assert (param == 1).all()
    assert not optimizer.state_dict()["state"]
    param.grad = param.grad.clone()
    optimizer.step()
    assert (param < 1).all()
