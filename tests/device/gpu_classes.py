# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels on a GPU, and what is done with them on its streams: scripts for
legal.py, one for each class and deed that stock can do."""

import copy

import gpu
import torch
from gpu import NAME
from legal import to_host
from recorded_classes import KINDS, Base
from test_gpu_moves import moved
from torch import nn
from torch.utils._pytree import tree_map_only

import optfuse
from optfuse._fused.recorded import last_counts

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = (3, 5), (4,), (2, 3, 2), (41,), (9001,)
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


class World:
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

    def gradients(self, i, some=None, **how):
        torch.manual_seed(i + 1)
        drawn = [torch.randn(p.shape).to(p.device, p.dtype) for p in self.params]
        if self.backward:
            self.optimizer.zero_grad()
            pairs = [(p, d) for p, d in zip(self.params, drawn, strict=True) if p is not some]
            sum((p * d + p * p * 0.25).sum().cpu() for p, d in pairs).backward(**how)
            return
        for p, d in zip(self.params, drawn, strict=True):
            p.grad = d

    def steps(self, n, begin=0):
        for i in range(begin, begin + n):
            self.gradients(i)
            self.optimizer.step()

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


def only_steps(world):
    world.steps(6)


#: Where parameters are, and of which dtype.
PLACES = [{"dtype": dtype} for dtype in DTYPES[1:]]
PLACES += [{"devices": GPUS}, {"devices": ("cpu", *GPUS)}]
IN_BOTH = [other_streams, who_waits_for_step_sees_it, another_current_device, moves, only_steps]
DEEDS = {deed.__name__: (deed, {}) for deed in IN_BOTH}
DEEDS |= {f"only_steps, {how}": (only_steps, how) for how in PLACES}
#: With gradients that are there, and by backward().
IN_FORWARD = [gradients_of_another_stream, a_captured_step, scaled_gradients]
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
    "Inner": ("devices", "moves"),
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
