# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() is traced train as they do by themselves, bit for bit, and what can't be
traced is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import traced_classes
from common import fuse_with
from torch import Tensor, nn
from torch.optim import Optimizer
from traced_classes import CALLING, TRACEABLE, UNTRACEABLE, Base

import optfuse
from optfuse._library.bindings import BACKWARD
from optfuse._link import link_of
from optfuse._options import is_fused
from optfuse._trials.compare import difference

Wrap = Callable[[Optimizer], Optimizer]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MODES = ("forward", "backward")


class Net(nn.Module):
    """An embedding, whose weights decode, too, a convolution, a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 24)
        self.conv = nn.Conv1d(24, 70, 3, padding=1)
        self.norm = nn.BatchNorm1d(70)
        self.out = nn.Linear(70, 300)
        self.back = nn.Linear(300, 20)
        self.tied = nn.Linear(24, 20, bias=False)
        self.tied.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.table(x)
        hidden = self.norm(self.conv(embedded.transpose(1, 2))).relu()
        return self.back(self.out(hidden.mean(2)).relu()) + self.tied(embedded).mean(1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    x = torch.randint(20, (6, 5), generator=random)
    return x, torch.randint(20, (6,), generator=random)


def parameters(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with other options."""
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3, "weight_decay": 0.1}]


def seen(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that a user can look at; gradients where they are not consumed."""
    state = optimizer.state_dict()
    consumes = is_fused(optimizer) and link_of(optimizer).mode == BACKWARD
    grads = [] if consumes else [p.grad for p in model.parameters()]
    return copy.deepcopy({"model": model.state_dict(), "state": state, "grads": grads})


def train(
    cls: type[Optimizer],
    wrap: Wrap = lambda optimizer: optimizer,
    dtype: torch.dtype = torch.float32,
    steps: int = 12,
    each: Callable[[int, nn.Module, Optimizer], Any] = lambda *_: None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = wrap(cls(parameters(model)))  # type: ignore[call-arg]
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        each(step, model, optimizer)
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return seen(model, optimizer)


def fused(mode: str, into: list[Optimizer] | None = None, **options: Any) -> Wrap:
    def wrap(optimizer: Optimizer) -> Optimizer:
        made = fuse_with(optimizer, mode, **options)
        if into is not None:
            into.append(made)
        return made

    return wrap


def expect_same(ours: Any, stock: Any, mode: str = "forward") -> None:
    if mode == "backward":
        ours, stock = ({k: v for k, v in x.items() if k != "grads"} for x in (ours, stock))
    assert difference("", ours, stock) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [*TRACEABLE, *CALLING])
def test_training_has_the_bits_of_the_class(cls: type[Optimizer], mode: str) -> None:
    made: list[Optimizer] = []
    expect_same(train(cls, fused(mode, made)), train(cls), mode)
    link = link_of(made[0])
    assert link.traced is not None
    assert not link.traced.untraced
    counts = optfuse.summary(made[0])
    assert counts.created == 12 * 9
    assert counts.at_once == 0 or mode == "backward"


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("cls", [*TRACEABLE, *CALLING])
def test_dtypes(cls: type[Optimizer], dtype: torch.dtype) -> None:
    made: list[Optimizer] = []
    expect_same(
        train(cls, fused("forward", made), dtype, steps=5), train(cls, dtype=dtype, steps=5)
    )
    assert link_of(made[0]).traced is not None


@pytest.mark.parametrize("cls", UNTRACEABLE)
def test_what_can_not_be_traced_is_refused(cls: type[Optimizer]) -> None:
    torch.manual_seed(0)
    model = Net()
    model.register_parameter("large", nn.Parameter(torch.randn(150, 120)))
    optimizer = cls(model.parameters())  # type: ignore[call-arg]
    before = seen(model, optimizer)
    kept = len(getattr(cls, "kept", []))
    with pytest.raises(optfuse.Error, match=UNTRACEABLE[cls]) as found:
        optfuse.fuse(optimizer)
    assert "Use the optimizer as it is" in str(found.value) or "register" in str(found.value)
    expect_same(seen(model, optimizer), before)
    assert type(optimizer) is cls
    del getattr(cls, "kept", [])[kept:]


def test_an_optimizer_inside_of_another_is_named() -> None:
    class Outer(Base):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params)
            self.inner = torch.optim.SGD(params, lr=0.1)

    with pytest.raises(optfuse.Error, match="'inner'"):
        optfuse.fuse(Outer(Net().parameters()))


def test_what_is_registered_runs_its_own_step() -> None:
    class Registered(traced_classes.AdaBelief):
        pass

    optfuse.register(Registered)
    optimizer = optfuse.fuse(Registered(Net().parameters()))
    assert link_of(optimizer).traced is None
    assert optfuse.summary(optimizer).isa == {"float32": "own step()"}


def test_registering_helps_where_tracing_does_not() -> None:
    class Clips(traced_classes.LooksAtValues):
        pass

    with pytest.raises(optfuse.Error, match="register"):
        optfuse.fuse(Clips(Net().parameters()))
    optfuse.register(Clips)
    expect_same(train(Clips, fused("forward")), train(Clips))


class LaterLooks(traced_classes.AdaBelief):
    """From the 25th step on it looks at values, for three steps."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        super().update(p, grad, state, group)
        if 25 <= state["step"] < 28 and grad.abs().max().item() > 0:
            p.mul_(0.99)


def test_steps_that_can_not_be_traced_are_the_classes_own() -> None:
    made: list[Optimizer] = []
    expect_same(train(LaterLooks, fused("forward", made), steps=40), train(LaterLooks, steps=40))
    assert link_of(made[0]).traced.untraced == 3  # type: ignore[union-attr]
    assert "3 times it could not be traced" in str(optfuse.summary(made[0]))


def test_in_backward_mode_they_raise_and_change_nothing() -> None:
    before: dict[str, Any] = {}

    def each(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        before.update(seen(model, optimizer))

    made: list[Optimizer] = []
    with pytest.raises(optfuse.Error, match=r"can't be traced.*Nothing was updated.*forward"):
        train(LaterLooks, fused("backward", made), steps=40, each=each)
    assert made[0].state_dict()["state"][0]["step"] == 24


@pytest.mark.parametrize("mode", MODES)
def test_parameters_without_gradients(mode: str) -> None:
    """Their counters stay behind, and they form cohorts of their own."""

    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        optimizer = wrap(traced_classes.AdaBelief(layers.parameters()))
        for step in range(12):
            optimizer.zero_grad()
            x = torch.ones(3, 9)
            for i, layer in enumerate(layers):
                if (step + i) % (i + 1) == 0:
                    x = layer(x)
            x.square().mean().backward()
            optimizer.step()
        return copy.deepcopy([layers.state_dict(), optimizer.state_dict()])

    made: list[Optimizer] = []
    stock = training(lambda optimizer: optimizer)
    assert difference("", training(fused(mode, made)), stock) is None
    counted = {entry["step"] for entry in stock[1]["state"].values()}
    assert len(counted) == 4
    assert link_of(made[0]).traced.guides > 1  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", [traced_classes.AdaBelief, traced_classes.TensorCounter])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_stop_taking_part(mode: str, cls: type[Optimizer]) -> None:
    """After steps that found all as it was: one is frozen and thawed, one gets no gradient."""

    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(4))
        optimizer = wrap(cls(layers.parameters()))  # type: ignore[call-arg]
        for step in range(16):
            optimizer.zero_grad()
            layers[1].requires_grad_(step // 4 != 1)
            x = layers[1](layers[0](torch.ones(3, 9)))
            for layer in layers[2:] if step // 4 != 2 else layers[2:3]:
                x = layer(x)
            x.square().mean().backward()
            optimizer.step()
        return copy.deepcopy([layers.state_dict(), optimizer.state_dict()])

    assert difference("", training(fused(mode)), training(lambda optimizer: optimizer)) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_step_in_which_no_parameter_has_a_gradient_counts(mode: str) -> None:
    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = wrap(traced_classes.GroupCounter(parameters(model)))
        for step in range(6):
            optimizer.zero_grad()
            if step % 2:
                x, y = batch(step)
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()]), optimizer.steps  # type: ignore[attr-defined]

    assert difference("", training(fused(mode)), training(lambda optimizer: optimizer)) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "cls",
    [
        *(traced_classes.AdaBelief, traced_classes.TensorCounter, traced_classes.OwnNumber),
        *(traced_classes.FactoredState, traced_classes.PointState),
    ],
)
def test_resume(cls: type[Optimizer], mode: str) -> None:
    """From a checkpoint of a stock run, and back."""
    saved: dict[str, Any] = {}

    def save(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 5 and not saved:
            saved.update(copy.deepcopy({"m": model.state_dict(), "o": optimizer.state_dict()}))

    def resume(wrap: Wrap) -> Any:
        model = Net()
        model.load_state_dict(saved["m"])
        optimizer = wrap(cls(parameters(model)))  # type: ignore[call-arg]
        optimizer.load_state_dict(copy.deepcopy(saved["o"]))
        for step in range(5, 12):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    train(cls, fused("forward"), each=save)
    assert difference("", resume(fused(mode)), resume(lambda optimizer: optimizer)) is None


@pytest.mark.parametrize(
    "cls", [traced_classes.AdaBelief, traced_classes.WritesGradient, traced_classes.TrustRatio]
)
def test_clipping(cls: type[Optimizer]) -> None:
    def clip(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def clip_ours(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        optfuse.clip_grad_norm_(model.parameters(), 0.05)

    stock = train(cls, each=clip)
    expect_same(train(cls, fused("forward"), each=clip), stock)
    expect_same(train(cls, fused("forward"), each=clip_ours), stock)
    expect_same(train(cls, fused("forward", max_grad_norm=0.05)), stock)


def test_a_gradient_that_is_looked_at_is_as_the_class_leaves_it() -> None:
    looked: dict[bool, list[Tensor]] = {True: [], False: []}

    def look(which: bool) -> Callable[[int, nn.Module, Optimizer], None]:
        def each(step: int, model: nn.Module, optimizer: Optimizer) -> None:
            optimizer.step()
            looked[which] += [p.grad.clone() for p in model.parameters() if p.grad is not None]

        return each

    cls = traced_classes.WritesGradient
    expect_same(train(cls, fused("forward"), each=look(True)), train(cls, each=look(False)))
    assert difference("", looked[True], looked[False]) is None


def test_accumulation_and_schedulers() -> None:
    def training(wrap: Wrap, mode: str) -> Any:
        torch.manual_seed(0)
        model = Net()
        optimizer = wrap(traced_classes.AdaBelief(parameters(model)))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(8):
            optimizer.zero_grad()
            for i in range(2):
                x, y = batch(2 * step + i)
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    stock = training(lambda optimizer: optimizer, "")
    for mode in MODES:
        options = {"accumulate": 2} if mode == "backward" else {}
        assert difference("", training(fused(mode, **options), mode), stock) is None


def test_groups_that_are_added() -> None:
    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        first, second = nn.Linear(9, 9), nn.Linear(9, 9)
        optimizer = wrap(traced_classes.AdaBelief(first.parameters()))
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.1})
            optimizer.zero_grad()
            second(first(torch.ones(2, 9))).square().mean().backward()
            optimizer.step()
        return copy.deepcopy([first.state_dict(), second.state_dict(), optimizer.state_dict()])

    assert difference("", training(fused("forward")), training(lambda o: o)) is None


def test_options_that_change_between_backward_and_step_are_refused() -> None:
    model = Net()
    optimizer = optfuse.fuse(traced_classes.AdaBelief(model.parameters()), mode="backward")
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(optfuse.Error, match="changed between"):
        optimizer.step()


def test_state_of_no_parameter_that_changes_there_is_refused_too() -> None:
    model = Net()
    optimizer = traced_classes.CounterOfAll(model.parameters())
    optimizer = optfuse.fuse(optimizer, mode="backward")
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 1:
            optimizer.state["k"] += 5  # type: ignore[index]
            with pytest.raises(optfuse.Error, match="changed between"):
                optimizer.step()
        else:
            optimizer.step()


def test_passes_of_parts_before_a_step() -> None:
    """Two losses of parts of the parameters; the counters of each advance once."""

    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        optimizer = wrap(traced_classes.AdaBelief(layers.parameters()))
        for step in range(6):
            optimizer.zero_grad()
            for layer in list(layers)[: 3 - step % 2]:
                layer(torch.ones(2, 9)).square().mean().backward()
            optimizer.step()
        return copy.deepcopy([layers.state_dict(), optimizer.state_dict()])

    stock = training(lambda optimizer: optimizer)
    for mode in MODES:
        assert difference("", training(fused(mode)), stock) is None


def test_groups_that_change_between_backward_and_step_are_refused() -> None:
    model, more = Net(), nn.Linear(3, 3)
    optimizer = optfuse.fuse(traced_classes.AdaBelief(model.parameters()), mode="backward")
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(optfuse.Error, match="between backward"):
        optimizer.add_param_group({"params": list(more.parameters())})
    optimizer.step()
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {1}


class CountsInList(Base):
    """A counter in a list, which is written in place."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state.setdefault("counts", [0])[0] += 1
        p.add_(grad, alpha=-group["lr"] / state["counts"][0])


class ByLength(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] * p.numel())


@pytest.mark.parametrize(
    "cls", [traced_classes.AdaBelief, traced_classes.TensorCounter, CountsInList, ByLength]
)
def test_what_changes_between_steps_is_seen(cls: type[Optimizer]) -> None:
    """Counters of some parameters, in place or not, and their shapes."""

    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(6)) for _ in range(4)]
        optimizer = wrap(cls(params))  # type: ignore[call-arg]
        for step in range(9):
            if step == 4 and "step" in optimizer.state[params[1]]:
                if cls is traced_classes.TensorCounter:  # no version counter tells
                    optimizer.state[params[1]]["step"].data.fill_(40.0)
                else:
                    optimizer.state[params[1]]["step"] = 40
            if step == 4 and "counts" in optimizer.state[params[1]]:
                optimizer.state[params[1]]["counts"][0] = 40
            if step == 4 and cls is ByLength:
                params[1].data = torch.randn(5)
                params[1].grad = None
            for param in params:
                param.grad = param.detach() + step
            optimizer.step()
        return copy.deepcopy([params, optimizer.state_dict()])

    assert difference("", training(fused("forward")), training(lambda o: o)) is None


# Those that look for a largest element refuse them.
EMPTY = [cls for cls in CALLING if cls.__name__ not in ("Doubles", "PointState")]


@pytest.mark.parametrize("cls", [traced_classes.TensorCounter, *EMPTY])
def test_parameters_without_elements(cls: type[Optimizer]) -> None:
    """Their memory, and that of their state, has no address."""

    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (0, 4), (4,))]
        optimizer = wrap(cls(params))  # type: ignore[call-arg]
        for step in range(3):
            for param in params:
                param.grad = param.detach() + step
            optimizer.step()
        return copy.deepcopy([params, optimizer.state_dict()])

    assert difference("", training(fused("forward")), training(lambda o: o)) is None


def test_a_step_that_fails_before_it_begins_leaves_no_programs() -> None:
    model = Net()
    optimizer = optfuse.fuse(traced_classes.AdaBelief(model.parameters()))
    x, y = batch(0)
    for step in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        entry = optimizer.state.get(model.out.weight)
        if step == 1:
            assert entry is not None
            kept = entry["exp_avg"]
            entry["exp_avg"] = kept[:1].clone()
            with pytest.raises(optfuse.Error, match="shape"):
                optimizer.step()
            entry["exp_avg"] = kept
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    assert optimizer.state[model.out.weight]["step"] == 3
    assert "param = 0.995 param" in optfuse.explain(optimizer)


def test_copies_and_pickles() -> None:
    model = Net()
    optimizer = optfuse.fuse(traced_classes.AdaBelief(model.parameters()))
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    pair = copy.deepcopy((model, optimizer))
    stock = pickle.loads(pickle.dumps((model, optimizer)))
    assert link_of(pair[1]).traced is not None
    for one, other in ((model, optimizer), pair, stock):
        other.zero_grad()
        nn.functional.cross_entropy(one(x), y).backward()
        other.step()
    expect_same(seen(*pair), seen(model, optimizer))
    expect_same(seen(*stock), seen(model, optimizer))


def test_explain() -> None:
    model = Net()
    optimizer = optfuse.fuse(traced_classes.AdaBelief(model.parameters(), lr=0.25))
    assert "no step yet" in optfuse.explain(optimizer)
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    text = optfuse.explain(optimizer)
    assert "exp_avg_var" in text
    assert "param = 0.9975 param" in text
    assert "traced" in str(optfuse.summary(optimizer))
    plain = optfuse.fuse(torch.optim.AdamW(Net().parameters()))
    assert "adam" in optfuse.explain(plain)


def test_a_failing_step_leaves_no_state_behind() -> None:
    model = Net()
    optimizer = optfuse.fuse(traced_classes.AdaBelief(model.parameters()))
    x, y = batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    weight = model.out.weight
    weight.grad = weight.grad.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(optfuse.Error, match="sparse"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]
    weight.grad = weight.grad.to_dense()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1
    assert torch.isfinite(optimizer.state[weight]["exp_avg"]).all()


@pytest.mark.parametrize("view", [False, True])
def test_distributed_data_parallel(gloo: Any, view: bool) -> None:
    def training(wrap: Callable[[Optimizer, Any], Optimizer]) -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(50, 70), nn.Tanh(), nn.Linear(70, 30))
        model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=view)
        optimizer = wrap(traced_classes.AdaBelief(model.parameters()), model)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((4, 50), float(step))).square().mean().backward()
            optimizer.step()
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    stock = training(lambda optimizer, _: optimizer)
    modes: tuple[Callable[[Any], Any], ...] = (
        lambda model: "forward",
        lambda model: optfuse.Forward(ddp=model),
        lambda model: optfuse.Backward(ddp=model),
    )
    for mode in modes:
        ours = training(lambda optimizer, model: optfuse.fuse(optimizer, mode(model)))  # noqa: B023
        assert difference("", ours, stock) is None


def test_loss_scaling() -> None:
    """With a step that is skipped, of a class that writes gradients."""

    def training(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(40, 40)
        optimizer = wrap(traced_classes.WritesGradient(model.parameters()))
        scaler = torch.amp.GradScaler("cpu")
        for step in range(8):
            optimizer.zero_grad()
            x = torch.full((4, 40), float("inf") if step == 4 else float(step))
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        grads = [p.grad for p in model.parameters()]
        states = [model.state_dict(), optimizer.state_dict(), scaler.state_dict()]
        return copy.deepcopy([states, grads])

    assert difference("", training(fused("forward")), training(lambda o: o)) is None


def test_late_updates() -> None:
    """As those of the same class with its own step()."""

    class Registered(traced_classes.AdaBelief):
        pass

    optfuse.register(Registered)

    def training(cls: type[Optimizer]) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        late = optfuse.Forward(delay={model[0]: 2, model[2]: 1})
        optimizer = optfuse.fuse(cls(model.parameters()), late)  # type: ignore[call-arg]
        for step in range(8):
            optimizer.zero_grad()
            model(torch.full((4, 5), float(step))).square().mean().backward()
            optimizer.step()
        optfuse.drain(optimizer)
        return copy.deepcopy([model.state_dict(), optimizer.state_dict()])

    assert difference("", training(traced_classes.AdaBelief), training(Registered)) is None


def test_several_threads_share_a_large_parameter() -> None:
    cls = traced_classes.AdaBelief
    traced_classes.beside_stock(
        cls, [nn.Parameter(torch.randn(300_001)) for _ in range(2)], steps=3
    )


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optfuse.fuse(traced_classes.AdaBelief(Net().parameters()))
