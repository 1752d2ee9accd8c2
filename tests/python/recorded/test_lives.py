# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and calls of unusual kinds, in both modes: stock's bits."""

import contextlib
import copy
import gc
import signal
import warnings

import pytest
import torch
from common import assert_same, snapshot
from recorded_classes import KINDS
from style_classes import STYLES, AdaBelief, Base, Lamb, TensorCounter, TrainsAndEvaluates
from torch import nn

import optfuse

MODES = ("forward", "backward")
LIVES = {}


def life(function):
    LIVES[function.__name__] = function
    return function


class Life:
    """Layers of one class of optimizer; what is noted is compared with stock's."""

    def __init__(self, cls, mode):
        torch.manual_seed(0)
        self.cls, self.mode, self.noted = cls, mode, []

    def begin(self, params, **options):
        self.params = list(params)
        self.optimizer = self.cls(self.params)
        self.fuse(**options)

    def fuse(self, **options):
        if self.mode:
            mode = {"forward": optfuse.Forward, "backward": optfuse.Backward}[self.mode]
            optfuse.fuse(self.optimizer, mode(**options))

    def step(self, *losses):
        self.optimizer.zero_grad()
        for loss in losses:
            loss.backward()
        self.optimizer.step()
        self.note()

    def note(self):
        entries = [dict(self.optimizer.state[p]) for p in self.params if p in self.optimizer.state]
        self.noted.append(snapshot([self.params, entries]))


def lived(live, cls, mode):
    it = Life(cls, mode)
    try:
        live(it)
    except optfuse.Error:
        raise
    except RuntimeError as error:  # what stock raises
        it.noted.append(str(error))
    return it.noted


#: Lives that backward mode refuses.
REFUSED = {
    "losses_of_parts_before_a_step": "got one that it had not in the step before",
    "gradients_that_are_never_zeroed": "without zero_grad",
}


def same(live, cls):
    stock = lived(live, cls, None)
    assert_same("forward", lived(live, cls, "forward"), stock)
    word = "" if isinstance(stock[-1], str) else REFUSED.get(live.__name__)
    if word is not None and cls is not Lamb:  # which is left to step()
        with pytest.raises(optfuse.Error, match=word):
            lived(live, cls, "backward")
    else:
        assert_same("backward", lived(live, cls, "backward"), stock)


@life
def parts_of_the_model(it):
    layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
    it.begin(layers.parameters())
    for step in range(12):
        x = torch.ones(3, 9)
        for i, layer in enumerate(layers):
            if (step + i) % (i + 1) == 0:
                x = layer(x)
        it.step(x.square().mean())


@life
def some_are_frozen_and_thawed(it):
    layers = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(4))
    it.begin(layers.parameters())
    for step in range(16):
        layers[1].requires_grad_(step // 4 != 1)
        x = layers[1](layers[0](torch.ones(3, 9)))
        for layer in layers[2:] if step // 4 != 2 else layers[2:3]:
            x = layer(x)
        it.step(x.square().mean())


@life
def frozen_ones_with_gradients(it):
    params = [nn.Parameter(torch.randn(4, 5)) for _ in range(2)]
    it.begin(params)
    for step in range(6):
        for p in params:
            p.grad = torch.full_like(p, 0.5 + step)
        params[0].requires_grad_(step == 0)
        it.optimizer.step()
        it.note()


@life
def losses_of_parts_before_a_step(it):
    layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
    it.begin(layers.parameters())
    for step in range(8):
        it.step(*(layer(torch.ones(2, 9)).square().mean() for layer in layers[: 3 - step % 2]))


@life
def steps_without_gradients(it):
    model = nn.Linear(9, 9)
    it.begin(model.parameters())
    for step in range(8):
        it.step(*([model(torch.ones(2, 9)).square().mean()] if step % 3 else []))


@life
def accumulated_passes(it):
    model = nn.Linear(9, 9)
    it.begin(model.parameters(), **({"accumulate": 2} if it.mode == "backward" else {}))
    for step in range(8):
        it.step(*(model(torch.full((2, 9), 1.0 + step + i)).square().mean() for i in range(2)))


@life
def gradients_that_are_never_zeroed(it):
    model = nn.Linear(9, 9)
    it.begin(model.parameters())
    for _ in range(6):
        model(torch.ones(2, 9)).square().mean().backward()
        it.optimizer.step()
        it.note()


@life
def no_elements(it):
    params = [nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (0, 4), (4,))]
    it.begin(params)
    for _ in range(6):
        it.step(sum(p.square().sum() for p in params))


@life
def no_dimensions(it):
    params = [nn.Parameter(torch.randn(shape)) for shape in ((), (3, 4), (), (1,))]
    it.begin(params)
    for _ in range(6):
        it.step(sum(p.square().sum() for p in params))


@life
def several_threads_share_a_large_one(it):
    torch.set_num_threads(2)
    params = [nn.Parameter(torch.randn(300_001)) for _ in range(2)]
    it.begin(params)
    for _ in range(5):
        it.step(sum(p.square().sum() for p in params))


@life
def expanded_gradients(it):
    params = [nn.Parameter(torch.ones(9, 2)), nn.Parameter(torch.ones(4))]
    it.begin(params)
    for i in range(6):
        params[0].grad = torch.full((9, 1), 2.0 + i).expand(9, 2)
        params[1].grad = torch.full((4,), 1.0)
        it.optimizer.step()
        it.note()


@life
def other_precision_of_state(it):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    it.begin(model.parameters())
    for i in range(8):
        it.step(model(torch.full((2, 3, 3, 3), 1.0 + i)).square().mean())
        for entry in it.optimizer.state.values() if i in (3, 5) else ():
            for key, value in entry.items():
                if torch.is_tensor(value) and value.dim():
                    entry[key] = value.double() if i == 3 else value.float().clone()


@life
def other_memory_format(it):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    it.begin(model.parameters())
    for i in range(8):
        it.step(model(torch.full((2, 3, 3, 3), 1.0 + i)).square().mean())
        if i == 3:
            model.to(memory_format=torch.channels_last)


@life
def counters_written_between_steps(it):
    params = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    it.begin(params)
    for i in range(8):
        it.step(sum(p.square().sum() for p in params))
        entry = it.optimizer.state[params[1]]
        if i == 4 and torch.is_tensor(entry.get("step")):
            entry["step"].data.fill_(40.0)  # no version counter tells
        elif i == 4:
            entry["step"] = 40


@life
def state_that_is_cleared(it):
    params = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    it.begin(params)
    for i in range(8):
        it.step(sum(p.square().sum() for p in params))
        if i in (3, 4, 6):
            it.optimizer.state.clear()


@life
def it_goes_back_to_an_early_state(it):
    params = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    it.begin(params)
    for i in range(9):
        it.step(sum(p.square().sum() for p in params))
        if i == 0:
            early = copy.deepcopy(it.optimizer.state_dict())
        if i == 5:
            it.optimizer.load_state_dict(early)


@life
def fused_in_the_middle_of_training(it):
    params = [nn.Parameter(torch.randn(s)) for s in ((6,), (), (3, 4))]
    it.params, it.optimizer = params, it.cls(params)
    for i in range(9):
        if i == 4:
            it.fuse()
        it.step(sum(p.square().sum() for p in params))


@life
def rates_that_are_tensors(it):
    params = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    it.begin(params)
    for group in it.optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)
    halves = (lambda x: x.mul_(0.5), lambda x: x.data.mul_(0.5), lambda x: x.numpy().__imul__(0.5))
    for i in range(9):
        it.step(sum(p.square().sum() for p in params))
        halves[i % 3](it.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", LIVES)
@pytest.mark.parametrize("cls", ["AdaBelief", "TensorCounter", "TrustRatio", "Replaces", "Lamb"])
def test_lives(cls, name):
    same(LIVES[name], STYLES[cls])


# ---- what only one mode takes, and errors


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


@pytest.mark.parametrize("mode", MODES)
def test_an_operator_that_fails_by_numbers_raises_stocks_error(mode):
    class Inverts(Base):
        def update(self, p, grad, state, group):
            if p.dim() == 2 and torch.linalg.det(grad) != 3:
                grad = torch.linalg.inv(grad)
            p.sub_(grad)

    params = [nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))]
    optimizer = optfuse.fuse(Inverts(params), mode)
    for i in range(4):
        params[0].grad, params[1].grad = torch.eye(3) * (i != 2), torch.ones(3)
        raises = pytest.raises(torch.linalg.LinAlgError) if i == 2 else contextlib.nullcontext()
        with raises:
            optimizer.step()
    assert params[1].tolist() == [-2.0] * 3


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
    weight = torch.nn.Parameter(torch.ones(3))
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


# ---- a handler of a signal that runs in the middle of step()


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
