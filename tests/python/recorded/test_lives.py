# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels in both modes: what backward mode leaves to step(), errors, and what
happens in the middle of step(). Bits: see test_recorded.py."""

import copy
import gc
import signal
import warnings

import pytest
import torch
from common import assert_same
from recorded_classes import KINDS
from style_classes import AdaBelief, Base, TensorCounter, TrainsAndEvaluates
from torch import nn

import optfuse

MODES = ("forward", "backward")


def test_sparse_gradients_are_stocks():
    class Rows(Base):
        def update(self, p, grad, state, group):
            p.add_(grad, alpha=-group["lr"])

    def train(mode):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True)
        optimizer = Rows(table.parameters())
        if mode:
            optfuse.fuse(optimizer, mode)
        for i in range(5):
            optimizer.zero_grad()
            table(torch.tensor([1, i])).square().sum().backward()
            optimizer.step()
        return table.weight

    for mode in MODES:
        assert torch.equal(train(mode), train(None))


@pytest.mark.parametrize("mode", MODES)
def test_what_step_raises_is_stocks_error(mode):
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(TrainsAndEvaluates([p]), mode)
    for _ in range(2):
        p.sum().backward()
        with pytest.raises(RuntimeError, match="train\\(\\) first"):
            optimizer.step()
        optimizer.zero_grad()
    optimizer.train()
    for _ in range(4):
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
    assert (p < 1).all()


def test_lazy_parameters():
    """Forward mode takes them, as stock does; backward mode has to know them."""

    def train(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        optimizer = AdaBelief(model.parameters())
        if mode:
            optfuse.fuse(optimizer, mode)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert_same("weights", train("forward"), train(None))
    with pytest.raises(optfuse.Error, match="it is not initialized yet; run one forward"):
        train("backward")


def test_a_step_outlives_its_optimizer_by_an_error():
    weight = nn.Parameter(torch.ones(3))
    step = optfuse.fuse(KINDS["Elementwise"]([weight], lr=0.1)).step
    gc.collect()
    with pytest.raises(optfuse.Error, match="keep the optimizer itself"):
        step()


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in MODES:
            p = nn.Parameter(torch.ones(3))
            optimizer = optfuse.fuse(TensorCounter([p]), mode)
            for _ in range(4):
                optimizer.zero_grad()
                p.sum().backward()
                optimizer.step()


class Signals(Base):
    armed: list[int] = []

    def update(self, p, grad, state, group):
        total = state.setdefault("total", torch.zeros_like(p))
        total.mul_(0.5).add_(grad)
        if self.armed:
            self.armed.clear()
            signal.raise_signal(signal.SIGUSR1)
        p.sub_(total * group["lr"])


CALLS = {
    "step": lambda optimizer: optimizer.step(),
    "zero_grad": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "state_dict": lambda optimizer: copy.deepcopy(optimizer.state_dict()),
    "read": lambda optimizer: [p.sum().item() for p in optimizer.param_groups[0]["params"]],
    "write": lambda optimizer: [p.data.mul_(0.5) for p in optimizer.param_groups[0]["params"]],
    "rate": lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
}
OURS = {"summary": optfuse.summary, "explain": optfuse.explain, "flush": optfuse.flush}
OURS |= {"add a group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]})}
OURS |= {"unfuse": optfuse.unfuse, "copy": copy.deepcopy}


@pytest.mark.parametrize("call", CALLS | OURS)
@pytest.mark.parametrize("mode", MODES)
def test_a_handler_of_a_signal_calls_the_optimizer(mode, call):
    """Ours: as stock, or optfuse.Error in backward mode; nobody waits."""

    def train(mode):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s)) for s in ((3, 4), (5,))]
        optimizer = Signals(params)
        if mode:
            optfuse.fuse(optimizer, mode)
        said = []

        def handler(*_):
            try:
                if mode or call in CALLS:
                    said.append((CALLS | OURS)[call](optimizer))
            except optfuse.Error as error:
                said.append(error)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            for i in range(6):
                optimizer.zero_grad()
                Signals.armed += [1] if i == 3 else []
                try:
                    sum(p.square().sum() for p in params).backward()
                    optimizer.step()
                except optfuse.Error as error:
                    assert mode == "backward", error
                    return None
        finally:
            signal.signal(signal.SIGUSR1, before)
            Signals.armed.clear()
        if any(isinstance(x, optfuse.Error) for x in said):
            assert mode == "backward" or call in OURS
            return None
        return [p.detach() for p in params]

    found = train(mode)
    assert found is None or all(map(torch.equal, found, train(None)))


def test_what_a_script_notes_between_backward_and_step_is_refused_and_stays():
    """The class's step() could read it."""
    param = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(KINDS["Elementwise"]([param]), "backward")
    for i in range(5):
        (param * param).sum().backward()
        if i > 2:
            optimizer.a_note = i
            with pytest.raises(optfuse.Error, match="the optimizer's attribute 'a_note'"):
                optimizer.step()
            optimizer.param_groups[0]["another note"] = i
            with pytest.raises(optfuse.Error, match="the option 'another note'"):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.a_note == optimizer.param_groups[0]["another note"] == 4
    assert "ran 3 times" in optfuse.explain(optimizer)


class Compiles(KINDS["Norms"]):
    def step(self, closure=None):
        with torch.no_grad():
            halve(self.param_groups[0]["params"][0])
        return super().step(closure)


@torch.compile(backend="eager")
def halve(param):
    param.mul_(0.5)


class Wrapped(torch.Tensor):
    """State whose operators are Python's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = [x.inner if isinstance(x, Wrapped) else x for x in args]
        made = function(*plain, **(kwargs or {}))
        return args[0] if made is plain[0] else made


class OfSubclasses(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = Wrapped(torch.zeros_like(p))
                state["m"].mul_(0.5)
                state["m"].add_(p.grad)
                p.sub_(state["m"].inner, alpha=group["lr"])


@pytest.mark.parametrize("cls, why", ((Compiles, "compiled code"), (OfSubclasses, "a subclass")))
def test_what_comes_to_no_tape_is_left_to_step(cls, why):
    def train(fused):
        params = [nn.Parameter(torch.ones(shape)) for shape in ((3, 5), (4,))]
        optimizer = cls(params)
        if fused:
            optfuse.fuse(optimizer, "backward")
        for _ in range(6):
            sum((p * p).sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
        if fused:
            assert why in optfuse.explain(optimizer) and "ran 0 times" in optfuse.explain(optimizer)
        return params

    assert all(map(torch.equal, train(True), train(False)))
