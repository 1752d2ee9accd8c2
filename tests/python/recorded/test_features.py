# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer whose step() is recorded can do all that a fused one can, with stock's bits."""

import copy
import gc
import io
import os
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from common import differing
from recorded_classes import KINDS, Base
from test_recorded import World, compare, only_steps
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optfuse
from optfuse._options import is_recorded

FEATURES = {}


def feature(function):
    FEATURES[function.__name__] = function
    return function


class Clipped(World):
    """Stock clips before step(); ours in it."""

    def fuse(self, optimizer):
        if not self.fused:
            return optimizer
        return optfuse.fuse(optimizer, optfuse.Forward(max_grad_norm=0.5), recorded=True)

    def steps(self, n, begin=0):
        for i in range(begin, begin + n):
            self.gradients(i)
            if not self.fused:
                clip_grad_norm_(self.params, 0.5)
            self.optimizer.step()

    def closure(self):
        def loss():
            value = self.loss()
            if not self.fused:
                clip_grad_norm_(self.params, 0.5)
            return value

        return loss


@pytest.mark.parametrize("name", [k for k in KINDS if k != "OldStyle"])
def test_max_grad_norm_has_the_bits_of_clipping_before_step(name):
    compare(KINDS[name], lambda world: world.steps(5), make=Clipped)


@pytest.mark.parametrize("named", [False, True])
def test_max_grad_norm_clips_what_a_closure_leaves(named):
    def work(world):
        for _ in range(4):
            how = {"closure": world.closure()} if named else {}
            world.note(world.optimizer.step(*([] if named else [world.closure()]), **how))

    compare(KINDS["Elementwise"], work, make=Clipped)
    compare(KINDS["Coupled"], work, make=Clipped)


@feature
def a_scaler(world):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for i in range(6):
        world.optimizer.zero_grad()
        loss = sum((p * p).sum() for p in world.params) * (float("inf") if i == 3 else 1.0)
        scaler.scale(loss).backward()
        if i % 2:
            scaler.unscale_(world.optimizer)
            world.note(clip_grad_norm_(world.params, 1.0))
        scaler.step(world.optimizer)
        scaler.update()
        world.note([scaler.get_scale(), world.params])


@feature
def averages(world):
    model = torch.nn.ParameterList(world.params)
    made = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    for i in range(5):
        world.steps(1, i)
        for average in made:
            average.update_parameters(model)
    world.note([list(average.parameters()) for average in made])


@feature
def accumulated_gradients(world):
    for _ in range(4):
        world.loss()
        with optfuse.accumulate(world.optimizer):
            sum(p.sin().sum() for p in world.params).backward()
        world.optimizer.step()


@feature
def two_optimizers_of_the_same_parameters(world):
    world.notes_versions = False  # kernels count their writes, and PyTorch's do not
    other = torch.optim.Adam(world.params, lr=0.01, fused=True)
    if world.fused:
        optfuse.fuse(other)
    for i in range(5):
        world.steps(1, i)
        other.step()
        world.optimizer.step()
        world.note(list(other.state_dict()["state"].values()))


@feature
def two_that_are_recorded(world):
    other = world.fuse(KINDS["Norms"](world.params))
    for i in range(5):
        world.steps(1, i)
        other.step()


@feature
def one_state_of_two_optimizers(world):
    other = world.fuse(type(world.optimizer)([dict(g) for g in world.optimizer.param_groups]))
    other.state = world.optimizer.state
    for i in range(5):
        world.steps(1, i)
        other.step()


@feature
def its_own_pickle(world):
    world.steps(2)
    twin = pickle.loads(pickle.dumps(world.optimizer))
    params = [p for g in twin.param_groups for p in g["params"]]
    world.gradients(9, params)
    assert not is_recorded(twin)
    twin.step()
    world.note(params)


@feature
def a_checkpoint_inside_of_a_hook(world):
    def save(optimizer, *_):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        world.note(list(torch.load(file)["state"].values()))

    world.optimizer.register_step_post_hook(save)
    world.steps(4)


@feature
def a_profiler(world):
    for shapes in (False, True):
        with torch.profiler.profile(record_shapes=shapes):
            world.steps(2, 2 * shapes)


@feature
def several_threads(world):
    threads = [
        threading.Thread(target=lambda o=o: [o.step() for _ in range(20)])
        for o in [world.fuse(type(world.optimizer)([p])) for p in world.params]
    ]
    world.gradients(1)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@feature
def code_for_torch_compile(world):
    """A fused optimizer's step() is not compiled, which would change its bits."""
    step = world.optimizer.step
    if world.fused:
        step = torch.compile(lambda: world.optimizer.step(), backend="eager")
    for i in range(3):
        world.gradients(i)
        step()


@feature
def a_wrapped_step(world):
    before = world.optimizer.step
    calls = []
    world.optimizer.step = lambda *args: (calls.append(1), before(*args))[1]
    world.steps(3)
    world.note(len(calls))


@feature
def a_wrapped_step_before_fuse(world):
    if world.fused:
        optfuse.unfuse(world.optimizer)
    stock = world.optimizer.step

    def twice():
        stock()
        stock()

    world.optimizer.step = twice
    world.fuse(world.optimizer)
    world.steps(3)


@feature
def in_groups_of_their_own(world):
    world.optimizer.zero_grad(set_to_none=False)
    world.steps(2)
    world.optimizer.zero_grad(set_to_none=False)
    world.optimizer.step()


@pytest.mark.parametrize("work", FEATURES)
@pytest.mark.parametrize("name", ["Elementwise", "Looks", "Norms", "Coupled", "Lists", "OldStyle"])
def test_each_feature_has_stocks_bits(name, work):
    compare(KINDS[name], FEATURES[work])


def test_a_copy_is_fused_with_its_options_and_a_pickle_is_stock():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=0.5)

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Plain([p]), optfuse.Forward(max_grad_norm=1.0), [p], recorded=True)
    model = {"p": p, "optimizer": optimizer}
    twin = copy.deepcopy(model)
    twin["p"].grad = torch.full((3,), 9.0)
    twin["optimizer"].step()
    stock = torch.nn.Parameter(torch.ones(3))
    stock.grad = torch.full((3,), 9.0)
    clip_grad_norm_([stock], 1.0)
    Plain([stock]).step()
    assert torch.equal(twin["p"], stock)
    assert torch.equal(p, torch.ones(3))
    assert optfuse.summary(twin["optimizer"]).eager == 1
    optfuse.unfuse(twin["optimizer"])
    assert not {"step", "__deepcopy__", "__getstate__"} & vars(twin["optimizer"]).keys()


def test_summary_and_explain_say_what_the_last_step_did():
    world = World(KINDS["Elementwise"], fused=True)
    world.steps(4)
    said = optfuse.summary(world.optimizer)
    assert (said.mode, said.parameters, said.pending) == ("forward", 4, 0)
    assert "4 programs and 0 operators" in said.own_step
    assert said.own_step in str(said)
    assert said.own_step in optfuse.explain(world.optimizer)
    optfuse.flush(world.optimizer)
    optfuse.drain(world.optimizer)
    optfuse.unfuse(world.optimizer)
    with pytest.raises(optfuse.Error, match="not fused"):
        optfuse.summary(world.optimizer)


def test_a_profilers_trace_has_the_lines_inside_of_the_step():
    world = World(KINDS["Norms"], fused=True)
    world.steps(3)
    with torch.profiler.profile() as profile:
        world.steps(1)
    names = [event.name for event in profile.events()]
    assert "optfuse::recorded" in names
    assert "Optimizer.step#Norms.step" in names


def test_memory_that_numpy_has_had_since_before_fuse_is_eager():
    class Reads(Base):
        def one(self, p, group, state):
            p.sub_(p.grad, alpha=group["lr"])
            self.seen.append(float(self.arrays[p].ravel()[0]))
            self.arrays[p] *= np.float32(0.5)

    def run(fused):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(40))]
        optimizer = Reads(params)
        optimizer.arrays = {p: p.detach().numpy() for p in params}
        if fused:
            optfuse.fuse(optimizer, eager=params, recorded=True)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [*params, torch.tensor(optimizer.seen)]

    for a, b in zip(run(False), run(True), strict=True):
        assert not differing(a, b).any()
    with pytest.raises(optfuse.Error, match="not a parameter of this optimizer"):
        optfuse.fuse(
            Reads([torch.nn.Parameter(torch.ones(2))]), eager=[torch.ones(2)], recorded=True
        )


def test_register_changes_nothing_in_forward_mode():
    optfuse.register(KINDS["Norms"])
    try:
        compare(KINDS["Norms"], only_steps)
    finally:
        optfuse.register(KINDS["Norms"], per_parameter=False)


def sum_in_a_child(*tensors):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(sum(t.sum() for t in tensors).item()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return float(pipe.read())


def test_a_step_that_forks_gives_both_processes_its_numbers():
    class Forks(Base):
        def one(self, p, group, state):
            p.sub_(p.grad, alpha=group["lr"])
            made = p * 2
            if self.n == 2 and p.dim() == 1:
                self.seen.append(sum_in_a_child(made, p))

    compare(Forks, only_steps)


def test_fuse_takes_a_millisecond_and_a_look_at_the_parameters():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(1000)]
    times = []
    for _ in range(20):
        optimizer = KINDS["Elementwise"](params)
        gc.collect()
        begin = time.perf_counter()
        optfuse.fuse(optimizer, recorded=True)
        times.append(time.perf_counter() - begin)
    assert min(times) < 1e-3, min(times)


def sharded(fused, cls):
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    torch.manual_seed(0)
    places = [Shard(0), Replicate(), Shard(1)]
    shapes = [(4, 6), (5,), (6, 4)]
    params = [
        torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [place]))
        for shape, place in zip(shapes, places, strict=True)
    ]
    optimizer = cls(params)
    if fused:
        optfuse.fuse(optimizer, optfuse.Forward(max_grad_norm=0.7), recorded=True)
    for i in range(4):
        torch.manual_seed(i)
        for p, place in zip(params, places, strict=True):
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, [place])
        if not fused:
            clip_grad_norm_(params, 0.7)
        optimizer.step()
    return optimizer, [*params, *(entry["m"] for entry in optimizer.state.values() if entry)]


@pytest.mark.parametrize("name", ["Elementwise", "Norms", "Coupled", "Gathers", "OldStyle"])
def test_dtensors_have_stocks_bits(name, gloo):
    _, stock = sharded(False, KINDS[name])
    _, ours = sharded(True, KINDS[name])
    for a, b in zip(ours, stock, strict=True):
        assert not differing(a.to_local(), b.to_local()).any()
