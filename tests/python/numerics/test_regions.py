# SPDX-License-Identifier: BSD-3-Clause
"""Parallel regions. MKL is asked for a few hundred square roots at a time, and opens one for
them, on pool threads too, unless it is told not to; and a thread's number of threads stays."""

import ctypes
import json
import math
import subprocess
import threading

import pytest
import torch
from common import adamw, batch, everything, python_ok, same, sgd
from optim_classes import build
from style_classes import AdaBelief
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import optfuse

COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
typedef void region(void (*)(void *), void *, unsigned, unsigned);
int regions;
void GOMP_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    __atomic_fetch_add(&regions, 1, __ATOMIC_RELAXED);
    ((region *)dlsym(RTLD_NEXT, "GOMP_parallel"))(run, data, threads, flags);
}
"""
ROOTS = ("RMSprop", "Adadelta", "NAdam", "RAdam")
SIZES = (100_000, 5_000)  # for all threads; for one


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    """How many parallel regions late updates open, by rule and number of elements: counted
    by a library that is loaded before OpenMP's."""
    counter = tmp_path_factory.mktemp("regions") / "counter.so"
    compile_it = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(counter), "-ldl"]
    subprocess.run(compile_it, input=COUNTER, text=True, check=True)
    code = "import folders, json, test_regions as t; print(json.dumps(t.counted()))"
    return json.loads(python_ok(code, fresh=True, LD_PRELOAD=str(counter), OMP_NUM_THREADS="2"))


def counted():
    torch.set_num_threads(2)  # which tells MKL to use as many, however little there is to do
    return {name: {str(n): opened_by(name, n) for n in SIZES} for name in ROOTS}


def late_update(name, numel):
    """One that is pending, of an optimizer with state."""
    param = torch.nn.Parameter(torch.randn(numel))
    optimizer = optfuse.fuse(build(getattr(torch.optim, name), [param]))
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def opened_by(name, numel):
    opened = ctypes.c_int.in_dll(ctypes.CDLL(None), "regions")
    optimizer = late_update(name, numel)
    before = opened.value
    optfuse.flush(optimizer)
    return opened.value - before


@pytest.mark.parametrize("name", ROOTS)
def test_roots_open_no_parallel_regions_of_their_own(name, regions):
    large, small = (regions[name][str(n)] for n in SIZES)
    assert large == 1, f"{large} parallel regions for {SIZES[0]} elements, not one"
    assert small == 0, f"{small} parallel regions for {SIZES[1]} elements, not none"


def test_what_the_user_tells_mkl_stays(several_threads):
    try:
        set_threads = ctypes.CDLL("libtorch_cpu.so").MKL_Set_Num_Threads_Local
    except AttributeError:
        pytest.skip("this torch has no MKL")
    for numel in SIZES:
        optimizer = late_update("RMSprop", numel)
        before = set_threads(7)
        optfuse.flush(optimizer)
        assert set_threads(before) == 7, f"after {numel} elements"


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_a_thread_keeps_its_number_of_threads(mode):
    """A new thread has the process's number until PyTorch first shares out work on it. Products of
    matrices round by that number, and an update must not be what sets it."""

    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
        optimizer = wrap(sgd(model.parameters()))
        for i in range(4):

            def work(i=i):
                optimizer.zero_grad()
                x = batch(i, inputs=40, outputs=40)[0]
                model(x).square().mean().backward()

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode, prove=False)


def in_its_own_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("name", ("AdamW", "SGD", "RMSprop", "RAdam", "Adamax", "AdaBelief"))
@pytest.mark.parametrize("width", (40, 60, 200))
def test_a_loop_in_a_thread_of_its_own_rounds_as_stocks(mode, name, width):
    """Stock's step() is what sets the number of threads there, of most classes and sizes."""

    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        make = {"AdamW": adamw, "SGD": sgd, "AdaBelief": AdaBelief}.get(name)
        make = make or (lambda params: getattr(torch.optim, name)(params, foreach=False))
        optimizer = wrap(make(model.parameters()))

        def work():
            for i in range(4):
                optimizer.zero_grad()
                x = batch(i, inputs=width, outputs=width)[0]
                model(x).square().mean().backward()
                optimizer.step()

        in_its_own_thread(work)
        yield from everything(model, optimizer)

    same(script, mode, prove=False)


def product(seed):
    """It rounds by the number of threads."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(5, 132, generator=random) @ torch.randn(132, 132, generator=random)


@pytest.mark.parametrize("passes", (1, 2))
def test_promises_set_the_number_of_threads_as_the_operators_that_they_replace(passes, monkeypatch):
    """In one pass the gradient of an embedding, in two the sum of a layer's gradients."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")

    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Embedding(30, 4) if passes == 1 else nn.Linear(40, 1000)
        optimizer = wrap(sgd(model.parameters()))
        x = torch.tensor([3, 5, 3]) if passes == 1 else torch.ones(3, 40)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs = [model(x) for _ in range(passes)]
        found = []

        def work():
            for y in outputs:
                y.backward(torch.ones_like(y))
            found.append(product(1))

        in_its_own_thread(work)
        optimizer.step()
        yield "a product behind it", found

    same(script, prove=False)


@pytest.mark.parametrize("rows", (4, 300))
@pytest.mark.parametrize("autocast", (False, True))
def test_promises_set_no_other_thread_s_number_of_threads(rows, autocast, monkeypatch):
    """Passes of one step in several threads: what one has promised, under autocast, another adds to
    or computes. 300 rows: the copies of the factors are large."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")

    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Linear(132, 200, bias=False)
        optimizer = wrap(sgd(model.parameters()))
        x, dy, found = torch.ones(rows, 132), torch.ones(rows, 200), []

        def forward(casts):
            with torch.autocast("cpu", enabled=casts):
                return model(x).float()

        def work(y, looks):
            y.backward(dy)
            if looks:
                found.append(model.weight.grad.clone())
            found.append(product(1))

        for i in range(4):
            outputs = [forward(autocast and n == 0) for n in range(3)]
            for n, y in enumerate(outputs):
                in_its_own_thread(lambda y=y, looks=i == n: work(y, looks))
            optimizer.step()
            optimizer.zero_grad()
        yield "products behind each pass", found
        yield from everything(model, optimizer)

    same(script, prove=False)


def clip(norm_type):
    return lambda optimizer, params: nn.utils.clip_grad_norm_(params, 1e-3, norm_type)


def clip_with_a_norm(optimizer, params):
    norm = torch.ones((), dtype=params[0].dtype)
    nn.utils.clip_grads_with_norm_(params, 1e-3, norm)


def unscale(optimizer, params):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


CLIPS = {
    "2-norm": clip(2.0),
    "1-norm": clip(1.0),
    "infinity-norm": clip(math.inf),
    "total norm": lambda _, params: nn.utils.get_total_norm([p.grad for p in params]),
    "norm given": clip_with_a_norm,
    "value": lambda _, params: nn.utils.clip_grad_value_(params, 0.1),
    "unscale": unscale,
}
# Sums of squares PyTorch shares out above 16,384 elements, and all else from 32,768 on.
NUMBERS_OF_ELEMENTS = (1_000, 16_384, 16_385, 32_767, 32_768)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_sets_a_thread_s_number_of_threads_where_stock_does(name, dtype):
    """Its trials, which each new thread would ask for, set none."""
    if dtype is torch.float16 and name == "unscale":
        pytest.skip("PyTorch refuses it")

    def script(wrap):
        torch.set_num_threads(1)
        for numel in NUMBERS_OF_ELEMENTS:
            params = [nn.Parameter(torch.ones(numel, dtype=dtype)) for _ in range(2)]
            optimizer = wrap(sgd(params))
            for p in params:
                p.grad = torch.ones_like(p)
            found = []

            def work(optimizer=optimizer, params=params, found=found):
                CLIPS[name](optimizer, params)
                found.append(product(1))

            in_its_own_thread(work)
            yield f"a product behind it, {numel} elements", found

    same(script, prove=False)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16))
def test_sums_in_parts_have_as_many_parts_as_stocks_on_a_new_thread(dtype):
    """Its number of threads is not yet the one that the sum is made with."""

    def script(wrap):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (70_001, 100_003)]
        optimizer = wrap(sgd(params))
        for p in params:
            p.grad = torch.randn(p.shape, dtype=torch.float64).to(dtype)
        found = []

        def work():
            for norm_type in (1.0, 2.0):
                found.append(nn.utils.clip_grad_norm_(params, 1e9, norm_type))

        in_its_own_thread(work)
        yield "norms", found
        optimizer.step()
        yield from everything(nn.ParameterList(params), optimizer)

    same(script, prove=False)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("name", ("AdamW", "Adafactor", "AdaBelief", "registered"))
def test_fusing_on_a_new_thread_leaves_its_number_of_threads(mode, name):
    def script(wrap):
        torch.set_num_threads(1)
        param = nn.Parameter(torch.ones(300, 200))
        found = []

        def work():
            if name == "registered":
                optimizer = Registered([param])
            else:
                make = {"AdamW": adamw, "AdaBelief": AdaBelief}.get(name)
                make = make or (lambda ps: getattr(torch.optim, name)(ps, foreach=False))
                optimizer = make([param])
            wrap(optimizer)
            found.append(product(1))

        in_its_own_thread(work)
        yield "a product behind it", found

    optfuse.register(Registered)
    same(script, mode, prove=False)


class Registered(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault("kept", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.add_(self.state[p]["kept"], alpha=-0.01)


@pytest.mark.parametrize("name", ("Rprop", "Adafactor", "Muon", "AdaBelief", "registered"))
def test_updates_inside_of_backward_leave_the_number_of_threads_to_step(name):
    """They make state, and some call operators, before backward has ended."""

    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(150, 250, bias=False), nn.Linear(250, 150, bias=False))
        if name == "registered":
            optimizer = wrap(Registered(model.parameters()))
        elif name == "AdaBelief":
            optimizer = wrap(AdaBelief(model.parameters()))
        else:
            options = {} if name == "Muon" else {"foreach": False}
            optimizer = wrap(getattr(torch.optim, name)(model.parameters(), **options))
        x, found = torch.ones(2, 150, requires_grad=True), []

        def work():
            y = model(x)
            x.register_hook(lambda _: found.append(product(1)))
            y.sum().backward()
            found.append(product(2))
            optimizer.step()
            found.append(product(3))

        in_its_own_thread(work)
        yield "products in it, behind it and behind step()", found

    optfuse.register(Registered)
    same(script, "backward", prove=False)


@pytest.mark.parametrize("name", ("Adafactor", "Muon", "registered"))
def test_a_first_use_on_another_thread_leaves_its_number_of_threads(name):
    """Where the updates are operators, which stock called in step()."""

    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Linear(250, 150, bias=False)
        if name == "registered":
            optimizer = wrap(Registered(model.parameters()))
        else:
            options = {} if name == "Muon" else {"foreach": False}
            optimizer = wrap(getattr(torch.optim, name)(model.parameters(), **options))
        x, found = torch.ones(2, 250), []
        for _ in range(2):  # the first one makes the state
            model(x).sum().backward()
            optimizer.step()

        def work():
            found.append(model(x).detach())
            found.append(product(1))

        in_its_own_thread(work)
        yield "products behind it", found

    optfuse.register(Registered)
    same(script, prove=False)


@pytest.mark.parametrize("width", (100, 200))
def test_averages_that_wait_set_the_number_of_threads_as_stocks(width):
    def script(wrap):
        torch.set_num_threads(1)
        model = nn.Linear(width, width)
        optimizer = wrap(sgd(model.parameters()))
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        averaged.update_parameters(model)
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
        found = []

        def work():
            averaged.update_parameters(model)
            found.append(product(1))

        in_its_own_thread(work)
        yield "a product behind it", found

    same(script, prove=False)
