# SPDX-License-Identifier: BSD-3-Clause
"""Updates that are pending when something ends: the optimizer, the model, a
thread, the process; and none of it leaks."""

import gc
import os
import threading
import weakref

import pytest
import torch
from common import adamw, assert_same, batch, everything, net, python, python_ok, same, sgd, train
from torch import nn

import optfuse

STEPS = 5


# Optimizer and model deleted


def test_a_model_deleted_with_updates_pending():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0)
        wrap.pending(optimizer)
        del model
        gc.collect()
        optimizer.step()
        yield "state", optimizer.state_dict()

    same(script)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("first", ("optimizer", "model"))
def test_nothing_outlives_optimizer_and_model(mode, first):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    for i in range(2):
        train(model, optimizer, i)
    watched = [weakref.ref(x) for x in (model, optimizer, *model.parameters())]
    watched += [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    if first == "optimizer":
        del optimizer
        gc.collect()
        del model
    else:
        del model
        gc.collect()
        del optimizer
    gc.collect()
    left = sum(ref() is not None for ref in watched)
    assert left == 0, f"{left} of {len(watched)} objects are still alive"


def live_bytes():
    return sum(
        t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, torch.Tensor)
    )


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("first", ("optimizer", "model"))
def test_sixty_models_leave_nothing_behind(mode, first):
    def one(i):
        model = nn.Linear(512, 512)  # 1 MB of weights, 4 with gradients and state
        optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
        if first == "optimizer":
            del optimizer
        else:
            del model

    for i in range(5):
        one(i)
    gc.collect()
    tensors, memory = live_bytes(), resident()
    for i in range(60):
        one(i)
    gc.collect()
    more, grown = live_bytes() - tensors, resident() - memory
    assert more == 0, f"{more} bytes of tensors are left after sixty models"
    assert grown < 12e6, f"the process grew by {grown / 1e6:.1f} MB over sixty models of 4 MB"


# The end of the process

TRAINED = """
import sys, {first}, {second}
from common import *
torch.manual_seed(0)
model = net()
optimizer = optfuse.fuse(adamw(model.parameters()), mode={mode!r})
for i in range(3): train(model, optimizer, i)
if {mode!r} == 'forward': assert optfuse.summary(optimizer).pending > 0
"""


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_the_interpreter_exits_with_updates_pending(mode):
    python_ok(TRAINED.format(first="torch", second="optfuse", mode=mode))


def test_the_interpreter_exits_by_an_exception_in_backward():
    done = python(
        TRAINED.format(first="torch", second="optfuse", mode="backward")
        + "model[2].register_full_backward_pre_hook(lambda *_: sys.exit(7))\n"
        "train(model, optimizer, 4)\n",
    )
    assert done.returncode == 7 and not done.stderr.strip(), f"{done.returncode}\n{done.stderr}"


@pytest.mark.parametrize("order", (("atexit", "optfuse"), ("optfuse", "atexit")))
def test_an_atexit_handler_sees_the_updates(order, tmp_path):
    file = str(tmp_path / "weights.pt")
    register = f"atexit.register(lambda: torch.save(model.state_dict(), {file!r}))\n"
    body = TRAINED.format(first="torch, atexit", second="optfuse", mode="forward")
    if order[0] == "atexit":
        body = f"import torch, atexit\n{register}" + body
    else:
        body += register
    python_ok(body)
    torch.manual_seed(0)
    model = net()
    optimizer = adamw(model.parameters())
    for i in range(3):
        train(model, optimizer, i)
    assert_same("weights saved at exit", dict(torch.load(file)), dict(model.state_dict()))


# Other threads


def in_thread(function):
    """Runs it in another thread to its end; its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "the thread hangs"
    assert result, "the thread failed"
    return result[0]


def test_after_a_foreign_thread_updates_run_at_once_and_summary_says_so():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    assert optfuse.summary(optimizer).pending > 0
    in_thread(lambda: model(batch(9)[0]))
    train(model, optimizer, 1)
    after = optfuse.summary(optimizer)
    assert after.threads_seen and after.pending == 0, str(after)
    assert "thread" in str(after)


def test_threads_infer_all_the_time_while_training():
    """Inference may see older or newer weights, in stock as here; the training stays
    the same, and nobody hangs or fails."""

    def script(wrap):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        optimizer = wrap(adamw(model.parameters()))
        stop, failures, inferred = threading.Event(), [], []

        def infer():
            try:
                while not stop.is_set():
                    with torch.no_grad():
                        assert model(torch.ones(4, 64)).isfinite().all()
                    inferred.append(1)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=infer) for _ in range(3)]
        for i in range(40):
            optimizer.zero_grad()
            model(torch.full((4, 64), 0.01 * i)).square().mean().backward()
            optimizer.step()
            if i == 3:
                for thread in threads:
                    thread.start()
        while len(inferred) < 20 and not failures:
            stop.wait(0.01)
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(t.is_alive() for t in threads), "a thread hangs"
        assert not failures, failures
        yield from everything(model, optimizer)

    same(script)


def test_another_thread_flushes_all_the_time_while_training():
    def script(wrap):
        params = [nn.Parameter(torch.full((64,), 0.1 * i)) for i in range(100)]
        optimizer = wrap(sgd(params))
        stop, failures = threading.Event(), []

        def flush():
            try:
                while not stop.is_set():
                    stop.wait(1e-5)  # or it would hold the interpreter for itself
                    optfuse.flush()
                    if wrap.fused:
                        optfuse.flush(optimizer)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=flush)
        for i in range(60):
            sum((p * p).sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 3:
                thread.start()
        stop.set()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the thread hangs"
        assert not failures, failures
        yield "weights", [p.detach() for p in params]

    same(script)
    same(script, mode="backward")


FLUSHES = """
import sys, threading, time
import torch, optfuse
from torch import nn

sys.setswitchinterval(1e-6)
torch.set_num_threads(1)
params = [nn.Parameter(torch.ones(4)) for _ in range(500)]
optimizer = optfuse.fuse(torch.optim.SGD(params, lr=0.1))
for p in params:
    p.grad = torch.ones(4)
optimizer.step()  # so that this thread takes marks off when it flushes

def add_a_group():
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})

def renew_gradients():
    for p in params:
        p.grad = None
    for p in params:
        p.grad = torch.ones(4)

def change_all_the_time(change):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        change()

for change in (renew_gradients, add_a_group):
    thread = threading.Thread(target=change_all_the_time, args=(change,))
    thread.start()
    while thread.is_alive():
        optfuse.flush(optimizer)
"""


def test_flushes_while_another_thread_changes_gradients_or_groups():
    """Freed memory is overwritten."""
    python_ok(FLUSHES, fresh=True, MALLOC_PERTURB_="165")


class SlowToTell(dict):
    """A parameter's state, at which another thread waits."""

    def __init__(self, entry):
        super().__init__(entry)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def get(self, *args):
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.go_on.wait(60)
        return super().get(*args)


def test_a_flush_does_not_wait_for_the_step_of_another_thread():
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = optfuse.fuse(sgd(params))
    for p in params:
        p.grad = torch.ones(4)
    optimizer.step()
    slow = SlowToTell(optimizer.state[params[1]])
    optimizer.state[params[1]] = slow
    other = threading.Thread(target=optimizer.step)
    other.start()
    assert slow.reached.wait(60)
    try:
        optfuse.flush(optimizer)
    finally:
        slow.go_on.set()
        other.join()
    stock = [nn.Parameter(torch.ones(4)) for _ in params]
    reference = sgd(stock)
    for p in stock:
        p.grad = torch.ones(4)
    for _ in range(2):
        reference.step()
    assert_same("weights", params, stock)


def test_hooks_of_dead_optimizers_do_not_pile_up():
    """Each would be called by the next one, deeper and deeper."""
    p = nn.Parameter(torch.ones(1))
    for _ in range(10_000):
        optfuse.fuse(torch.optim.SGD([p], lr=0.0), mode="backward")
    p.sum().backward()


def test_two_models_train_in_two_threads_at_once():
    def script(wrap):
        pairs = []
        for _ in range(2):
            model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
            pairs.append((model, wrap(adamw(model.parameters()))))

        def work(model, optimizer):
            for i in range(30):
                optimizer.zero_grad()
                model(torch.full((4, 32), 0.01 * i)).square().mean().backward()
                optimizer.step()

        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(t.is_alive() for t in threads), "a thread hangs"
        for model, optimizer in pairs:
            yield from everything(model, optimizer)

    same(script)
    same(script, mode="backward")
