# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels on a GPU whose step() is recorded: its operators run on the streams on
which they were called, elementwise ones by kernels/cuda/program.cu."""

import copy
import threading
from pathlib import Path

import fakecuda
import pytest
import torch
from common import assert_same, everything, python_ok
from fakecuda import NAME
from legal import legal, net, races_without, settle, train
from own_classes import Tensors
from programs import describe, draw, mended, run
from recorded_classes import KINDS, Base
from style_classes import ON_ANY_DEVICE
from test_captures import captured
from test_gpu_moves import moved
from test_gpu_traced import FORMULAS, SIZES, EachGroup
from test_operators import special
from torch import nn
from torch.utils._pytree import tree_map_only

import optfuse
from optfuse import _recorded

pytestmark = pytest.mark.usefixtures("rounds_as_cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = (3, 5), (4,), (2, 3, 2), (41,), (9001,)
HERE = Path(__file__).resolve().parent
GPUS = [f"{NAME}:0", f"{NAME}:1"]
BY_NUMPY = ("Looks", "Addresses", "KeepsAnAddress")  # which takes no tensor on a GPU
CLASSES = {name: cls for name, cls in KINDS.items() if name not in BY_NUMPY}
DEEDS = {}


def kind(cls):
    CLASSES[cls.__name__] = cls
    return cls


@kind
class Beside(Base):
    """Works on a stream of its own, which waits for the one that calls it, and is waited for."""

    def one(self, p, group, state):
        caller, own = torch.accelerator.current_stream(p.device), self.beside(p.device)
        state["m"].mul_(0.5).add_(p.grad)
        own.wait_stream(caller)
        with own:
            state["v"].addcmul_(state["m"], p.grad).abs_()
            made = state["v"] + state["m"]
            event = own.record_event()
        p.mul_(0.999)  # which the other stream does not touch
        caller.wait_event(event)
        p.sub_(made.abs(), alpha=group["lr"])
        made.record_stream(caller)

    def beside(self, device):
        if device not in self.arrays:
            self.arrays[device] = torch.Stream(device)
        return self.arrays[device]

    def __deepcopy__(self, memo):
        return copy.copy(self)


@kind
class ToTheHost(Base):
    """Copies from and to the host's memory."""

    def one(self, p, group, state):
        state["m"].mul_(0.5).add_(p.grad)
        host = state["m"].to("cpu")
        state["v"].copy_(host * 2)
        size = torch.tensor(0.0)
        size.copy_(state["v"].abs().max())
        p.sub_(state["v"], alpha=group["lr"] / (1 + float(size)))


class World:
    """A small training, of which everything is compared."""

    def __init__(self, cls, wrap, devices=(NAME,), dtype=torch.float32):
        self.wrap, self.noted = wrap, []
        self.params = [
            nn.Parameter(torch.randn(shape).to(devices[i % len(devices)], dtype))
            for i, shape in enumerate(SHAPES)
        ]
        groups = [{"params": self.params[:2]}, {"params": self.params[2:]}]
        self.optimizer = wrap(cls(groups))

    def gradients(self, i):
        torch.manual_seed(i + 1)
        for p in self.params:
            p.grad = torch.randn(p.shape).to(p.device, p.dtype)

    def steps(self, n, begin=0):
        for i in range(begin, begin + n):
            self.gradients(i)
            self.optimizer.step()

    def loss(self):
        self.optimizer.zero_grad()
        loss = sum((p * p).sum().cpu() for p in self.params)
        loss.backward()
        return loss

    def end(self):
        settle_devices()
        yield "parameters", self.params
        yield "gradients", [p.grad for p in self.params]
        yield "state", self.optimizer.state_dict()
        yield "versions", [p._version for p in self.params]


def settle_devices():
    fakecuda.synchronize(0)
    fakecuda.synchronize(1)


def deed(function, **how):
    def script_of(cls):
        def script(wrap):
            world = World(cls, wrap, **how)
            function(world)
            yield from world.end()

        return script

    DEEDS[function.__name__ if not how else f"{function.__name__}, {how}"] = script_of
    return function


@deed
def only_steps(world):
    world.steps(5)


for of in DTYPES[1:]:
    deed(only_steps, dtype=of)
deed(only_steps, devices=GPUS)
deed(only_steps, devices=("cpu", *GPUS))


@deed
def closures(world):
    for _ in range(4):
        world.optimizer.step(world.loss)


@deed
def other_streams(world):
    """Each step on another stream, which waits for the one before."""
    for i in range(5):
        stream = fakecuda.stream()
        stream.wait_stream(fakecuda.current())
        with stream:
            world.steps(1, i)
        fakecuda.current().wait_stream(stream)


@deed
def gradients_of_another_stream(world):
    stream, main = fakecuda.stream(), fakecuda.current()
    for i in range(4):
        with stream:
            world.gradients(i)
        main.wait_stream(stream)
        world.optimizer.step()
        stream.wait_stream(main)


@deed
def who_waits_for_step_sees_it(world):
    stream = fakecuda.stream()
    for i in range(4):
        world.steps(1, i)
        stream.wait_event(fakecuda.current().record_event())
        with stream:
            world.noted.append([p + 1 for p in world.params])
        fakecuda.current().wait_stream(stream)


def there(device):
    return lambda tensor: tensor.to(device)


@deed
def moves(world):
    """To the CPU, and to the other GPU."""
    model = nn.ParameterList(world.params)
    for i, device in enumerate((NAME, "cpu", NAME, GPUS[1])):
        moved(model, device)
        for p in world.params:
            state = world.optimizer.state[p]
            state.update(tree_map_only(torch.Tensor, there(device), dict(state)))
        settle_devices()
        world.steps(2, 2 * i)


@deed
def another_current_device(world):
    world.steps(2)
    with torch.accelerator.device_index(1):
        world.steps(2, 2)


@deed
def a_captured_step(world):
    world.steps(3)
    settle_devices()
    stream = fakecuda.stream()
    world.gradients(3)
    settle_devices()
    with captured(stream):
        world.optimizer.step()
        if world.wrap.fused and type(world.optimizer).__name__ not in ("Inner", "ToTheHost"):
            assert _recorded.last_counts()["lines"] == 0
    settle_devices()
    world.steps(2, 4)


@deed
def scaled_gradients(world):
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**10, growth_interval=2)
    for i in range(4):
        world.optimizer.zero_grad()
        loss = sum((p * p).sum() for p in world.params) * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(world.optimizer)
        scaler.update()
    world.noted.append(scaler.get_scale())


@deed
def another_thread(world):
    world.steps(2)
    thread = threading.Thread(target=world.steps, args=(3, 2))
    thread.start()
    thread.join()


@deed
def a_copy(world):
    world.steps(2)
    twin = copy.deepcopy(world.optimizer)
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    twin.step()
    world.steps(2, 2)


@deed
def gradients_in_one_memory(world):
    for i in range(4):
        torch.manual_seed(i)
        flat, at = torch.randn(sum(p.numel() for p in world.params)).to(NAME), 0
        for p in world.params:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        world.optimizer.step()


# Stock does not do these: operands on two devices, waits of the host inside of a capture.
NOT = {
    "Coupled": ("devices", "moves"),
    "Lists": ("devices",),
    "ToTheHost": ("captured",),
    "Beside": ("cpu", "moves"),
    "Inner": ("devices", "moves", "a_copy"),
    "Gathers": ("other_streams", "captured"),  # gradients of another stream
}


def goes_with(name, work):
    return not any(word in work for word in NOT.get(name, ()))


PAIRS = [(name, work) for name in CLASSES for work in DEEDS if goes_with(name, work)]


@pytest.mark.parametrize(("name", "work"), PAIRS)
def test_order_and_bits_are_those_of_the_class(name, work):
    legal(DEEDS[work](CLASSES[name]), prove=False, recorded=True)


def of_a_model(make, steps=5):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        getattr(optimizer, "train", bool)()
        for i in range(steps):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize(
    "make",
    [*ON_ANY_DEVICE, Tensors] + [torch.optim.Adafactor],
    ids=lambda cls: cls.__name__,
)
def test_classes_that_are_traced_and_that_are_not(make):
    legal(of_a_model(make), prove=False, recorded=True)


@pytest.mark.parametrize("name", ["Elementwise", "Lists", "Norms", "Capturable"])
def test_backward_mode_leaves_them_to_step(name):
    legal(of_a_model(CLASSES[name]), "backward", prove=False, recorded=True)


# Programs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_have_the_bits_of_pytorch(dtype):
    random = torch.Generator().manual_seed(1)
    by_operator = set()
    for name, formula in FORMULAS.items():
        params = [nn.Parameter(special(n, dtype, random).to(NAME)) for n in SIZES]
        optimizer = optfuse.fuse(EachGroup([{"params": params, "operator": name}]), recorded=True)
        for _ in range(3):  # the third runs programs
            for p in params:
                p.grad = special(p.numel(), dtype, random).to(NAME)
            wanted = [formula(p.detach(), p.grad) for p in params]
            optimizer.step()
            assert_same(name, [p.detach() for p in params], wanted)
        if _recorded.last_counts()["operators"]:
            by_operator.add(name)
    assert by_operator <= BY_OPERATOR, sorted(by_operator - BY_OPERATOR)


# Numbers that are tensors on the GPU, and operators that no program has.
BY_OPERATOR = {"clamp tensors", "isnan", "lerp tensor", "sgn", "where first", "where second"}


def launched(work):
    """The kernels of ours."""
    torch.ops.fakecuda.set_logging(True)
    work()
    texts = torch.ops.fakecuda.launches()
    torch.ops.fakecuda.set_logging(False)
    return [text for text in texts if text.startswith("of_cuda_")]


def fused(cls, n=4, steps=5, size=40):
    params = [torch.ones(size + i, device=NAME, requires_grad=True) for i in range(n)]
    optimizer = optfuse.fuse(cls(params), recorded=True)

    def step():
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()

    for _ in range(steps - 1):
        step()
    return step


@pytest.mark.parametrize("name", ["Elementwise", "Lists", "OldStyle"])
def test_parameters_that_are_alike_go_in_one_launch(name):
    """Those of a for-loop, too: each has numbers of its own, and they are the same."""
    assert len(launched(fused(CLASSES[name]))) == 1


class OtherNumbers(Base):
    def one(self, p, group, state):
        p.add_(p.grad, alpha=float(p.numel()))


def test_other_numbers_are_another_launch():
    assert len(launched(fused(OtherNumbers))) == 4


class Long(Base):
    """Half of what it does is one program, and the other half is the same one again."""

    def one(self, p, group, state):
        for _ in range(512):
            p.add_(p.grad, alpha=-0.001)


def test_a_program_that_needs_what_the_one_before_writes_is_another_launch(monkeypatch):
    assert len(launched(fused(Long, n=1))) == 2
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "recorded_launch")
    # check_guard("recorded_launch", of lines that no schedule is known of
    assert len(launched(fused(Long, n=1, size=41))) == 1


def test_lists_of_several_dtypes_are_pytorchs_own():
    """PyTorch takes them one by one there, and rounds so."""
    dtypes = torch.float32, torch.bfloat16
    params = [torch.ones(40, device=NAME, dtype=d, requires_grad=True) for d in dtypes]
    optimizer = optfuse.fuse(CLASSES["Lists"](params), recorded=True)
    for _ in range(5):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert _recorded.last_counts()["programs"] == 0


class ManyTemporaries(Base):
    def one(self, p, group, state):
        kept = [p.grad * (0.1 + i) for i in range(17)]
        for x in kept:
            p.add_(x, alpha=-group["lr"])


@pytest.mark.parametrize("cls", [Long, ManyTemporaries])
def test_programs_that_are_too_large_are_several(cls):
    legal(of_a_model(cls), prove=False, recorded=True)


@pytest.mark.parametrize("name", ["Elementwise", "Norms", "Capturable", "CapturableLists"])
def test_the_host_never_waits(name):
    step = fused(CLASSES[name])  # operators have had their trials
    torch.ops.fakecuda.set_logging(True)
    step()
    names = {text.split()[0] for text in torch.ops.fakecuda.launches()}
    torch.ops.fakecuda.set_logging(False)
    assert names and "aten::_local_scalar_dense" not in names


def test_an_operator_with_other_bits_is_pytorchs_own():
    """On a GPU that rounds as the CPU does, where the kernels round as CUDA does."""
    script = f"""
import os, sys
sys.path[:0] = {[str(HERE), str(HERE.parent / "python"), str(HERE.parent / "python" / "recorded")]}
os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
import fakecuda
fakecuda.load()
import torch
from recorded_classes import Elementwise
import optfuse
params = [torch.linspace(0.1, 2, 300).to("fakecuda").requires_grad_() for _ in range(2)]
optimizers = optfuse.fuse(Elementwise(params[:1]), recorded=True), Elementwise(params[1:])
for i in range(5):
    for p, optimizer in zip(params, optimizers):
        p.grad = p.detach() * (1.5 + i)
        optimizer.step()
assert params[0].cpu().view(torch.int32).equal(params[1].cpu().view(torch.int32))
print("operators", optfuse._recorded.last_counts()["operators"])
"""
    assert int(python_ok(script).split()[-1]) > 0


# The guards' controls


class Apart(Base):
    """Has something of its own on a stream that nobody waits for."""

    stream, own = None, None

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        with self.stream:
            self.own.mul_(0.5).add_(1)


def who_looks_on_its_stream(wrap):
    optimizer = wrap(Apart([nn.Parameter(torch.ones(40, device=NAME))]))
    optimizer.stream = fakecuda.stream()
    with optimizer.stream:
        optimizer.own = torch.ones(40, device=NAME)
    for _ in range(3):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        with optimizer.stream:
            yield "its own", optimizer.own
    fakecuda.synchronize()


def test_a_line_runs_on_its_stream():
    legal(who_looks_on_its_stream, prove=False, recorded=True)


def test_without_its_stream_a_line_races(monkeypatch):
    # check_guard("recorded_stream"
    races_without("recorded_stream", who_looks_on_its_stream, monkeypatch, recorded=True)


class Tells(Base):
    """An event says that a parameter is new."""

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        group["told"] = torch.accelerator.current_stream(p.device).record_event()


def who_waits_for_an_event_of_step(wrap):
    p, reader = nn.Parameter(torch.ones(40, device=NAME)), fakecuda.stream()
    optimizer = wrap(Tells([p]))
    reader.wait_stream(fakecuda.current())
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        reader.wait_event(optimizer.param_groups[0]["told"])
        with reader:
            yield "parameter", p
        fakecuda.current().wait_stream(reader)


def test_an_event_that_step_records_stands_for_the_lines_before():
    legal(who_waits_for_an_event_of_step, prove=False, recorded=True)


def test_without_that_it_would_not(monkeypatch):
    # check_guard("recorded_order"
    races_without("recorded_order", who_waits_for_an_event_of_step, monkeypatch, recorded=True)


def lines_of_a_captured_step():
    step = fused(CLASSES["Elementwise"])
    settle()
    with captured(fakecuda.stream()):
        step()
    settle()
    return _recorded.last_counts()["lines"]


def test_what_is_captured_runs_at_once(monkeypatch):
    assert lines_of_a_captured_step() == 0
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "recorded_capture")
    assert lines_of_a_captured_step() > 0  # check_guard("recorded_capture"


# Random programs


class Mine(Base):
    """With no state but tensors on the GPU."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["m"].mul_(0.9).add_(p.grad)
            state["v"].addcmul_(p.grad, p.grad, value=0.1)
            p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-3), value=-0.1)


def test_random_programs_on_three_streams():
    for seed in range(60):
        program, stock = mended(draw("forward", seed, 24), Mine)
        ours = run(program, Mine, lambda o: optfuse.fuse(o, recorded=True))
        assert ours.failed_at is None, f"program {seed}: {ours.races}\n{describe(program)}"
        assert_same(f"program {seed}\n{describe(program)}", ours.values, stock.values)
