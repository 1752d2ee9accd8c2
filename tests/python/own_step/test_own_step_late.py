# SPDX-License-Identifier: BSD-3-Clause
"""A class's own step() where an update runs late: under other modes, in traces, in
other threads and in the death of its optimizer."""

import subprocess
import threading

import pytest
import torch
from common import (
    assert_same,
    everything,
    loss_of,
    net,
    python_ok,
    refused,
    same,
    snapshot,
    train,
    weights,
)
from own_classes import InDicts, Tensors
from own_scripts import matrices
from scripts import trained
from torch.optim import Adafactor, Muon

import optfuse


class Doubling(torch.overrides.TorchFunctionMode):
    """Changes whatever it sees."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.add_ else result


MODES_AT_USE = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": Doubling,
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", MODES_AT_USE)
@pytest.mark.parametrize("make", [Adafactor, Muon])
def test_modes_at_the_first_use_change_nothing(make, name):
    def script(wrap):
        model = matrices()
        optimizer = wrap(make(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
            wrap.pending() if i else None
            with MODES_AT_USE[name]():
                for p in model.parameters():
                    p.detach()
        yield from everything(model, optimizer)

    same(script)


def test_modes_at_step_do_what_they_do_in_stock():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step()

    same(trained(Muon, matrices, iteration=iteration), prove=False)


def test_a_trace_has_no_update_in_it():
    torch.manual_seed(0)
    model = matrices()
    optimizer = optfuse.fuse(Muon(model.parameters()))
    for i in range(3):
        train(model, optimizer, i)
    assert optfuse.summary(optimizer).pending == 2
    traced = torch.jit.trace(model, torch.ones(2, 6), check_trace=False)
    assert optfuse.summary(optimizer).pending == 0
    assert str(traced.inlined_graph).count("aten::mul") == 0
    assert_same("output", traced(torch.ones(2, 6)), model(torch.ones(2, 6)))


def test_a_weight_saved_before_its_update_is_of_the_present_version():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (w,) = ctx.saved_tensors
            return grad * w.sum(), None

    def script(wrap):
        model = matrices()
        optimizer = wrap(Adafactor(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        wrap.pending()
        x = torch.ones(2, 6, requires_grad=True)
        model(Twice.apply(x, model[0].weight)).sum().backward()
        yield "gradient", x.grad

    same(script)


def test_a_changed_weight_is_noticed_by_backward():
    model = matrices()
    optimizer = optfuse.fuse(Adafactor(model.parameters()))
    for i in range(2):
        train(model, optimizer, i)
    loss = loss_of(model, 1)
    loss.backward(retain_graph=True)
    optimizer.step()
    assert optfuse.summary(optimizer).pending > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_another_thread_sees_the_update():
    torch.manual_seed(0)
    model, stock = net(), net()
    stock.load_state_dict(model.state_dict())
    pairs = [
        (model, optfuse.fuse(Tensors(model.parameters()))),
        (stock, Tensors(stock.parameters())),
    ]
    for i in range(4):
        for pair in pairs:
            train(*pair, i)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(weights(model)))
    thread.start()
    thread.join()
    assert_same("weights", seen[0], weights(stock))
    assert optfuse.summary(pairs[0][1]).threads_seen


DEADLOCK = """
import folders, threading, time, torch, optfuse
from own_classes import Tensors

class Slow(Tensors):
    def update(self, group, p, state):
        if state and threading.current_thread() is not threading.main_thread():
            running.set()
            time.sleep(0.5)  # gives the GIL away, and wants it back
        super().update(group, p, state)

optfuse.register(Slow)
for name, use in USES.items():
    running = threading.Event()
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Slow([p]), recorded=False)
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    assert optfuse.summary(optimizer).pending == 1
    thread = threading.Thread(target=optfuse.flush, args=(optimizer,))
    thread.start()
    running.wait()
    exec(use)
    thread.join()
    print(name, flush=True)
"""
USES = {
    "index": "p[0]",
    "detach": "p.detach()",
    "data": "p.data",
    "tolist": "p.tolist()",
    "fork": "import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)",
}


@pytest.fixture(scope="module")
def ended():
    """The uses that came to an end: one that hangs keeps those after it from running."""
    try:
        return python_ok(f"USES = {USES}\n{DEADLOCK}", timeout=120, OPTFUSE_RECORDED="0").split()
    except subprocess.TimeoutExpired as hangs:
        return hangs.stdout.split()


@pytest.mark.parametrize("use", USES)
def test_who_waits_for_an_update_does_not_hold_the_gil(use, ended):
    assert use in ended, f"only {ended} came to an end"


def test_a_dying_optimizer_still_updates():
    torch.manual_seed(0)
    model, stock = net(), net()
    stock.load_state_dict(model.state_dict())
    ours, theirs = optfuse.fuse(Tensors(model.parameters())), Tensors(stock.parameters())
    model[0].weight.owner = ours  # a cycle, for the garbage collector
    for i in range(4):
        train(model, ours, i)
        train(stock, theirs, i)
    assert optfuse.summary(ours).pending == 6
    held = [p.detach for p in model.parameters()]
    del ours, model[0].weight.owner
    assert_same(
        "weights", [snapshot(detach()) for detach in held], [p.detach() for p in stock.parameters()]
    )


DYING = """
import folders, torch, optfuse
from own_classes import Tensors

class Last(Tensors):
    def update(self, group, p, state):
        others.clear()  # with the parameters
        super().update(group, p, state)

def fused(cls):
    optimizer = optfuse.fuse(cls([torch.nn.Parameter(torch.ones(3))]))
    for _ in range(2):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()
    return optimizer

optfuse.register(Tensors), optfuse.register(Last)
others = []
last = fused(Last)
others.extend(fused(Tensors) for _ in range(50))
assert all(optfuse.summary(other).pending == 1 for other in others)
optfuse.flush(last)
torch.ones(1000).sum(), last.step()
print("done")
"""


def test_an_optimizer_that_dies_in_the_update_of_another():
    assert python_ok(DYING).strip() == "done"


def test_a_step_that_compiles_a_part_of_itself():
    """As many write Muon. Entering compiled code launches what is pending."""
    out = python_ok(
        "import folders, torch, optfuse\n"
        "from own_classes import Tensors\n"
        "double = torch.compile(lambda x: x * 2, backend='eager')\n"
        "class Compiled(Tensors):\n"
        "    def update(self, group, p, state):\n"
        "        super().update({**group, 'lr': double(torch.tensor(group['lr']))}, p, state)\n"
        "optfuse.register(Compiled)\n"
        "def run(wrap):\n"
        "    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))\n"
        "    optimizer = wrap(Compiled([p, q]))\n"
        "    for _ in range(4):\n"
        "        p.grad, q.grad = p.detach() * 2, q.detach() * 3\n"
        "        optimizer.step()\n"
        "    return p.tolist() + q.tolist()\n"
        "print(run(optfuse.fuse) == run(lambda o: o))\n",
        TORCHDYNAMO_VERBOSE="0",
    )
    assert out.strip() == "True"


def test_state_in_a_dict_of_an_entry_may_not_change_between_backward_and_step():
    model = net()
    optimizer = optfuse.fuse(InDicts(model.parameters()), mode="backward")
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    first = next(model.parameters())
    with torch.no_grad():
        optimizer.state[first][0]["m"].mul_(2)
    refused(optimizer.step, "was written in place", way_out="after step()")
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    kept = optimizer.state[first][0]
    kept["m"] = kept["m"].clone()
    refused(optimizer.step, "state[0]['m']", way_out="after step()")
    optimizer.step()
