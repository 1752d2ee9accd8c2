# SPDX-License-Identifier: BSD-3-Clause
"""Deeds that show what a guard keeps from being seen: updates that are pending, gradients that are
clipped or scaled, tensors that lie otherwise than the kernels take them."""

import ctypes
import gc
import os
import random
import select
import signal
import threading
import time

import torch
from common import adamw, python, sgd
from own_classes import Tensors
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optfuse
from optfuse._patches import cuda_graphs
from programs.deed import (
    ALONE,
    BACKWARD,
    BEFORE_STEP,
    DIFFERS,
    EITHER,
    LEFT,
    deed,
    elsewhere,
    raises,
)
from programs.deeds.writing import GRADIENTS, set_all_gradients
from programs.models import rows


def through_address(t):
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size())


@deed(weight=1, fault=[("seal", "raw"), ("raw", "seal")])
def read_raw_memory(world):
    """Past every hook, where it raises while an update is pending."""
    try:
        seen = through_address(world.param())
    except RuntimeError:
        world.launch()
        seen = through_address(world.param())
    world.see("weight", seen)


@deed(ALONE, fault="average_alias")
def keep_an_alias_of_an_average(world):
    model, _ = world.own()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    array = average.module[0].weight.detach().numpy()
    for _ in range(3):
        world.train()
        average.update_parameters(model)
        world.see("array", torch.as_tensor(array))


@deed(weight=0, fault="graphs", kinds=("AdamW", "SGD"))
def replay_a_graph(world):
    class Graph:
        """Like a CUDA graph: replays what it recorded, on raw memory."""

        def __init__(self, weight):
            self.address, self.size = weight.data_ptr(), weight.numel() * weight.element_size()

        def replay(self):
            return ctypes.string_at(self.address, self.size)

    graph = Graph(world.param())
    if world.fused:
        cuda_graphs.wrap(Graph, "replay", optfuse.flush)
    world.train()
    world.see("weight", graph.replay())


@deed(ALONE, fault="floating")
def use_it_where_denormals_are_flushed(world):
    """It is updated as step() would have."""
    p = nn.Parameter(torch.full((8,), 1e-38))
    optimizer = world.wrap(sgd([p], lr=0.5))
    p.grad = torch.full((8,), 1e-38)
    optimizer.step()
    torch.set_flush_denormal(True)
    momentum = optimizer.state[p]["momentum_buffer"].clone()
    torch.set_flush_denormal(False)
    world.see("momentum", momentum)
    world.see("weight", p)


@deed(ALONE, fault="version", stock=EITHER, backward=EITHER)
def backward_through_changed_weights(world):
    world.own()
    world.train()
    loss = world.loss(0, 1)
    loss.backward(retain_graph=True)
    world.step(0)
    loss.backward()


@deed(ALONE, fault="foreign", proves=False)
def another_thread_ends_the_deferring(world):
    model, optimizer = world.own()
    world.train()
    elsewhere(model, rows(1))
    world.train()
    world.see("pending", world.pending(optimizer))


@deed(ALONE, fault="clear", proves=False)
def delete_the_optimizer(world):
    world.own()
    world.train()
    world.optimizers.clear()
    gc.collect()
    world.see("weights", world.params())


@deed(ALONE, fault="fork")
def fork(world):
    """The child's threads are gone, so that it could not run a parallel update."""
    torch.set_num_threads(2)
    model = nn.Linear(6, 100_000)
    optimizer = world.wrap(adamw(model.parameters()))
    for i in range(2):
        model(torch.full((1, 6), 1.0 + i)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.randn(1_000_000).sum()  # the pool of threads is there
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"%.9f" % model.weight[-1, -1].item())
        os._exit(0)
    ready, _, _ = select.select([read], [], [], 20)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    torch.set_num_threads(1)
    world.see("weight of the child", os.read(read, 99) if ready else "it hangs")


@deed(ALONE, fault=("compile", "key", "seal", "raw"))
def call_a_compiled_model(world):
    model, _ = world.own()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(rows(0))
    world.train()
    with torch.no_grad():
        world.see("output", compiled(rows(1)))


# ---- clipping and scaling

NOT_ALL = ("clip", "consumed", "discarded")
WAITING = {"setup": {"wait_from": 0}, "kinds": ("AdamW", "SGD", "RMSprop"), "weight": 0}


@deed(BEFORE_STEP, **WAITING, backward=raises("clip"), fault="factors")
def clip_and_wait(world):
    world.see("norm", optfuse.clip_grad_norm_(world.params(), 0.01))


@deed(BEFORE_STEP, **WAITING, backward=raises(), fault=("unread", "seal"))
def clip_and_look(world):
    optfuse.clip_grad_norm_(world.params(), 0.01)
    world.see("gradient", world.grad())


@deed(BACKWARD, weight=0, kinds=("AdamW",), backward=raises("clip"), fault=NOT_ALL)
def clip_gradients_that_are_added(world, loss):
    """Here all gradients are there, but in general some have been applied."""
    with optfuse.accumulate(world.optimizer()):
        world.backward_that_adds(loss)
    optfuse.clip_grad_norm_(world.optimizer(), 0.01)


@deed(ALONE, fault="nonfinite", backward=raises("GradScaler"))
def scale_where_a_gradient_is_infinite(world):
    model, optimizer = world.own()
    world.train()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(world.loss(0, 1)).backward()
    model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    world.look(gradients=False)


NEVER = {"forward": raises(), "backward": raises(), "proves": False}


@deed(ALONE, fault="norm", proves=False)
def norms_of_all_lengths(world):
    """On a CPU without AVX2 PyTorch's operator has other roundings."""
    code = """
import torch, optfuse
torch.manual_seed(0)
bad = 0
for n in range(1, 1000):
    p = torch.nn.Parameter(torch.zeros(n))
    optimizer = optfuse.fuse(torch.optim.SGD([p]))
    p.grad = torch.randn(n)
    stock = torch.linalg.vector_norm(p.grad)
    bad += bool(optfuse.clip_grad_norm_([p], 1.0) != stock)
print(bad)
"""
    bad = 0
    if world.mode == "forward":
        done = python(code, ATEN_CPU_CAPABILITY="default")  # read at the first operator
        bad = int(done.stdout) if done.returncode == 0 else done.stderr
    world.see("norms that differ", bad)


# ---- how tensors lie in memory


@deed(weight=1, kind=("of other strides", "with holes"), fault="dense", proves=False, backward=LEFT)
def step_with_gradients_by_hand(world, kind):
    set_all_gradients(world, GRADIENTS[kind])
    world.step(0)


@deed(weight=0, models=("odd",), kinds=("SGD", "AdamW"), fault="copyback")
def iteration_of_odd_parameters(world):
    world.train()


@deed(weight=0, models=("same elements",), kinds=("AdamW", "SGD"), fault=("postpone", "written"))
def iteration_of_parameters_that_overlap(world):
    world.train()


@deed(ALONE, fault="apart", **NEVER)
def gradient_that_is_the_weight(world):
    """Stock has decayed the weight, and with it the gradient, when it adds the gradient."""
    p = nn.Parameter(torch.ones(4))
    optimizer = world.wrap(torch.optim.ASGD([p], lr=0.1, lambd=0.5))
    p.grad = p.detach()
    optimizer.step()
    world.see("weight", p)


@deed(ALONE, fault="strides", **NEVER)
def sixteen_bits_with_other_strides(world):
    """They are rounded as their strides have it."""
    p = nn.Parameter(torch.ones(5, 4, dtype=torch.bfloat16))
    optimizer = world.wrap(torch.optim.RMSprop([p], foreach=False))
    p.grad = torch.ones(4, 5, dtype=torch.bfloat16).t()
    optimizer.step()
    world.see("weight", p)


# ---- classes, promises, delays


UNUSUAL = {"foreach": {"foreach": True}, "a tensor as rate": {"lr": torch.tensor(0.1)}}


@deed(ALONE, fault="native", options=UNUSUAL, proves=False)
def what_is_not_usual_is_left_to_the_class(world, options):
    """Two of its implementations round differently, and a tensor as learning rate makes it compute
    its numbers in float32."""
    world.own(make=lambda params: torch.optim.Adafactor(params, **options))
    for _ in range(4):
        world.train()
    world.look(gradients=False)


class MovesAll(Tensors):
    """Decays the state of parameters without a gradient, too."""

    @torch.no_grad()
    def step(self, closure=None):
        for entry in self.state.values():
            entry["m"].mul_(0.9)
        super().step(closure)


@deed(ALONE, fault=("alone", "written", "late_state"), backward=raises(), proves=False)
def class_that_breaks_its_promise(world):
    optfuse.register(MovesAll)
    world.own(make=MovesAll)
    for _ in range(3):
        world.train()
    world.look(gradients=False)


class Shares(Tensors):
    """Its rate is divided by the number of gradients."""

    def update(self, group, p, state):
        n = sum(q.grad is not None for one in self.param_groups for q in one["params"])
        p.sub_(p.grad, alpha=group["lr"] / n)


@deed(ALONE, backward=DIFFERS, proves=False)
def class_that_depends_on_other_gradients(world):
    optfuse.register(Shares)
    world.own(make=Shares)
    world.train()
    world.see("weights", world.params())


@deed(weight=0, models=("promised",), kinds=("AdamW",), fault="factors_copied")
def write_the_input_after_backward(world):
    x = torch.ones(5, 4)
    world.optimizer().zero_grad()
    world.backward(world.model()(x).square().mean())
    x.zero_()
    world.step(0)


@deed(ALONE, fault="product_bits", backward=raises("already applied"), proves=False)
def panels_that_round_otherwise(world):
    """Some of these layers do, on every processor that was looked at."""
    draw = random.Random(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for _ in range(100):
        k, n, m = (draw.randint(*of) for of in ((1, 600), (1, 40), (1, 600)))
        world.kinds, model = ["promised"], nn.Linear(k, n)
        world.wrap(adamw(model.parameters()))
        x, y = torch.randn(m, k), torch.randn(m, n)
        (model(x) * y).sum().backward()
        world.see(f"{k} x {n}, {m} rows", model.weight.grad)
    torch.set_num_threads(threads)


def delayed(world):
    """Its weight, and an iteration at which nothing is seen, since stock has no delay."""
    model = world.build()
    optimizer = world.wrap(adamw(model.parameters()), delay={model: 2})

    def iterate():
        optimizer.zero_grad()
        world.loss(0, 1).backward()
        optimizer.step()

    for _ in range(4):
        iterate()
    return model[0].weight, iterate


@deed(ALONE, fault="late_write", proves=False)
def write_a_delayed_parameter(world):
    """A waiting version would undo it."""
    if world.mode == "forward":
        weight, iterate = delayed(world)
        with torch.no_grad():
            weight.zero_()
        world.refused(iterate, way_out="")
    world.see("is refused", True)


@deed(ALONE, fault="exchange", proves=False)
def keep_an_array_over_a_delayed_parameter(world):
    same = True
    if world.mode == "forward":
        weight, iterate = delayed(world)
        array = weight.detach().numpy()
        iterate()
        same = bool((array == weight.detach().numpy()).all())
    world.see("it shows the same version", same)


# ---- threads and signals in an update in Python


class Interrupted(Tensors):
    """Ctrl-C comes in the middle of an update, when armed."""

    armed = []

    def update(self, group, p, state):
        if self.armed:
            self.armed.clear()
            signal.raise_signal(signal.SIGINT)
        super().update(group, p, state)


@deed(ALONE, fault="interrupts", proves=False)
def interrupt_in_an_update(world):
    """It comes when the update that it meets is made."""
    is_ours = world.mode == "backward"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    optfuse.register(Interrupted)
    _, optimizer = world.own(make=Interrupted)
    came = 0
    for i in range(3):
        Interrupted.armed += [True] if i == 1 and is_ours else []
        try:
            world.loss(0, i).backward()
        except KeyboardInterrupt:
            came += 1
        optimizer.step()
        optimizer.zero_grad()
    world.see("interrupts", came if is_ours else 1)
    world.see("weights", world.params())


class Slow(Tensors):
    """Gives the GIL away in the update, and wants it back."""

    running = threading.Event()

    def update(self, group, p, state):
        self.running.set()
        time.sleep(0.5)
        super().update(group, p, state)


def fork_during_an_update():
    optfuse.register(Slow)
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Slow([p]), "backward")
    thread = threading.Thread(target=lambda: (p * p).sum().backward())
    thread.start()
    Slow.running.wait()
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    thread.join()
    optimizer.step()


@deed(ALONE, fault=("gil", "fork"), proves=False)
def wait_for_an_update_in_python(world):
    """Who waits lets Python run. The process that hangs does so with the GIL held, and must be
    killed."""
    status = 0
    if world.mode == "backward":
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            try:
                fork_during_an_update()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    world.see("status", status)
