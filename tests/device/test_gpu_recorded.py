# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels on a GPU whose step() is recorded: its operators run on the streams on
which they were called, elementwise ones by kernels/cuda/program.cu."""

import copy
from pathlib import Path

import gpu
import pytest
import test_recorded
import torch
from common import Fused, adamw, assert_same, python_ok
from gpu import NAME, captured
from legal import in_order, legal, net, play, races_without, settle, to_host, train, training
from recorded_classes import KINDS, Base
from stream_programs import describe, draw, mended, run
from style_classes import ON_ANY_DEVICE
from test_gpu_moves import moved
from test_operators import CALLS, ELEMENTWISE, special
from torch import nn
from torch.utils._pytree import tree_map_only

import optfuse
from optfuse._fused.recorded import last_counts

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = (3, 5), (4,), (2, 3, 2), (41,), (9001,)
HERE = Path(__file__).resolve().parent
GPUS = [f"{NAME}:0", f"{NAME}:1"]
BY_NUMPY = ("Looks", "Addresses", "KeepsAnAddress")  # which takes no tensor on a GPU
CLASSES = {name: cls for name, cls in KINDS.items() if name not in BY_NUMPY}


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


@kind
class Replaces(Base):
    """Its state are other tensors after each step."""

    def one(self, p, group, state):
        state["m"] = state["m"] * 0.5 + p.grad
        state["v"] = state["m"].sum()
        p.sub_(state["m"] * state["v"], alpha=group["lr"] * 0.1)


class World(test_recorded.World):
    """A small training, of which everything is compared. backward: gradients come by backward()."""

    def __init__(self, cls, wrap, devices=(NAME,), dtype=torch.float32, backward=False):
        self.wrap, self.fused, self.noted, self.backward = wrap, wrap.fused, [], backward
        if GPUS[1] in devices:
            gpu.second()  # skips where there is none
        self.params = [
            nn.Parameter(torch.randn(shape).to(devices[i % len(devices)], dtype))
            for i, shape in enumerate(SHAPES)
        ]
        groups = [{"params": self.params[:2]}, {"params": self.params[2:]}]
        self.optimizer = wrap(cls(groups))

    def gradients(self, i, params=None, some=None, **how):
        torch.manual_seed(i + 1)
        params = params or self.params
        drawn = [torch.randn(p.shape).to(p.device, p.dtype) for p in params]
        if self.backward:
            self.optimizer.zero_grad()
            pairs = [(p, d) for p, d in zip(params, drawn, strict=True) if p is not some]
            sum((p * d + p * p * 0.25).sum().cpu() for p, d in pairs).backward(**how)
            return
        for p, d in zip(params, drawn, strict=True):
            p.grad = d

    def loss(self):
        self.optimizer.zero_grad()
        loss = sum((p * p).sum().cpu() for p in self.params)
        loss.backward()
        return loss

    def passes_ahead(self):
        """Backward passes at whose first gradient step() has run."""
        return self.optimizer._optfuse_link.updater.passes_ahead if self.fused else None

    def end(self):
        gpu.synchronize_all()
        yield "noted", to_host(self.noted)
        yield "parameters", self.params
        yield "state", self.optimizer.state_dict()
        if not self.backward:
            yield "gradients", [p.grad for p in self.params]
            yield "versions", [p._version for p in self.params]


def other_streams(world):
    """Each step on another stream, which waits for the one before."""
    for i in range(5):
        stream = gpu.stream()
        stream.wait_stream(gpu.current())
        with stream:
            world.steps(1, i)
        gpu.current().wait_stream(stream)


def gradients_of_another_stream(world):
    stream, main = gpu.stream(), gpu.current()
    for i in range(4):
        with stream:
            world.gradients(i)
        main.wait_stream(stream)
        world.optimizer.step()
        stream.wait_stream(main)


def who_waits_for_step_sees_it(world):
    stream = gpu.stream()
    for i in range(4):
        world.steps(1, i)
        stream.wait_event(gpu.current().record_event())
        with stream:
            world.noted.append([p + 1 for p in world.params])
        gpu.current().wait_stream(stream)


def there(device):
    return lambda tensor: tensor.to(device)


def moves(world):
    """To the CPU, and to the other GPU."""
    model = nn.ParameterList(world.params)
    for i, device in enumerate((NAME, "cpu", NAME, gpu.second())):
        moved(model, device)
        for p in world.params:
            state = world.optimizer.state[p]
            state.update(tree_map_only(torch.Tensor, there(device), dict(state)))
        gpu.synchronize_all()
        world.steps(2, 2 * i)


def another_current_device(world):
    world.steps(2)
    with torch.accelerator.device_index(torch.device(gpu.second()).index):
        world.steps(2, 2)


def a_captured_step(world):
    world.steps(3)
    world.gradients(3)
    gpu.synchronize_all()
    with gpu.captured(gpu.stream()):
        world.optimizer.step()
        if world.fused and type(world.optimizer).__name__ not in ("Inner", "ToTheHost"):
            assert last_counts()["lines"] == 0
    gpu.synchronize_all()
    world.steps(2, 4)


def scaled_gradients(world):
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**10, growth_interval=2)
    for i in range(4):
        world.optimizer.zero_grad()
        loss = sum((p * p).sum() for p in world.params) * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(world.optimizer)
        scaler.update()
    world.noted.append(scaler.get_scale())


def step_on_another_stream(world):
    stream, main = gpu.stream(), gpu.current()
    for i in range(6):
        world.gradients(i)
        stream.wait_stream(main)
        with stream:
            world.optimizer.step()
        main.wait_stream(stream)


def a_stream_for_each_parameter(world):
    """The gradient is complete where the parameter was used."""
    streams, main = [gpu.stream() for _ in world.params], gpu.current()
    for i in range(6):
        for stream in streams:
            stream.wait_stream(main)
        world.optimizer.zero_grad()
        parts = []
        for p, stream in zip(world.params, streams, strict=True):
            with stream:
                parts.append((p * p * (i + 1)).sum())
        for stream in streams:
            main.wait_stream(stream)
        sum(parts).backward()
        world.optimizer.step()


def differing_passes(how):
    """Every fourth pass is another one: `how` gives its gradients' arguments."""

    def deed(world):
        for i in range(8):
            world.gradients(i, **(how(world) if i % 4 == 3 else {}))
            world.optimizer.step()

    return deed


def a_hook_reads_the_others_on_its_stream(world):
    """In backward(), before its own update and beside those of others."""
    stream, p = gpu.stream(), world.params[0]

    def hook(_):
        here = gpu.current()
        stream.wait_stream(here)
        with stream:
            world.seen = p.detach() * 2
        here.wait_stream(stream)

    world.params[1].register_hook(hook)
    world.steps(6)


def a_captured_iteration(world):
    world.steps(4)
    gpu.synchronize_all()
    with gpu.captured(gpu.stream()):
        world.gradients(4)
        world.optimizer.step()
    gpu.synchronize_all()
    world.steps(4, 5)


ANYWHERE = test_recorded.DEEDS
#: Where parameters are, and of which dtype.
PLACES = [{"dtype": dtype} for dtype in DTYPES[1:]]
PLACES += [{"devices": GPUS}, {"devices": ("cpu", *GPUS)}]
IN_BOTH = [other_streams, who_waits_for_step_sees_it, another_current_device, moves]
IN_BOTH += [ANYWHERE[name] for name in ("only_steps", "another_thread")]
DEEDS = {deed.__name__: (deed, {}) for deed in IN_BOTH}
DEEDS |= {f"only_steps, {how}": (ANYWHERE["only_steps"], how) for how in PLACES}
#: With gradients that are there, and by backward().
IN_FORWARD = [gradients_of_another_stream, a_captured_step, scaled_gradients]
IN_FORWARD += [ANYWHERE[name] for name in ("closures", "a_copy", "gradients_in_one_memory")]
IN_BACKWARD = [step_on_another_stream, a_stream_for_each_parameter, a_captured_iteration]
IN_BACKWARD += [a_hook_reads_the_others_on_its_stream]
FORWARD = DEEDS | {deed.__name__: (deed, {}) for deed in IN_FORWARD}
BACKWARD = DEEDS | {deed.__name__: (deed, {}) for deed in IN_BACKWARD}
BACKWARD |= {
    "some_of_them": (differing_passes(lambda world: {"some": world.params[3]}), {}),
    "inputs_are_named": (differing_passes(lambda world: {"inputs": world.params[:2]}), {}),
    "kept_graphs": (differing_passes(lambda world: {"retain_graph": True}), {}),
}
WAYS = {"forward": "forward", "backward": optfuse.Backward()}
WAYS |= {"aside": optfuse.Backward(side_stream=True)}

#: Classes whose step() can run at a pass's first gradient, wherever the parameters are.
AHEAD = ("Elementwise", "Lists", "Norms", "Masks", "Views", "OldStyle", "Gathers", "Capturable",
         "CapturableLists", "WideStrides", "Replaces")  # fmt: skip
#: Stock does not do these: operands on two devices, waits of the host inside of a capture.
NOT = {
    "Coupled": ("devices", "moves"),
    "Lists": ("devices", "inputs"),
    "ToTheHost": ("captured",),
    "Beside": ("cpu", "moves"),
    "Inner": ("devices", "moves", "a_copy"),
    "Gathers": ("other_streams", "captured"),
    "Replaces": ("other_streams", "captured"),
    "NumbersFirst": ("devices",),  # gradients of another stream
}
CASES = [
    (way, name, work)
    for way in WAYS
    for name in CLASSES
    for work in (FORWARD if way == "forward" else BACKWARD)
    if not any(word in work for word in NOT.get(name, ()))
]


def script_of(cls, work, backward=False):
    deed, how = (BACKWARD if backward else FORWARD)[work]

    def script(wrap):
        world = World(cls, wrap, backward=backward, **how)
        deed(world)
        if backward and wrap.fused and "cpu" not in how.get("devices", ()):
            assert cls.__name__ not in AHEAD or world.passes_ahead() > 0
        yield from world.end()

    return script


@pytest.mark.parametrize(("way", "name", "work"), CASES)
def test_order_and_bits_are_those_of_the_class(way, name, work):
    legal(script_of(CLASSES[name], work, way != "forward"), WAYS[way], prove=False)


MODES = ("forward", "backward")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [*ON_ANY_DEVICE, torch.optim.Adafactor], ids=lambda c: c.__name__)
def test_classes_in_other_styles(make, mode):
    def iteration(model, optimizer, i):
        getattr(optimizer, "train", bool)()
        train(model, optimizer, i)

    legal(training(make, iteration=iteration, steps=8), mode, prove=False)


@in_order("forward", prove=False)
def test_clipping_before_step(wrap):
    world = World(CLASSES["Elementwise"], wrap)
    clip = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
    for i in range(4):
        world.gradients(i)
        world.noted.append(clip(world.params, 0.5))
        world.optimizer.step()
    yield "norms", world.noted
    yield from world.end()


class ReadsOthers(Base):
    """Reads the weights of another optimizer, on a stream of its own."""

    read = staticmethod(lambda: None)

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        self.read()


def reads_in_step(wrap):
    model, own, stream, seen = net(), nn.Parameter(torch.ones(300).to(NAME)), gpu.stream(), []
    optimizer, reader = wrap(adamw(model.parameters())), wrap(ReadsOthers([own]))

    def read():
        with stream:
            seen.append(model[0].weight.detach() + 1)

    for i in range(3):
        train(model, optimizer, i)
        stream.wait_stream(gpu.current())
        own.grad = torch.ones_like(own)
        wrap.pending(optimizer) if wrap.fused else None
        reader.read = read
        reader.step()
        del reader.read
        gpu.current().wait_stream(stream)
    with stream:
        yield "seen", seen
    gpu.synchronize()


def test_a_step_that_reads_pending_weights_on_another_stream():
    legal(reads_in_step)


# Backward mode


def test_a_captured_pass_is_left_to_step(monkeypatch):
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "ahead_capture")
    script = script_of(CLASSES["Elementwise"], "a_captured_iteration", backward=True)
    with pytest.raises(optfuse.Error, match="which the steps before did not"):
        play(script, Fused("backward"))
    gpu.clear()


class OfTensorRate(Base):
    def one(self, p, group, state):
        p.sub_(p.grad * group["lr"])


@in_order("backward", prove=False)
def test_a_rate_on_the_gpu_is_read_by_the_update(wrap):
    rate = torch.tensor(0.1, device=NAME)
    world = World(lambda groups: OfTensorRate(groups, lr=rate), wrap, backward=True)
    for i in range(6):
        world.steps(1, i)
        rate.mul_(0.5)
    assert not wrap.fused or world.passes_ahead() == 4
    yield from world.end()


class MakesNumbers(Base):
    def one(self, p, group, state):
        state["made"] = torch.ones(()) * 2
        p.sub_(p.grad * state["made"], alpha=group["lr"])


@in_order("backward", prove=False)
def test_new_tensors_are_on_the_default_device_of_step(wrap):
    """Autograd's thread for a GPU has none of its own."""
    torch.set_default_device(GPUS[0])
    try:
        world = World(MakesNumbers, wrap, backward=True)
        world.steps(5)
    finally:
        torch.set_default_device(None)
    yield "devices", [str(world.optimizer.state[p]["made"].device) for p in world.params]
    assert not wrap.fused or world.passes_ahead() > 0
    yield from world.end()


def test_loss_scaling_is_refused_in_backward():
    world = World(CLASSES["Elementwise"], Fused("backward"), backward=True)
    scaler = torch.amp.GradScaler(NAME)
    with pytest.raises(optfuse.Error, match="GradScaler"):
        for _ in range(4):
            scaler.scale(sum((p * p).sum() for p in world.params)).backward()
            scaler.step(world.optimizer)
            scaler.update()


# Programs


SIZES = (1, 5, 16, 37, 1003, 9001)
LISTS = {
    "div number": lambda p, g: torch._foreach_div([p], 0.001)[0],
    "div numbers": lambda p, g: torch._foreach_div([p], [0.001])[0],
    "mul number": lambda p, g: torch._foreach_mul([p], 0.3)[0],
    "maximum": lambda p, g: torch._foreach_maximum([p], [g])[0],
    "minimum": lambda p, g: torch._foreach_minimum([p], [g])[0],
    "addcmul": lambda p, g: torch._foreach_addcmul([p], [g], [g], 1.0)[0],
    "pow": lambda p, g: torch._foreach_pow([p], 2)[0],
}
if gpu.IS_REAL:  # the roundings of others are not all played
    LISTS |= {name: lambda p, g, of=formula: of([p], [g])[0] for name, formula in CALLS}
FORMULAS = {**ELEMENTWISE, **{f"{name} of lists": of for name, of in LISTS.items()}}


class EachGroup(Base):
    """Each group's parameters become what the operator gives that the group names."""

    def one(self, p, group, state):
        p.copy_(FORMULAS[group["operator"]](p, p.grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_have_the_bits_of_pytorch(dtype):
    random = torch.Generator().manual_seed(1)
    by_operator, ran = set(), 0
    for name, formula in FORMULAS.items():
        params = [nn.Parameter(special(n, dtype, random).to(NAME)) for n in SIZES]
        optimizer = optfuse.fuse(EachGroup([{"params": params, "operator": name}]))
        for _ in range(3):  # the third runs programs
            for p in params:
                p.grad = special(p.numel(), dtype, random).to(NAME)
            try:
                wanted = [formula(p.detach(), p.grad) for p in params]
            except (RuntimeError, TypeError):
                assert gpu.IS_REAL, f"PyTorch has no {name} for this dtype"
                break
            optimizer.step()
            assert_same(name, [p.detach() for p in params], wanted)
        else:
            ran += 1
            if last_counts()["operators"]:
                by_operator.add(name)
    print(f"{dtype}: {ran - len(by_operator)} of {ran} by programs, by PyTorch: {by_operator}")
    assert gpu.IS_REAL or by_operator <= BY_OPERATOR, sorted(by_operator - BY_OPERATOR)
    assert ran - len(by_operator) > 40, "hardly an operator ran as a program"


# Numbers that are tensors on the GPU, and operators that no program has.
BY_OPERATOR = {"clamp tensors", "isnan", "lerp tensor", "sgn", "where first", "where second"}
BY_OPERATOR |= {"pow of lists"}


def fused(cls, n=4, steps=5, size=40, mode="forward"):
    params = [torch.ones(size + i, device=NAME, requires_grad=True) for i in range(n)]
    optimizer = optfuse.fuse(cls(params), mode)

    def step():
        if mode == "backward":
            optimizer.zero_grad()
            sum(p.sum() for p in params).backward()
        for p in params if mode == "forward" else ():
            p.grad = torch.ones_like(p)
        optimizer.step()

    for _ in range(steps - 1):
        step()
    return step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Elementwise", "Lists", "OldStyle"])
def test_parameters_that_are_alike_go_in_one_launch(name, mode):
    """Those of a for-loop, too: each has numbers of its own, and they are the same."""
    assert len(gpu.kernels(fused(CLASSES[name], mode=mode))) == 1


class TwoKinds(Base):
    def one(self, p, group, state):
        p.add_(p.grad, alpha=float(p.numel() % 2))


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_two_kinds_by_turns_go_in_two_launches(mode):
    assert len(gpu.kernels(fused(TwoKinds, n=8, mode=mode))) == 2


class OtherNumbers(Base):
    def one(self, p, group, state):
        p.add_(p.grad, alpha=float(p.numel()))


def test_other_numbers_are_another_launch():
    assert len(gpu.kernels(fused(OtherNumbers))) == 4


class Long(Base):
    """Half of what it does is one program, and the other half is the same one again."""

    def one(self, p, group, state):
        for _ in range(512):
            p.add_(p.grad, alpha=-0.001)


def test_a_program_that_needs_what_the_one_before_writes_is_another_launch(monkeypatch):
    assert len(gpu.kernels(fused(Long, n=1))) == 2
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "recorded_launch")
    # check_guard("recorded_launch", of lines that no schedule is known of
    assert len(gpu.kernels(fused(Long, n=1, size=41))) == 1


def test_lists_of_several_dtypes_are_pytorchs_own():
    """PyTorch takes them one by one there, and rounds so."""
    dtypes = torch.float32, torch.bfloat16
    params = [torch.ones(40, device=NAME, dtype=d, requires_grad=True) for d in dtypes]
    optimizer = optfuse.fuse(CLASSES["Lists"](params))
    for _ in range(5):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert last_counts()["programs"] == 0


class ManyTemporaries(Base):
    def one(self, p, group, state):
        kept = [p.grad * (0.1 + i) for i in range(17)]
        for x in kept:
            p.add_(x, alpha=-group["lr"])


@pytest.mark.parametrize("cls", [Long, ManyTemporaries])
def test_programs_that_are_too_large_are_several(cls):
    legal(training(cls), prove=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Elementwise", "Norms", "Capturable", "CapturableLists"])
def test_the_host_never_waits(name, mode):
    step = fused(CLASSES[name], mode=mode)  # operators have had their trials
    names = gpu.operators(step)
    assert names and "aten::_local_scalar_dense" not in names


def test_an_operator_with_other_bits_is_pytorchs_own():
    """On a GPU that rounds as the CPU does, where the kernels round as CUDA does."""
    script = f"""
import os, sys
sys.path[:0] = {[str(HERE), str(HERE.parent / "python"), str(HERE.parent / "python" / "recorded")]}
os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
import gpu
gpu.load()
import torch
from recorded_classes import Elementwise
import optfuse
from optfuse._fused.recorded import last_counts
params = [torch.linspace(0.1, 2, 300).to("fakecuda").requires_grad_() for _ in range(2)]
optimizers = optfuse.fuse(Elementwise(params[:1])), Elementwise(params[1:])
for i in range(5):
    for p, optimizer in zip(params, optimizers):
        p.grad = p.detach() * (1.5 + i)
        optimizer.step()
assert params[0].cpu().view(torch.int32).equal(params[1].cpu().view(torch.int32))
print("operators", last_counts()["operators"])
"""
    assert int(python_ok(script).split()[-1]) > 0


# The guards' controls


def passes_on_other_streams_than_steps(wrap):
    """Three by turns. What updates make is theirs, and dies beside another one."""
    params = [nn.Parameter(torch.randn(20 + i).to(NAME)) for i in range(3)]
    optimizer = wrap(Replaces(params))
    streams, main = [gpu.stream() for _ in range(3)], gpu.current()
    for i in range(9):
        stream = streams[i % 3]
        stream.wait_stream(main)
        with stream:
            sum((p * p).sum() for p in params).backward()
        main.wait_stream(stream)
        optimizer.step()
        stream.wait_stream(main)
        optimizer.zero_grad()
    yield "parameters", params
    gpu.synchronize()


class Counts(Base):
    """With numbers that an operator makes on the GPU at once."""

    def one(self, p, group, state):
        numbers = torch.arange(p.numel(), dtype=p.dtype, device=p.device).view_as(p)
        p.sub_(p.grad * numbers, alpha=group["lr"] * 1e-3)


class Elsewhere(Base):
    """All on a stream of its own; who calls step() waits for it, and it for who calls."""

    scale, stream = None, None

    def one(self, p, group, state):
        with self.stream:
            p.sub_(p.grad * self.scale, alpha=group["lr"])


def who_writes_on_its_stream(wrap):
    params = [nn.Parameter(torch.ones(40, device=NAME)) for _ in range(2)]
    optimizer, stream, main = wrap(Elsewhere(params)), gpu.stream(), gpu.current()
    optimizer.stream, optimizer.scale = stream, torch.ones((40,), device=NAME)
    stream.wait_stream(main)
    for _ in range(5):
        with stream:
            optimizer.scale.add_(1)
        sum((p * p).sum() for p in params).backward()
        stream.wait_stream(main)
        optimizer.step()
        main.wait_stream(stream)
        stream.wait_stream(main)
        optimizer.zero_grad()
    yield "parameters", params
    gpu.synchronize()


class Apart(Base):
    """Has something of its own on a stream that nobody waits for."""

    stream, own = None, None

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        with self.stream:
            self.own.mul_(0.5).add_(1)


def who_looks_on_its_stream(wrap):
    optimizer = wrap(Apart([nn.Parameter(torch.ones(40, device=NAME))]))
    optimizer.stream = gpu.stream()
    with optimizer.stream:
        optimizer.own = torch.ones(40, device=NAME)
    for _ in range(3):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        with optimizer.stream:
            yield "its own", optimizer.own
    gpu.synchronize()


class Tells(Base):
    """An event says that a parameter is new."""

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        group["told"] = torch.accelerator.current_stream(p.device).record_event()


def who_waits_for_an_event_of_step(wrap):
    p, reader = nn.Parameter(torch.ones(40, device=NAME)), gpu.stream()
    optimizer = wrap(Tells([p]))
    reader.wait_stream(gpu.current())
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        reader.wait_event(optimizer.param_groups[0]["told"])
        with reader:
            yield "parameter", p
        gpu.current().wait_stream(reader)


#: By guard: a script that races without it, and the mode.
CONTROLS = {
    "ahead_memory": (passes_on_other_streams_than_steps, "backward"),
    "ahead_at_once": (script_of(Counts, "a_stream_for_each_parameter", True), "backward"),
    "ahead_streams": (who_writes_on_its_stream, "backward"),
    "recorded_stream": (who_looks_on_its_stream, "forward"),
    "recorded_order": (who_waits_for_an_event_of_step, "forward"),
}


@pytest.mark.parametrize("guard", CONTROLS)
def test_an_order_that_is_kept_and_not_without_the_guard(guard, monkeypatch):
    script, mode = CONTROLS[guard]
    legal(script, mode, prove=False)
    races_without(guard, script, monkeypatch, mode)


def lines_of_a_captured_step():
    step = fused(CLASSES["Elementwise"])
    settle()
    with captured(gpu.stream()):
        step()
    settle()
    return last_counts()["lines"]


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


@pytest.mark.parametrize("way", WAYS)
def test_random_programs_on_three_streams(way):
    mode, fused = "forward" if way == "forward" else "backward", []

    def fuse(optimizer):
        fused.append(optfuse.fuse(optimizer, WAYS[way]))
        return fused[-1]

    for seed in range(60):
        program, stock = mended(draw(mode, seed, 24), Mine)
        ours = run(program, Mine, fuse)
        assert ours.failed_at is None, f"program {seed}: {ours.races}\n{describe(program)}"
        assert_same(f"program {seed}\n{describe(program)}", ours.values, stock.values)
    if mode == "backward":
        assert sum(o._optfuse_link.updater.passes_ahead for o in fused) > 60
