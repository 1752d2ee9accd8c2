# SPDX-License-Identifier: BSD-3-Clause
"""One scenario for each guard of the library (plugin/guard.h): a promise that
breaks as soon as this guard is off. A scenario raises AssertionError if it sees
wrong numbers or misses an error.

Run as a program, with the test-only library in OPTFUSE_LIBRARY, it plays each
scenario twice, guard on and guard off, each time in a process of its own, and
prints one line of JSON: {name: [on, off]}, with "kept", "broken: ..." or
"crashed: ..." each.
"""

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback

import torch
from common import HERE, adamw, assert_same, batch, loss_of, net, sgd, snapshot, train
from own_classes import GlobalNorm
from torch import nn

import optfuse
from optfuse import _gpu

SCENARIOS = {}
SECONDS = 60


def guards(name, *others):
    """Registers a scenario; the others are off in both runs, because each of
    them would catch the fault too."""

    def register(scenario):
        SCENARIOS[name] = (scenario, others)
        return scenario

    return register


class Pair:
    """The same model with a stock and with a fused optimizer."""

    def __init__(self, mode="forward", build=net, make=adamw):
        torch.manual_seed(0)
        self.theirs, self.ours = build(), build()
        self.ours.load_state_dict(self.theirs.state_dict())
        self.stock = make(self.theirs.parameters())
        self.fused = optfuse.fuse(make(self.ours.parameters()), mode=mode)

    def train(self, i):
        train(self.theirs, self.stock, i)
        train(self.ours, self.fused, i)

    def assert_same(self):
        ours, theirs = dict(self.ours.state_dict()), dict(self.theirs.state_dict())
        assert_same("weights", snapshot(ours), theirs)

    def assert_pending(self):
        if optfuse.summary(self.fused).pending == 0:
            raise RuntimeError("no update is pending: the scenario would prove nothing")


def must_raise(call, what):
    try:
        call()
    except RuntimeError:
        return
    raise AssertionError(f"{what} raised no error")


def through_address(tensor):
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size)


@guards("key", "seal")
def an_operator_sees_the_update():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    pair.assert_same()


@guards("privacy")
def an_alias_made_before_sees_the_update():
    pair = Pair()
    arrays = [p.detach().numpy() for p in (pair.theirs[0].weight, pair.ours[0].weight)]
    pair.train(0)
    assert (arrays[0] == arrays[1]).all(), "an array over the weight shows the old one"


@guards("seal", "raw")
def raw_access_past_every_hook_raises():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    must_raise(lambda: through_address(pair.ours[0].weight), "reading a pending storage")


@guards("raw", "seal")
def an_address_taken_while_pending_leads_to_the_update():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    theirs, ours = (through_address(m[0].weight) for m in (pair.theirs, pair.ours))
    assert theirs == ours, "the memory behind data_ptr() still holds the old weight"


class Graph:
    """Like a CUDA graph: replays what it recorded, on raw memory."""

    def __init__(self, weight):
        self.address, self.size = weight.data_ptr(), weight.numel() * weight.element_size()

    def replay(self):
        return ctypes.string_at(self.address, self.size)


@guards("graphs")
def a_replayed_graph_sees_the_update():
    pair = Pair()
    graphs = [Graph(model[0].weight) for model in (pair.theirs, pair.ours)]
    _gpu.wrap(Graph, "replay", optfuse.flush)
    pair.train(0)
    pair.assert_pending()
    theirs, ours = (graph.replay() for graph in graphs)
    assert theirs == ours, "the replay read the old weight"


@guards("version")
def backward_through_a_changed_weight_raises():
    pair = Pair()
    pair.train(0)
    loss = loss_of(pair.ours, 1)
    loss.backward(retain_graph=True)
    pair.fused.step()
    pair.assert_pending()
    must_raise(loss.backward, "backward through weights that step() has changed")


@guards("rearm", "seal")
def two_steps_in_a_row_are_two_updates_in_order():
    pair = Pair()
    pair.train(0)
    for model, optimizer in ((pair.theirs, pair.stock), (pair.ours, pair.fused)):
        for scale in (2.0, -3.0):
            for p in model.parameters():
                p.grad = torch.full(p.shape, scale)
            optimizer.step()
    pair.assert_pending()
    pair.assert_same()


@guards("twice")
def a_second_gradient_before_step_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.ours.zero_grad()
    must_raise(lambda: loss_of(pair.ours, 1).backward(), "a second backward before step()")


@guards("spent", "discarded")
def clipping_a_spent_gradient_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    must_raise(lambda: nn.utils.clip_grad_norm_(pair.ours.parameters(), 0.1), "clip_grad_norm_")


@guards("spent_twice")
def a_gradient_that_is_gone_is_not_left_out():
    pair = Pair(mode="backward")
    pair.train(0)
    must_raise(pair.fused.step, "a second step() on the same gradients")


@guards("groups")
def a_group_taken_away_does_not_lend_its_learning_rate():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    groups = [{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}]
    optimizer = optfuse.fuse(torch.optim.SGD(groups), mode="backward")
    del optimizer.param_groups[0]
    must_raise((a + b).sum().backward, "backward after a change of param_groups")


@guards("lazy")
def a_lazily_negated_gradient_has_its_sign():
    p = nn.Parameter(torch.ones(4))
    optimizer = optfuse.fuse(torch.optim.SGD([p], lr=0.5))
    p.grad = torch._neg_view(torch.ones(4))
    optimizer.step()
    assert p.tolist() == [1.5] * 4, f"1 - 0.5 * -1 is {p[0].item()}"


@guards("foreign")
def another_thread_ends_the_deferring():
    pair = Pair()
    pair.train(0)
    thread = threading.Thread(target=lambda: pair.ours(batch(1)[0]))
    thread.start()
    thread.join()
    pair.train(1)
    pending = optfuse.summary(pair.fused).pending
    assert pending == 0, f"{pending} updates are pending while another thread reads weights"


@guards("clear")
def a_deleted_optimizer_leaves_no_update_behind():
    pair = Pair()
    pair.train(0)
    pair.assert_pending()
    pair.fused = None
    gc.collect()
    pair.assert_same()


@guards("fork")
def a_forked_child_reads_weights_at_once():
    """Its threads are gone, so that it could not run a parallel update."""
    torch.set_num_threads(2)
    pair = Pair(build=lambda: nn.Linear(6, 100_000))
    for optimizer, model in ((pair.stock, pair.theirs), (pair.fused, pair.ours)):
        for i in range(2):
            model(torch.full((1, 6), 1.0 + i)).sum().backward()
            optimizer.step()
    pair.assert_pending()
    torch.randn(1_000_000).sum()  # the pool of threads is there
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"%.9f" % pair.ours.weight[-1, -1].item())
        os._exit(0)
    ready, _, _ = select.select([read], [], [], 5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ready, "the child hangs when it reads a weight"
    expected = b"%.9f" % pair.theirs.weight[-1, -1].item()
    assert os.read(read, 99) == expected, "the child reads another weight"


@guards("ddp")
def a_data_parallel_model_is_refused():
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        pair = Pair(mode="backward")
        model = nn.parallel.DistributedDataParallel(pair.ours)
        must_raise(lambda: model(batch(0)[0]).sum().backward(), "backward of a DDP model")
        pair.assert_same()  # it was refused before an update


@guards("create_graph")
def create_graph_is_refused():
    pair = Pair(mode="backward")
    must_raise(lambda: loss_of(pair.ours, 0).backward(create_graph=True), "create_graph")


@guards("scaler")
def a_scaled_loss_is_refused():
    pair = Pair(mode="backward")
    scaler = torch.amp.GradScaler("cpu")
    must_raise(lambda: scaler.scale(loss_of(pair.ours, 0)).backward(), "a scaled loss")


@guards("factors")
def a_clipped_gradient_is_applied_clipped():
    pair = Pair()
    for i in range(2):
        for model, optimizer, clip in (
            (pair.theirs, pair.stock, nn.utils.clip_grad_norm_),
            (pair.ours, pair.fused, optfuse.clip_grad_norm_),
        ):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            clip(model.parameters(), 0.01)
            optimizer.step()
    pair.assert_pending()
    pair.assert_same()


@guards("unread", "seal")
def a_gradient_is_seen_clipped():
    pair = Pair()
    loss_of(pair.ours, 0).backward()
    before = pair.ours[0].weight.grad.clone()
    norm = optfuse.clip_grad_norm_(pair.fused, 0.01)
    factor = torch.clamp(0.01 / (norm + 1e-6), max=1.0)
    assert_same("gradient", snapshot(pair.ours[0].weight.grad), before * factor)


@guards("clip")
def clipping_waits_for_no_backward_fusion():
    """Here all gradients are there, but in general some have been applied."""
    pair = Pair(mode="backward")
    with optfuse.accumulate(pair.fused):
        loss_of(pair.ours, 0).backward()
    must_raise(lambda: optfuse.clip_grad_norm_(pair.fused, 0.01), "clipping in backward mode")


@guards("nonfinite")
def a_gradient_with_an_infinity_skips_the_step():
    pair = Pair()
    scaler = torch.amp.GradScaler("cpu")
    train(pair.theirs, pair.stock, 0)
    train(pair.ours, pair.fused, 0)
    pair.fused.zero_grad()
    scaler.scale(loss_of(pair.ours, 1)).backward()
    pair.ours[0].weight.grad[0, 0] = float("inf")
    scaler.step(pair.fused)
    scaler.update()
    pair.assert_same()


@guards("norm")
def a_norm_that_is_added_up_otherwise_is_torchs():
    """On a CPU without AVX2 PyTorch's operator has other roundings."""
    code = """
import torch, optfuse
torch.manual_seed(0)
bad = 0
for n in range(1, 1000):
    p = torch.nn.Parameter(torch.zeros(n))
    optimizer = optfuse.fuse(torch.optim.SGD([p]))
    p.grad = torch.randn(n)
    stock = torch.nn.utils.get_total_norm([p.grad])
    bad += bool(optfuse.clip_grad_norm_([p], 1.0) != stock)
print(bad)
"""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONWARNINGS": "ignore"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if out.returncode != 0:
        raise RuntimeError(out.stderr)
    assert int(out.stdout) == 0, f"{out.stdout.strip()} of 999 norms differ"


@guards("added_late")
def gradients_added_after_the_update_are_not_kept_for_a_later_step():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.ours.zero_grad()
    with optfuse.accumulate(pair.fused):
        must_raise(lambda: loss_of(pair.ours, 1).backward(), "adding before step()")


@guards("nested")
def a_backward_inside_another_is_not_counted_as_a_pass():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", accumulate=2)

    def loss():
        x, y = batch(0)
        checked = torch.utils.checkpoint.checkpoint
        return (checked(model, x.requires_grad_(), use_reentrant=True) - y).sum()

    must_raise(lambda: loss().backward(), "counting a pass inside another")
    optimizer.step()


@guards("dense")
def a_gradient_of_other_strides_is_read_in_order():
    pair = Pair(build=lambda: nn.Linear(5, 7, bias=False), make=sgd)
    gradient = torch.arange(35.0).view(5, 7)
    pair.theirs.weight.grad = gradient.t().contiguous()
    pair.ours.weight.grad = gradient.t()
    pair.stock.step()
    pair.fused.step()
    pair.assert_same()


@guards("copyback")
def a_parameter_with_holes_is_updated():
    wide = torch.ones(5, 8)
    p, q = nn.Parameter(wide[:, ::2]), nn.Parameter(torch.ones(5, 4))
    ours, stock = optfuse.fuse(sgd([p])), sgd([q])
    p.grad, q.grad = torch.ones(5, 4), torch.ones(5, 4)
    ours.step()
    stock.step()
    assert_same("weights", snapshot(p.detach()), q.detach())


@guards("compile", "key", "seal", "raw")
def a_compiled_function_sees_the_update():
    def build():
        return nn.Linear(6, 3)

    pair = Pair(build=build)
    compiled = torch.compile(pair.ours)
    with torch.no_grad():
        compiled(batch(0)[0])
    pair.train(0)
    pair.assert_pending()
    with torch.no_grad():
        assert_same("output", compiled(batch(1)[0]), pair.theirs(batch(1)[0]))


@guards("recheck")
def an_evicted_gradient_hook_is_put_back_by_step():
    pair = Pair(mode="backward")
    pair.train(0)
    for p in pair.ours.parameters():
        p._post_accumulate_grad_hooks = {}
    pair.train(1)
    made = optfuse.summary(pair.fused).created
    pair.fused.zero_grad()
    loss_of(pair.ours, 2).backward()
    more = optfuse.summary(pair.fused).created - made
    assert more == 6, f"{more} of 6 updates ran inside backward"


@guards("postpone")
def parameters_that_overlap_are_updated_in_order():
    def build():
        model = nn.Module()
        flat = torch.randn(20)
        model.first = nn.Parameter(flat[:16].view(4, 4))
        model.second = nn.Parameter(flat[4:].view(4, 4))
        model.forward = lambda x: torch.tanh(x[:, :4] @ model.first) @ model.second
        return model

    pair = Pair(mode="backward", build=build)
    for model, optimizer in ((pair.theirs, pair.stock), (pair.ours, pair.fused)):
        model(batch(0)[0]).square().sum().backward()
        optimizer.step()
    pair.assert_same()


@guards("late")
def a_learning_rate_changed_after_backward_is_not_ignored():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.fused.param_groups[0]["lr"] *= 0.5
    must_raise(pair.fused.step, "step() with another learning rate than backward used")


@guards("discarded")
def a_gradient_thrown_away_after_it_was_applied_raises():
    pair = Pair(mode="backward")
    loss_of(pair.ours, 0).backward()
    pair.ours.zero_grad()
    must_raise(pair.fused.step, "step() after the gradients were thrown away")


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
p[0]
thread.join()
"""


@guards("gil")
def who_waits_for_an_update_in_python_lets_python_run():
    """The process that hangs does so with the GIL held, and must be killed."""
    try:
        subprocess.run([sys.executable, "-c", WAITS], check=True, timeout=20, cwd=HERE)
    except subprocess.TimeoutExpired:
        raise AssertionError("both threads wait for each other") from None


# The player


def play(name, off):
    """Runs a scenario in a forked child with these guards off; what came of it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.environ["OPTFUSE_TEST_GUARDS_OFF"] = ",".join(off)
        os.write(write, outcome(SCENARIOS[name][0]).encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or f"crashed: signal or status {status}"


def outcome(scenario):
    try:
        scenario()
    except AssertionError as error:
        return f"broken: {error}"
    except BaseException:
        return f"crashed: {traceback.format_exc()}"
    return "kept"


def main():
    torch.set_num_threads(1)
    names = sys.argv[1:] or SCENARIOS
    played = {}
    for name in names:
        others = SCENARIOS[name][1]
        played[name] = [play(name, others), play(name, (name, *others))]
    print(json.dumps(played))


if __name__ == "__main__":
    main()
