# SPDX-License-Identifier: BSD-3-Clause
"""Each operator in a recorded step() has the bits of PyTorch's, on special numbers, in four dtypes,
in both modes; so have those on lists, of which the table is made of the schemas that this torch
has."""

import numpy as np
import pytest
import torch
from common import differing, python_ok
from style_classes import Base
from torch import nn

import optfuse
from optfuse._fused.recorded import last_counts
from optfuse._options import RECORDED

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (1, 5, 15, 16, 37, 1003, 20_011)
_ONE = torch.tensor(0.3)
#: Functions of a parameter and its gradient that become instructions of a program.
ELEMENTWISE = {
    "copy": lambda p, g: g.clone(),
    "neg": lambda p, g: -g,
    "abs": lambda p, g: g.abs(),
    "sign": lambda p, g: g.sign(),
    "square": lambda p, g: g.square(),
    "power 2": lambda p, g: g**2,
    "sqrt": lambda p, g: g.sqrt(),
    "rsqrt": lambda p, g: g.rsqrt(),
    "reciprocal": lambda p, g: g.reciprocal(),
    "fill": lambda p, g: torch.full_like(p, 0.1),
    "add": lambda p, g: p.add(g, alpha=0.3),
    "sub": lambda p, g: p.sub(g, alpha=0.7),
    "add number": lambda p, g: g + 0.1,
    "sub number": lambda p, g: g - 0.1,
    "rsub": lambda p, g: 1.1 - g,
    "rsub alpha": lambda p, g: torch.rsub(g, 0.3, alpha=2),
    "mul": lambda p, g: p * g,
    "mul number": lambda p, g: p * 0.3,
    "div": lambda p, g: p / g,
    "div number": lambda p, g: p / 0.001,
    "number div": lambda p, g: 0.3 / g,
    "addcmul": lambda p, g: p.addcmul(g, g, value=0.3),
    "addcdiv": lambda p, g: p.addcdiv(g, p, value=0.3),
    "lerp near": lambda p, g: p.lerp(g, 0.1),
    "lerp far": lambda p, g: p.lerp(g, 0.9),
    "lerp 1": lambda p, g: p.lerp(g, 1.0),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp_min": lambda p, g: g.clamp(min=0.1),
    "clamp_max": lambda p, g: g.clamp(max=0.1),
    "clamp both": lambda p, g: g.clamp(-0.1, 0.2),
    "gt": lambda p, g: (p > g).to(p.dtype),
    "lt number": lambda p, g: (g < 0.1).to(p.dtype),
    "ge number": lambda p, g: g * (g >= 0.3),
    "eq": lambda p, g: (p == g).to(p.dtype),
    "ne number": lambda p, g: p * (g != 0),
    "where": lambda p, g: torch.where(p > g, p, g),
    "where first": lambda p, g: torch.where(p > g, 0.3, g),
    "where second": lambda p, g: torch.where(p > g, p, 0.3),
    "and": lambda p, g: p * ((p > 0) & (g > 0)),
    "or": lambda p, g: p * ((p > 0) | (g > 0)),
    "not": lambda p, g: p * (~(p > 0)),
    "masked_fill": lambda p, g: g.masked_fill(p > 0, 0.7),
    "isnan": lambda p, g: torch.where(torch.isnan(g), 0.0, g),
    "mul point": lambda p, g: p * _ONE,
    "mul point of float64": lambda p, g: p.mul(_ONE.double()),
    "add point": lambda p, g: p.add(_ONE),
    "div point": lambda p, g: p / _ONE,
    "mul, add": lambda p, g: p.mul(0.9).add_(g, alpha=0.1),
    "mul, addcmul": lambda p, g: p.mul(0.9).addcmul_(g, g, value=0.1),
    "div, add": lambda p, g: p.abs().sqrt().div_(0.3).add_(1e-8),
    "power 3": lambda p, g: g.pow(3),
    "power -2": lambda p, g: g.pow(-2),
    "power 0.5": lambda p, g: g.pow(0.5),
    "power -0.5": lambda p, g: g.pow(-0.5),
    "power -1": lambda p, g: g.pow(-1),
}


def _many(p, g):
    """More temporaries than a program has room for, before a norm and after it."""
    made = [(g + i) * p for i in range(30)]
    norm = made[7].norm()
    for x in made:
        p = p + x / (1 + norm)
    return p


def _parts(p, g):
    p = p.clone()
    for x, y in zip(p.split(3), g.split(3), strict=True):
        x.sub_(y)
    p[0].sub_(g[0])
    p[0] = 1.0
    p[:, 0] = g[:, 0]
    for x, y in zip(p, g, strict=True):
        x.sub_(y)
    return p


#: Functions of matrices, by PyTorch's operators.
OTHERS = {
    "sgn": lambda p, g: torch.sgn(g),
    "clamp tensors": lambda p, g: g.clamp(-p.abs(), p.abs()),
    "clamp_min tensor": lambda p, g: g.clamp_min(p),
    "point div": lambda p, g: _ONE / g,
    "add number, alpha": lambda p, g: g.add(1, alpha=2),
    "lerp number": lambda p, g: p.lerp(g, torch.tensor(0.2, dtype=p.dtype)),
    "norm": lambda p, g: p.sub(g / g.norm()),
    "norm of 1": lambda p, g: p * (1 / g.norm(1)),
    "a norm minus": lambda p, g: g.norm() - p,
    "a norm over": lambda p, g: p.norm() / (2 + g),
    "power of a norm": lambda p, g: p.mul(g.norm() ** -0.5),
    "mean": lambda p, g: g - g.mean(),
    "sum of all": lambda p, g: p.add(torch.sum(g), alpha=-1),
    "sums": lambda p, g: p.sub(g.sum(0)),
    "columns": lambda p, g: p.sub(g.sum(1, keepdim=True)),
    "cumulative": lambda p, g: p.sub(g.cumsum(0)),
    "largest": lambda p, g: p.sub(g / g.abs().max()),
    "largest of rows": lambda p, g: p.sub(g.max(dim=1, keepdim=True)[0]),
    "standard deviation": lambda p, g: p.sub(g / g.std()),
    "dot": lambda p, g: p.add(torch.dot(p.flatten(), g.flatten())),
    "weight of data": lambda p, g: p.lerp(g, torch.sigmoid(g.mean())),
    "weights": lambda p, g: p.lerp(g, g.sigmoid()),
    "clamped by data": lambda p, g: p.sub(g.clamp(max=p.abs().mean())),
    "larger than data": lambda p, g: p.sub(torch.where(g > g.mean(), g, 0.0)),
    "equal to data": lambda p, g: p.sub((g == g.max()).to(g.dtype)),
    "maximum": lambda p, g: torch.maximum(p, g.mean()),
    "chosen number": lambda p, g: p.sub(torch.where(g > 0, g.norm(), p.norm())),
    "all or nothing": lambda p, g: p.sub(torch.where((g > 0).any(), g, p)),
    "topk": lambda p, g: p.sub(g.topk(1)[0]),
    "sort": lambda p, g: p.sub(g.sort()[0]),
    "matrices": lambda p, g: p.sub(g @ g.T @ g, alpha=0.1),
    "transposed": lambda p, g: p.sub(g.T.contiguous().T),
    "exp": lambda p, g: p.sub(g.exp()),
    "expanded": lambda p, g: p.sub(g.mean(0).expand(p.shape)),
    "other shape": lambda p, g: p.sub(g.new_ones(1) * g),
    "fourth root": lambda p, g: p.sub(g.abs().pow(0.25)),
    "exponent a point": lambda p, g: p.sub(g.abs().pow(torch.tensor(1.5))),
    "power of a number": lambda p, g: p.sub(1.5**g),
    "floor": lambda p, g: p.sub(g.div(2, rounding_mode="floor")),
    "masks add": lambda p, g: p.sub(((g > 0).float() + (p > 0)).to(g.dtype)),
    "masks of masks": lambda p, g: p.sub(((g > 0) ^ (p > 0)).to(g.dtype)),
    "compares in place": lambda p, g: p.sub(g.clone().gt_(0)),
    "half": lambda p, g: p.sub(g.half().to(g.dtype)),
    "double": lambda p, g: p.sub((g.double() * 0.1).to(g.dtype)),
    "integers": lambda p, g: p.sub(g.clamp(-9, 9).nan_to_num().to(torch.int64)),
    "a list": lambda p, g: torch._foreach_sub([p], torch._foreach_div([g], [g.norm()]))[0],
    "norms of a list": lambda p, g: p.sub(g / torch._foreach_norm([g, p])[0]),
    "stacked": lambda p, g: p.sub(g / torch.stack([g.norm(), p.norm()]).norm()),
    "several": lambda p, g: p.sub(torch.var_mean(g)[0]).sub(torch.var_mean(g)[1]),
    "parts": _parts,
    "an element": lambda p, g: p.sub(g[0, 0]),
    "last column": lambda p, g: p.sub(g[..., -1:]),
    "into": lambda p, g: torch.sub(p, g.exp(), out=torch.empty_like(p)),
    "many tensors": _many,
}


def special(n, dtype, random):
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, 1.0, -1.0])
    which = torch.randint(18, (n,), generator=random)
    numbers = torch.where(which < 9, values.repeat(2)[which], torch.randn(n, generator=random))
    return numbers.to(dtype)


class One(Base):
    """The results of one formula go into the state; the parameter stays."""

    formula = None

    def update(self, p, grad, state, group):
        if "made" not in state:
            state["made"] = torch.zeros_like(p)
        state["made"].copy_(type(self).formula(p, grad))


def one_step(formula, params, grads, mode):
    """The optimizer after its third step, which forward mode knows, and which runs ahead in
    backward mode."""
    cls = type("One", (One,), {"formula": staticmethod(formula)})
    optimizer = optfuse.fuse(cls(params), mode)
    for _ in range(3):
        optimizer.zero_grad()
        if mode == "forward":
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
        else:  # whose gradients are these
            torch.autograd.backward(params, [g.clone() for g in grads])
        optimizer.step()
    return optimizer


def check(name, formula, params, grads, mode):
    optimizer = one_step(formula, params, grads, mode)
    for p, g in zip(params, grads, strict=True):
        expected = torch.zeros_like(p).copy_(formula(p.detach(), g))
        assert not differing(optimizer.state[p]["made"], expected).any(), (name, p.shape, p.dtype)
    return optimizer


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operators_on_special_numbers(name, mode):
    for dtype in DTYPES:
        random = torch.Generator().manual_seed(1)
        params = [nn.Parameter(special(n, dtype, random)) for n in SIZES]
        grads = [special(n, dtype, random) for n in SIZES]
        optimizer = check(name, ELEMENTWISE[name], params, grads, mode)
        if mode == "backward":
            assert "ran once" in optfuse.explain(optimizer), name
        elif dtype == torch.float32:
            counts = last_counts(optimizer.__dict__[RECORDED])
            assert counts["operators"] == 0, f"{name} is no program: {counts}"


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_in_several_shapes(name, mode):
    for dtype in DTYPES[:3]:
        random = torch.Generator().manual_seed(1)
        shapes = ((6, 7), (40, 9), (30, 1), (6, 6))
        made = [torch.randn(s, generator=random).to(dtype) for s in shapes for _ in range(2)]
        try:
            OTHERS[name](made[0], made[1])
        except (RuntimeError, TypeError):
            assert dtype == torch.bfloat16
            continue
        check(name, OTHERS[name], list(map(nn.Parameter, made[::2])), made[1::2], mode)


# ---- lists

PREFIX = "_foreach_"
LIST_SIZES = (1, 5, 37, 1003)
NUMBERS = {"float": 1.2345, "int": 3, "bool": True, "numpy": np.float64(1.2345)}
NUMBERS |= {"numpy32": np.float32(1.2345), "one": 1.0}
POINTS = {
    "point": torch.tensor(1.2345),
    "point of float64": torch.tensor(1.2345, dtype=torch.float64),
    "point of bfloat16": torch.tensor(1.2345, dtype=torch.bfloat16),
    "integer": torch.tensor(3),
}
SCALARS = torch.linspace(0.5, 2, len(LIST_SIZES))


def _operands(kind, name):
    """Values for an argument, as functions of the lists of parameters and gradients."""
    if kind == "number":
        return {k: lambda p, g, x=x: x for k, x in NUMBERS.items()}
    if kind == "List[number]":
        return {f"{k}s": lambda p, g, x=x: [x] * len(p) for k, x in NUMBERS.items()}
    if kind == "List[Tensor]":
        return {"list": lambda p, g: g}
    if kind == "Tensor":
        points = {"scalars": SCALARS} if name == "scalars" else POINTS
        return {k: lambda p, g, x=x: x for k, x in points.items()}
    return {}


def _formula(spelled, of, options):
    def formula(p, g):
        given = [x.clone() for x in p]
        made = getattr(torch, spelled)(given, *(operand(p, g) for operand in of), **options)
        return given if spelled.endswith("_") else made

    return formula


def _calls():
    for spelled in dir(torch._C._VariableFunctions):
        if not spelled.startswith(PREFIX) or spelled == "_foreach_mm":
            continue
        packet = getattr(torch.ops.aten, spelled)
        for overload in packet.overloads():
            arguments = getattr(packet, overload)._schema.arguments
            if overload.endswith("out") or str(arguments[0].type) != "List[Tensor]":
                continue
            middle = [a for a in arguments[1:] if not a.has_default_value()]
            kinds = [_operands(str(a.type), a.name) for a in middle]
            last = arguments[1:][len(middle) :]
            more = [{}]
            if last and last[0].name in ("alpha", "value"):
                more += [{last[0].name: x} for x in (0.3, 2)]
            for label, operand in kinds[-1].items() if kinds else [("", None)]:
                for options in more:
                    of = [next(iter(kind.values())) for kind in kinds[:-1]]
                    of += [] if operand is None else [operand]
                    name = f"{spelled}.{overload} {label} {options or ''}".strip()
                    yield name, _formula(spelled, of, options)


CALLS = list(_calls())


class OnLists(Base):
    """The results of each group's operator on its parameters and gradients go into the state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = group["params"]
            made = CALLS[group["which"]][1](params, [p.grad for p in params])
            for p, x in zip(params, made, strict=True):
                self.state[p].setdefault("made", torch.zeros_like(p)).copy_(x)


def what_differs_on_lists(dtype):
    random = torch.Generator().manual_seed(1)
    groups = []
    for which, (_, formula) in enumerate(CALLS):
        params = [nn.Parameter(special(n, dtype, random)) for n in LIST_SIZES]
        for p in params:
            p.grad = special(p.numel(), dtype, random)
        try:
            formula([p.detach() for p in params], [p.grad for p in params])
        except (RuntimeError, TypeError):
            continue  # no such operator for this dtype
        groups.append({"params": params, "which": which})
    assert len(groups) > 300
    optimizer = optfuse.fuse(OnLists(groups))
    found = []
    for _ in range(2):  # the second one has forms that are known
        optimizer.step()
        for group in optimizer.param_groups:
            params = [p.detach() for p in group["params"]]
            name, formula = CALLS[group["which"]]
            wanted = formula(params, [p.grad for p in group["params"]])
            for p, x in zip(group["params"], wanted, strict=True):
                if differing(optimizer.state[p]["made"], torch.zeros_like(p).copy_(x)).any():
                    found.append(name)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists(dtype):
    assert not what_differs_on_lists(dtype)


def what_differs_elsewhere():
    random = torch.Generator().manual_seed(2)
    for name, formula in ELEMENTWISE.items():
        for dtype in DTYPES:
            params = [nn.Parameter(special(n, dtype, random)) for n in SIZES[:-1]]
            grads = [special(n, dtype, random) for n in SIZES[:-1]]
            check(name, formula, params, grads, "forward")
    return [what_differs_on_lists(dtype) for dtype in DTYPES]


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_on_other_cpus(capability):
    code = "import folders, test_operators as t; print(t.what_differs_elsewhere())"
    said = python_ok(code, ATEN_CPU_CAPABILITY=capability)
    assert said.splitlines()[-1] == str([[]] * len(DTYPES))
