# SPDX-License-Identifier: BSD-3-Clause
"""Guards of optimizers without kernels, which update with their own step()."""

import subprocess
import sys

import torch
from common import HERE, net
from own_classes import GlobalNorm

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise


@guards("independent")
def an_optimizer_that_looks_at_all_gradients_is_refused():
    optfuse.register(GlobalNorm)
    optimizer = GlobalNorm(net().parameters())
    must_raise(lambda: optfuse.fuse(optimizer), "fusing a class whose step() has a global term")


@guards("native")
def what_is_not_usual_is_left_to_the_class():
    """Two of its implementations round differently, and a tensor as learning rate
    makes it compute its numbers in float32."""
    for options in ({"foreach": True}, {"lr": torch.tensor(0.1)}):
        pair = Pair(make=lambda p, options=options: torch.optim.Adafactor(p, **options))
        for i in range(4):
            pair.train(i)
        pair.assert_pending()
        pair.assert_same()


WAITS = """
import threading, time, torch, optfuse
from own_classes import Tensors

class Slow(Tensors):
    def update(self, group, p, state):
        if threading.current_thread() is not threading.main_thread():
            running.set()
            time.sleep(0.5)
        super().update(group, p, state)

running = threading.Event()
optfuse.register(Slow)
p = torch.nn.Parameter(torch.ones(3))
optimizer = optfuse.fuse(Slow([p]))
for _ in range(2):
    p.grad = torch.ones(3)
    optimizer.step()
thread = threading.Thread(target=optfuse.flush, args=(optimizer,))
thread.start()
running.wait()
print("running", flush=True)
p[0]
thread.join()
"""
SECONDS = 10  # it takes half a second


@guards("gil")
def who_waits_for_an_update_in_python_lets_python_run():
    """The process that hangs does so with the GIL held, and must be killed."""
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE) as process:
        said = process.stdout.readline()
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError("both threads wait for each other") from None
    if (said, status) != ("running\n", 0):
        raise RuntimeError(f"it said {said!r} and ended with {status}")
