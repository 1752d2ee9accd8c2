# SPDX-License-Identifier: BSD-3-Clause
"""Parallel regions. MKL is asked for a few hundred square roots at a time, and opens one for
them, on pool threads too, unless it is told not to; and a thread's number of threads stays."""

import ctypes
import json
import subprocess
import threading

import pytest
import torch
from common import adamw, batch, everything, python_ok, same, sgd
from optim_classes import build
from torch import nn
from traced_classes import AdaBelief

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
@pytest.mark.parametrize("name", ("AdamW", "SGD", "RMSprop", "Adamax", "AdaBelief"))
@pytest.mark.parametrize("width", (40, 200))
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
