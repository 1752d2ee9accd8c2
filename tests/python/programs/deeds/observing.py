# SPDX-License-Identifier: BSD-3-Clause
"""Deeds under a profiler: it asks for the tensors' addresses past the dispatcher, and sees those of
stock, in the ranges of stock."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from programs.deed import BOOL, deed, raises

CPU = [ProfilerActivity.CPU]
LOOKS = {
    "plain": {},
    "shapes": {"record_shapes": True},
    "stacks": {"with_stack": True},
    "all": {"record_shapes": True, "with_stack": True, "profile_memory": True},
}
PROFILED = {"weight": 0, "kinds": ("AdamW", "SGD"), "look": LOOKS}


def see(world, profiler, operator="aten::linear"):
    events = profiler.events()
    world.see("shapes", [e.input_shapes for e in events if e.name == operator])
    world.see("code", any("_optimizer_step_code" in e.name for e in events))
    world.see("ranges", sorted(e.name for e in events if e.name.startswith("Optimizer.")))


@deed(**PROFILED, set_to_none=BOOL, product=True)
def train_under_a_profiler(world, look, set_to_none):
    """Updates are pending when it begins and when it ends."""
    with profile(activities=CPU, **look) as profiler:
        for _ in range(3):
            world.train(set_to_none=set_to_none)
    see(world, profiler)


@deed(**PROFILED)
def profiler_that_a_closure_starts(world, look):
    profiler, optimizer, calls = profile(activities=CPU, **look), world.optimizer(), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        if len(calls) == 2:
            profiler.start()
        loss = world.loss(0, len(calls))
        world.backward(loss)
        return loss

    for _ in range(4):
        world.step(0, closure)
    profiler.stop()
    see(world, profiler)


@deed(**PROFILED, backward=raises("scaled by GradScaler.scale()"))
def clip_under_a_profiler(world, look):
    """Multiplying gradients is left to the update elsewhere."""
    optimizer, scaler = world.optimizer(), torch.amp.GradScaler("cpu", init_scale=4.0)
    with profile(activities=CPU, **look) as profiler:
        for i in range(2):
            optimizer.zero_grad()
            world.backward(scaler.scale(world.loss(0, i)))
            scaler.unscale_(optimizer)
            world.see("norm", nn.utils.clip_grad_norm_(world.params(), 0.1))
            world.see("norms", [p.grad.exp().sum() for p in world.params()])
            scaler.step(optimizer)
            world.stepped(0)
            scaler.update()
    see(world, profiler, "aten::exp")


@deed(weight=0, kinds=("AdamW",))
def profiler_that_is_switched_on_again(world):
    with profile(activities=CPU, record_shapes=True) as profiler:
        for on in (True, False, True):
            profiler.toggle_collection_dynamic(on, CPU)
            world.train()
    see(world, profiler)


@deed(weight=0, kinds=("AdamW",))
def train_under_an_execution_trace(world):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        observer = ExecutionTraceObserver().register_callback(file.name)
        observer.start()
        for _ in range(2):
            world.train()
        observer.stop()
        observer.unregister_callback()
        nodes = json.loads(Path(file.name).read_text())["nodes"]
    shapes = [node["inputs"]["shapes"] for node in nodes if node["name"] == "aten::linear"]
    assert len(shapes) == 4
    world.see("shapes", shapes)


@deed(weight=0)
def hook_that_a_closure_adds(world):
    """It is called in this very step."""
    calls, handles, optimizer = [], [], world.optimizer()

    def closure():
        optimizer.zero_grad()
        loss = world.loss(0, 1)
        world.backward(loss)
        handles.append(optimizer.register_step_post_hook(lambda *_: calls.append(1)))
        return loss

    for _ in range(3):
        world.step(0, closure)
        world.see("calls", len(calls))
    for handle in handles:
        handle.remove()
