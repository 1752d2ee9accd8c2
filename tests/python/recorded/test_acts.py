# SPDX-License-Identifier: BSD-3-Clause
"""Acts of a step() beside its update, from its first step on, or for the first time when it has run
ahead of its gradients: stock's bits. In backward mode a look in a later step may raise
optfuse.Error, and then nothing was updated."""

import contextlib
import copy
import io
import itertools
import math
import random
import types
from collections import deque

import pytest
import torch
from common import assert_same, snapshot
from style_classes import Base, TensorCounter
from torch import nn

import optfuse

BUFFER = torch.full((3, 4), 0.5)
COUNTER = torch.tensor(0.0)
GLOBAL = [0]
STEPS, LATE = 9, 6


def hidden(act):
    with contextlib.suppress(RuntimeError):
        act()


def compiled(p):
    p.mul_(0.5)


halve = torch.compile(compiled, backend="eager")

# Functions of the optimizer, a parameter, its gradient and its state; their results are noted.
LOOKS = {
    "item": lambda o, p, g, s: g.sum().item(),
    "an element": lambda o, p, g, s: g[0, 0].item(),
    "bool": lambda o, p, g, s: p.mul_(0.5) if g[0, 0] > 0 else p.mul_(0.7),
    "float": lambda o, p, g, s: float(g[0, 0]),
    "int": lambda o, p, g, s: int(g[0, 0] * 100),
    "math": lambda o, p, g, s: math.sqrt(g[0, 0] * g[0, 0]),
    "tolist": lambda o, p, g, s: g.tolist(),
    "numpy": lambda o, p, g, s: float(g.numpy().sum()),
    "numpy of state": lambda o, p, g, s: float(s["m"].numpy().sum()),
    "array": lambda o, p, g, s: float(memoryview(g.__array__())[0, 0]),
    "data_ptr": lambda o, p, g, s: p.data_ptr() != 0,
    "storage": lambda o, p, g, s: p.untyped_storage().nbytes(),
    "dlpack": lambda o, p, g, s: torch.from_dlpack(g.detach()).sum().item(),
    "is_shared": lambda o, p, g, s: p.is_shared(),
    "version": lambda o, p, g, s: p._version,
    "repr": lambda o, p, g, s: repr(g),
    "print": lambda o, p, g, s: print(g, file=io.StringIO()),
    "format": lambda o, p, g, s: f"{g}",
    "elements": lambda o, p, g, s: g[g > 0].sum().item(),
    "elements kept": lambda o, p, g, s: s.update(positive=g[g > 0]),
    "membership": lambda o, p, g, s: 3.0 in g,
    "equal": lambda o, p, g, s: torch.equal(p, g),
    "allclose": lambda o, p, g, s: torch.allclose(p, g),
    "copy": lambda o, p, g, s: p.add_(copy.copy(g)),
    "save": lambda o, p, g, s: len(torch.save(g, f := io.BytesIO()) or f.getvalue()) > 0,
    "a number in a size": lambda o, p, g, s: p.add_(torch.arange(1 + g.abs().sum().int()).sum()),
    "a hidden look": lambda o, p, g, s: hidden(lambda: g.max().item()),
    "a hidden error": lambda o, p, g, s: hidden(lambda: g.add_(torch.ones(7, 7))),
    "topk": lambda o, p, g, s: p.sub_(g.topk(1)[0]),
    "inverse": lambda o, p, g, s: torch.linalg.pinv(g).sum().item(),
    "random like": lambda o, p, g, s: p.add_(torch.rand_like(g)),
    "random in place": lambda o, p, g, s: s["m"].normal_(),
    "random mask": lambda o, p, g, s: p.mul_(torch.bernoulli(torch.full_like(g, 0.5))),
    "dropout": lambda o, p, g, s: p.add_(nn.functional.dropout(g)),
    "a gradient of a gradient": lambda o, p, g, s: s.update(d=slope(p, g)),
    "compiled": lambda o, p, g, s: halve(p),
    "set_": lambda o, p, g, s: p.data.set_((p + g).detach()),
    ".data": lambda o, p, g, s: setattr(p, "data", p.data - g),
    ".data of a gradient": lambda o, p, g, s: setattr(g, "data", g * 2),
    "no gradient": lambda o, p, g, s: setattr(p, "grad", None),
    "new gradient": lambda o, p, g, s: setattr(p, "grad", g * 2),
    "keeps the gradient": lambda o, p, g, s: setattr(o, "last", g),
    "keeps the gradient's memory": lambda o, p, g, s: s.update(x=g.detach()),
    "couples by a norm": lambda o, p, g, s: p.div_(1 + norm_of_all(o)),
    "couples by a buffer": lambda o, p, g, s: p.add_(o.shared.add_(g.sum())),
    "couples by a gradient": lambda o, p, g, s: p.add_(o.param_groups[0]["params"][0].grad.sum()),
    "all by their shape": lambda o, p, g, s: torch._foreach_norm([p.grad, o.shared])[0].item(),
    "an array of others": lambda o, p, g, s: p.add_(torch.from_numpy(torch.ones(1, 4).numpy())),
    "frees": lambda o, p, g, s: s.clear(),
    "resize": lambda o, p, g, s: s["m"].resize_(1) if 0 else s["m"].t_().t_(),
    "hooks": lambda o, p, g, s: p.register_hook(lambda x: x).remove(),
    "a hook of the optimizer": lambda o, p, g, s: o.register_step_post_hook(print).remove(),
    "raises": lambda o, p, g, s: [][1],
}
EFFECTS = {
    "an option": lambda o, p, g, s: o.param_groups[0].update(eps=o.param_groups[0]["eps"] + 1),
    "a new option": lambda o, p, g, s: o.param_groups[0].update(new=1),
    "an attribute": lambda o, p, g, s: setattr(o, "n", vars(o).get("n", 0) + 1),
    "defaults": lambda o, p, g, s: o.defaults.update(lr=0.5),
    "a mark": lambda o, p, g, s: setattr(p, "seen", getattr(p, "seen", 0) + 1),
    "a list": lambda o, p, g, s: o.kept.append(len(o.kept)),
    "a queue": lambda o, p, g, s: o.queue.append(len(o.queue)),
    "an object": lambda o, p, g, s: vars(o.object).update(n=o.object.n + 1),
    "a global": lambda o, p, g, s: GLOBAL.__setitem__(0, GLOBAL[0] + 1),
    "a generator": lambda o, p, g, s: p.mul_(1 / next(o.numbers)),
    "Python's random numbers": lambda o, p, g, s: p.mul_(random.random()),
    "a new entry": lambda o, p, g, s: s.update(x=g * 1),
    "empty state": lambda o, p, g, s: s.update(x=torch.empty_like(p).copy_(g)),
    "state by shape": lambda o, p, g, s: s.update(x=torch.zeros(p.shape).add_(g)),
    "one as two": lambda o, p, g, s: s.update(dict.fromkeys("xy", g * 1)),
    "an entry that goes": lambda o, p, g, s: s.pop("v", None),
    "exchanged entries": lambda o, p, g, s: s.update(m=s["w"], w=s["m"]),
    "the parameter as state": lambda o, p, g, s: s.update(x=p),
    "its memory as state": lambda o, p, g, s: s.update(x=p.data),
    "state of the gradient": lambda o, p, g, s: s.update(x=[g * 1], y={"z": (g + 1,)}),
    "keeps a result": lambda o, p, g, s: setattr(o, "last", g * 1),
    "keeps in a list": lambda o, p, g, s: o.kept.append(g.clone()),
    "keeps in an option": lambda o, p, g, s: o.param_groups[0].update(last=g + 1),
    "keeps the parameter": lambda o, p, g, s: setattr(o, "param", p),
    "kind of tensor": lambda o, p, g, s: isinstance(p, nn.Parameter) and type(g).__name__,
    "requires_grad of state": lambda o, p, g, s: [s["v"].requires_grad_(True)],
    "a buffer": lambda o, p, g, s: p.mul_(BUFFER.mean()),
    "a buffer of its shape": lambda o, p, g, s: p.addcmul_(g, BUFFER[: p.shape[0]]),
    "a mask of a buffer": lambda o, p, g, s: p.copy_(torch.where(BUFFER[:1] > 0, p, g)),
    "a counter": lambda o, p, g, s: [COUNTER.add_(1)],
    "shape": lambda o, p, g, s: (p.shape, g.stride(), len(g), g.nbytes, g.is_contiguous(), g.dim()),
    "the device": lambda o, p, g, s: (str(g.device), g.dtype, g.layout, g.is_leaf, g.is_sparse),
    "swapped groups": lambda o, p, g, s: o.param_groups.reverse(),
}


def slope(p, g):
    with torch.enable_grad():
        x = p.detach().clone().requires_grad_()
        return torch.autograd.grad((x * g).square().sum(), x)[0]


def norm_of_all(o):
    grads = [p.grad for group in o.param_groups for p in group["params"] if p.grad is not None]
    return torch.stack([g.norm() for g in grads]).norm()


class Acts(Base):
    def prepare(self, params):
        self.t, self.kept, self.queue, self.noted = 0, [], deque(maxlen=4), []
        self.object, self.numbers = types.SimpleNamespace(n=0), itertools.count(1)
        self.shared = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        return super().step(closure)

    def update(self, p, grad, state, group):
        if not state:
            state.update({name: torch.zeros_like(p) for name in "mvw"})
        for name in "mw":
            if name in state:
                state[name].mul_(0.9).add_(grad, alpha=0.5)
        if "m" in state:
            p.sub_(state["m"], alpha=group["lr"])
        if self.t >= self.first:
            found = self.act(p, grad, state)
            self.noted.append(None if isinstance(found, torch.Tensor | list) else found)


def plain(value):
    if isinstance(value, list | tuple | deque):
        return [plain(x) for x in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value if isinstance(value, torch.Tensor | float | int | str) else repr(value)


def train(act, first, mode):
    torch.manual_seed(0)
    random.seed(0)
    GLOBAL[0] = 0
    BUFFER.fill_(0.5), COUNTER.zero_()
    params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (2, 4), (1, 4))]
    cls = type("Acting", (Acts,), {"act": act, "first": first})
    optimizer = cls([{"params": params[:1]}, {"params": params[1:], "lr": 0.05}])
    if mode:
        optfuse.fuse(optimizer, mode)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in params]
        try:
            sum((p * torch.randn(p.shape)).sum() for p in params).backward()
            optimizer.step()
        except optfuse.Error as error:
            after = [p.detach() for p in params]
            is_whole = all(map(torch.equal, before, after))
            return seen, str(error), is_whole or "The update stands" in str(error)
        except (RuntimeError, IndexError) as error:
            seen.append(type(error).__name__)
        own = {k: v for k, v in vars(optimizer).items() if k in ("t", "n", "kept", "queue", "last")}
        its = [own, optimizer.object.n, GLOBAL[0], COUNTER, optimizer.noted, optimizer.shared]
        its += [getattr(p, "seen", 0) for p in params]
        its += [[{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]]
        its += [params, [dict(optimizer.state[p]) for p in params], torch.randn(1)]
        seen.append(snapshot(plain(its)))
    return seen, None, True


ACTS = LOOKS | EFFECTS


@pytest.mark.parametrize("first", [1, LATE])
@pytest.mark.parametrize("name", ACTS)
def test_acts(name, first):
    stock, _, _ = train(ACTS[name], first, None)
    ours, error, _ = train(ACTS[name], first, "forward")
    assert error is None, error
    assert_same("forward", ours, stock)
    ours, error, is_whole = train(ACTS[name], first, "backward")
    assert_same("backward", ours, stock[: len(ours)])
    assert is_whole, error
    if name in EFFECTS or first == 1:
        assert error is None, error


class Beside(Base):
    """A number beside tensors that updates write."""

    def prepare(self, params):
        self.held = [params, {"scale": 1.0}]

    def update(self, p, grad, state, group):
        p.sub_(grad, alpha=group["lr"] * self.held[1]["scale"])


def test_a_number_beside_tensors_that_updates_write_may_not_change_late():
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(Beside([p]), "backward")
    for i in range(6):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.held[1]["scale"] *= 0.5 if i == 4 else 1
        if i == 4:
            with pytest.raises(optfuse.Error, match="attribute 'held'.*changed between"):
                optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("change", ("rate", "counter", "entry"))
def test_a_late_change_is_refused_where_backward_made_no_update(change):
    """Others know the memory of the parameter: the update is left to step(), which has run."""
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(TensorCounter([p]), "backward")
    for _ in range(3):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    alias = p.detach()
    before = alias.clone()
    p.sum().backward()
    assert torch.equal(alias, before), "backward() made the update"
    entry = optimizer.state[p]
    if change == "rate":
        optimizer.param_groups[0]["lr"] *= 0.5
    elif change == "counter":
        next(x for x in entry.values() if isinstance(x, torch.Tensor) and not x.dim()).add_(1)
    else:
        optimizer.state[p] = {key: value * 1 for key, value in entry.items()}
    with pytest.raises(optfuse.Error, match="parameter 0 of group 0.*between backward.*stands"):
        optimizer.step()
    optimizer.step()
    assert not torch.equal(alias, before)
