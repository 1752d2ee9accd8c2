# SPDX-License-Identifier: BSD-3-Clause
"""An interrupt (Ctrl-C) while backward or an update runs arrives as KeyboardInterrupt, and
nothing is half done: training goes on with what stock would have.

In processes of their own: pytest would take an interrupt for its user's."""

import pytest
from common import python_ok

COMMON = """
import random, signal, sys, threading, time, torch, optfuse
from common import Stock, assert_same, batch, net, snapshot
from torch import nn

# Whoever started the tests in the background may have had interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        total = self.state[p].setdefault("total", torch.zeros_like(p))
                        total.mul_(0.5).add_(p.grad)
                        p.sub_(total * group["lr"])

optfuse.register(Plain, per_parameter=True)
MAKE = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, foreach=False),
    "registered": Plain,
}

class Pair:
    def __init__(self, kind, mode):
        torch.manual_seed(0)
        self.theirs, self.ours = net(), net()
        self.ours.load_state_dict(self.theirs.state_dict())
        self.stock = MAKE[kind](self.groups(self.theirs))
        self.fused = optfuse.fuse(MAKE[kind](self.groups(self.ours)), mode)

    def groups(self, model):
        "Of one parameter each: stock's fused SGD takes all first steps of a group at once."
        return [{"params": [p]} for p in model.parameters()]

    def loss(self, model, i):
        x, y = batch(i)
        return nn.functional.mse_loss(model(x), y)

    def follow(self, i):
        "Stock steps with the gradients that ours has, which may have been interrupted."
        made = [p.grad is not None for p in self.ours.parameters()]
        self.loss(self.theirs, i).backward()
        for p, is_made in zip(self.theirs.parameters(), made):
            p.grad = p.grad if is_made else None
        self.stock.step()
        self.stock.zero_grad()

    def step(self, i):
        self.follow(i)
        self.fused.step()
        self.fused.zero_grad()

    def compare(self):
        ours, theirs = dict(self.ours.state_dict()), dict(self.theirs.state_dict())
        assert_same("weights", snapshot(ours), theirs)
        assert_same("state", self.fused.state_dict(), self.stock.state_dict())
"""

AT_EACH_LINE = """
HERE = optfuse.__path__[0]

class Trace:
    "Interrupts at the n-th line of our own Python code that runs."

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, arg):
        return self.line(frame, "line", arg) if frame.f_code.co_filename.startswith(HERE) else None

    def line(self, frame, event, arg):
        self.left -= event == "line"
        if self.left == 0 and event == "line":
            signal.raise_signal(signal.SIGINT)
        return self.line

def interrupted(call, trace):
    try:
        sys.settrace(trace)
        call()
        sys.settrace(None)
    except KeyboardInterrupt:
        return 1
    finally:
        sys.settrace(None)
    return 0

def train(kind, mode, n):
    pair, trace, came = Pair(kind, mode), Trace(n), 0
    for i in range(3):
        if mode == "backward":
            came += interrupted(pair.loss(pair.ours, i).backward, trace)
        else:  # the updates of the step before run at the first use of each parameter
            came += interrupted(lambda: pair.loss(pair.ours, i), trace)
            pair.loss(pair.ours, i).backward()
        pair.step(i)
    pair.compare()
    assert came == (trace.left <= 0), f"line {n}: {came} interrupts arrived"
    return came

kind, mode = KIND
runs = 0
while train(kind, mode, 1 + 13 * runs):  # each line would take minutes
    runs += 1
print(runs)
"""

AT_RANDOM = """
class Sender(threading.Thread):
    "Interrupts the main thread now and then, once each time that it is armed."

    def __init__(self):
        super().__init__(daemon=True)
        self.armed, self.sent, self.lock = threading.Event(), 0, threading.Lock()
        self.dice = random.Random(1)
        self.main = threading.main_thread().ident

    def run(self):
        while True:
            self.armed.wait()
            until = time.perf_counter() + self.dice.random() * 1e-3
            while time.perf_counter() < until:
                pass
            with self.lock:
                if self.armed.is_set():
                    self.sent += 1
                    signal.pthread_kill(self.main, signal.SIGINT)
                    self.armed.clear()

sys.setswitchinterval(1e-5)
torch.set_num_threads(1)
sender = Sender()
sender.start()
came, iterations, pair = 0, 0, Pair(KIND, "backward")
while came < ENOUGH:
    if iterations % 2 == 0:  # so that state is made anew
        pair.fused.state.clear()
        pair.stock.state.clear()
    loss = pair.loss(pair.ours, iterations)
    late = 100
    try:
        sender.armed.set()
        loss.backward()
        with sender.lock:
            sender.armed.clear()
    except KeyboardInterrupt:
        came += 1
    while came < sender.sent and late:
        try:
            late -= 1
            time.sleep(0.01)
        except KeyboardInterrupt:
            came += 1
    with sender.lock:
        sender.armed.clear()
    assert came == sender.sent, f"{sender.sent - came} of {sender.sent} interrupts were lost"
    pair.step(iterations)
    iterations += 1
    if iterations % 50 == 0:
        pair.compare()
print(came, "of", iterations)
"""


KINDS = [(kind, "backward") for kind in ("adamw", "sgd", "adafactor", "registered")]


@pytest.mark.parametrize("kind, mode", KINDS)
def test_an_interrupt_at_each_line_of_what_we_run_in_python(kind, mode):
    code = AT_EACH_LINE.replace("KIND", repr((kind, mode)), 1)
    done = python_ok(COMMON + code)
    assert int(done) > 10, f"only {done} lines were tried"


@pytest.mark.parametrize("kind", ("sgd", "registered"))
def test_interrupts_at_random_moments_of_backward(kind):
    code = AT_RANDOM.replace("ENOUGH", "150", 1).replace("KIND", repr(kind), 1)
    done = python_ok(COMMON + code, timeout=600)
    assert int(done.split()[0]) >= 150, done
