# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels: the class's own step(), on one parameter when the
schedule says so, gives the bits of step() on all of them."""

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from common import (
    assert_same,
    everything,
    fused_backward,
    loss_of,
    net,
    python_ok,
    refused,
    same,
    snapshot,
    train,
    weights,
)
from own_classes import (
    Counter,
    Flaky,
    GlobalNorm,
    GroupCounter,
    Interrupted,
    Listed,
    NewTensors,
    Noisy,
    Numbers,
    Searching,
    Stateless,
    Tensors,
)
from torch import nn
from torch.optim import ASGD, Adafactor, Muon, NAdam, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook

import optfuse
from optfuse import _trial

MODES = ["forward", "backward"]
OWN = [Tensors, Numbers, NewTensors, Stateless, Flaky]
for cls in OWN:
    optfuse.register(cls)


def matrices():
    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    return nn.Sequential(*layers)


def training(make, build=net, steps=20, set_to_none=True):
    def script(wrap):
        model = build()
        optimizer = wrap(make(model.parameters()))
        for i in range(steps):
            train(model, optimizer, i, set_to_none)
            if i % 7 == 3:
                yield from everything(model, optimizer)
        yield from everything(model, optimizer)

    return script


def momentum(parameters):
    return Tensors(parameters)


VARIANTS = {
    "Adafactor": (Adafactor, net),
    "Adafactor, options": (
        lambda p: Adafactor(p, lr=0.3, weight_decay=0.1, maximize=True, eps=(1e-5, 1e-2)),
        net,
    ),
    "Adafactor, foreach": (lambda p: Adafactor(p, lr=0.3, foreach=True), net),
    "Adafactor, lr in a tensor": (lambda p: Adafactor(p, lr=torch.tensor(0.1)), net),
    "Muon": (Muon, matrices),
    "Muon, options": (lambda p: Muon(p, lr=0.1, nesterov=False, ns_steps=3), matrices),
    "tensors": (Tensors, net),
    "numbers": (Numbers, net),
    "new tensors": (NewTensors, net),
    "no state": (Stateless, net),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_are_those_of_the_class(name, mode):
    make, build = VARIANTS[name]
    at_once = name in ("numbers", "new tensors")
    same(training(make, build), mode, prove=not at_once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Adafactor, momentum])
def test_bits_are_those_of_the_class_in_other_dtypes(make, dtype):
    def script(wrap):
        model = net().to(dtype)
        optimizer = wrap(make(model.parameters()))
        for i in range(20):
            for k, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * i + k)
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        yield from everything(model, optimizer)

    same(script)


def summary_after(make, steps=5, build=net):
    torch.manual_seed(0)
    model = build()
    optimizer = optfuse.fuse(make(model.parameters()))
    for i in range(steps):
        train(model, optimizer, i)
    return optfuse.summary(optimizer)


def test_an_update_waits_for_its_first_use_if_its_state_is_in_tensors():
    """The first one makes the state, which nobody can know beforehand."""
    for make in (Tensors, Adafactor, Stateless):
        seen = summary_after(make)
        assert (seen.created, seen.at_once, seen.at_use, seen.pending) == (30, 6, 18, 6), make


def test_an_update_runs_inside_step_if_its_state_is_not():
    for make in (Numbers, NewTensors):
        seen = summary_after(make)
        assert (seen.created, seen.at_once, seen.pending) == (30, 30, 0), make
    assert "own step()" in str(seen)


@pytest.mark.parametrize("mode", MODES)
def test_classes_of_torch_without_kernels_need_no_registration(mode):
    for make in (NAdam, ASGD, Rprop):
        same(training(lambda p, make=make: make(p, foreach=False), steps=6), mode)


# What happens between step() and the first use


@pytest.mark.parametrize("make", [Adafactor, momentum])
def test_the_gradient_of_step_is_used_whatever_becomes_of_it(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
        wrap.pending()
        optimizer.zero_grad()
        wrap.pending()
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        wrap.pending()
        yield from everything(model, optimizer)
        yield "gradients", [p.grad for p in model.parameters()]

    same(script)


def test_gradients_that_the_class_changes_are_seen_changed():
    def script(wrap):
        model = net()
        optimizer = wrap(Stateless(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
            wrap.pending() if i else None
            yield "gradients", [p.grad for p in model.parameters()]
        train(model, optimizer, 5)
        yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        train(model, optimizer, 6)
        norm = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
        yield "norm", norm(model.parameters(), 1e-3)
        yield "gradients", [p.grad for p in model.parameters()]

    same(script)


def test_gradients_that_are_kept_and_added_to():
    same(training(Adafactor, set_to_none=False))

    def never_zeroed(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        for i in range(8):
            loss_of(model, i).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(never_zeroed)


@pytest.mark.parametrize("make", [Adafactor, momentum, Numbers])
def test_options_are_those_of_the_step(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters(), lr=torch.tensor(0.1)) if make is Adafactor
                         else make(model.parameters()))
        for i in range(6):
            train(model, optimizer, i)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # a tensor is changed in place
        yield from everything(model, optimizer)

    same(script, prove=make is not Numbers)


@pytest.mark.parametrize("mode", MODES)
def test_schedulers(mode):
    def script(wrap):
        model = net()
        optimizer = Tensors(model.parameters(), lr=0.1)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = wrap(optimizer)
        late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        for i in range(8):
            train(model, optimizer, i)
            (early if i % 2 else late).step()
            yield "lr", optimizer.param_groups[0]["lr"]
        yield from everything(model, optimizer)

    same(script, mode)


def test_a_change_of_options_after_backward_is_refused():
    model, optimizer = fused_backward(Adafactor)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["d"] = 2.0
    refused(optimizer.step, "parameter group 0")


@pytest.mark.parametrize("act", ["read", "zero", "hold", "replace", "reload", "save"])
def test_state_while_an_update_is_pending(act):
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        first = model[0].weight
        train(model, optimizer, 0)
        entry = optimizer.state[first]
        held = entry["m"] if act == "hold" else None
        kept = copy.deepcopy(optimizer.state_dict())
        for i in range(4):
            train(model, optimizer, i)
            if act != "hold" or i == 0:
                wrap.pending()
            if act == "read":
                yield "momentum", optimizer.state[first]["m"]
            elif act == "zero":
                optimizer.state[first]["m"].zero_()
            elif act == "hold":
                yield "momentum", held
            elif act == "replace":
                optimizer.state[first] = {"t": torch.ones(()), "m": torch.ones_like(first)}
            elif act == "reload":
                optimizer.load_state_dict(kept)
            else:
                yield "saved", optimizer.state_dict()
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Adafactor, momentum, Numbers])
def test_resume_from_a_checkpoint(make, mode):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(5):
            train(model, optimizer, i)
        saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
        again = net()
        resumed = wrap(make(again.parameters()))
        for target, state in zip((again, resumed), pickle.loads(saved), strict=True):
            target.load_state_dict(state)
        for i in range(5, 10):
            train(again, resumed, i)
        yield from everything(again, resumed)

    same(script, mode, prove=make is not Numbers)


@pytest.mark.parametrize("mode", MODES)
def test_copies_pickles_and_unfuse(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        optimizer3 = pickle.loads(pickle.dumps(optimizer))
        assert type(optimizer3) is Tensors and isinstance(optimizer, Tensors)
        yield "pickled", optimizer3.state_dict()
        for i in range(3, 6):
            train(model, optimizer, i)
            train(model2, optimizer2, i)
        wrap.pending()
        if wrap.fused:
            wrap.optimizers.remove(optimizer)
            optimizer = optfuse.unfuse(optimizer)
            assert type(optimizer) is Tensors
        train(model, optimizer, 6)
        train(model2, optimizer2, 7)
        yield from everything(model, optimizer)
        yield from everything(model2, optimizer2)

    same(script, mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_groups_are_added(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model[0].parameters()))
        for i in range(3):
            train(model, optimizer, i)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
        for i in range(3, 6):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


def test_hooks_of_step_run_once_a_step():
    calls = []

    def hook(optimizer, args, kwargs):
        calls.append(type(optimizer))

    anywhere = register_optimizer_step_post_hook(hook)
    try:
        model = net()
        optimizer = optfuse.fuse(Tensors(model.parameters()))
        optimizer.register_step_pre_hook(hook)
        for i in range(3):
            train(model, optimizer, i)
        optfuse.flush(optimizer)
    finally:
        anywhere.remove()
    assert calls == [type(optimizer)] * 6


def test_closures():
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        for i in range(5):

            def closure(i=i):
                optimizer.zero_grad()
                loss = loss_of(model, i)
                loss.backward()
                return loss

            yield "loss", optimizer.step(closure)
        yield from everything(model, optimizer)

    same(script)


# Clipping, loss scaling, accumulation


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("make", [Adafactor, momentum, Numbers])
def test_clipping(make, ours):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        clip = optfuse.clip_grad_norm_ if ours and wrap.fused else nn.utils.clip_grad_norm_
        for i in range(6):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            yield "norm", clip(model.parameters(), 0.01)
            optimizer.step()
        yield "gradients", [p.grad for p in model.parameters()]
        yield from everything(model, optimizer)

    same(script, prove=make is not Numbers)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make", [Adafactor, momentum])
def test_loss_scaling(make, unscale):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for i in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 4:
                model[0].weight.grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            yield "scale", scaler.get_scale()
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(Adafactor(model.parameters()))
        for i in range(6):
            optimizer.zero_grad()
            with optfuse.accumulate(optimizer) if wrap.fused else contextlib.nullcontext():
                loss_of(model, 2 * i).backward()
            loss_of(model, 2 * i + 1).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


# Where an update runs late


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
    def script(wrap):
        model = matrices()
        optimizer = wrap(Muon(model.parameters()))
        for i in range(4):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            with torch.autocast("cpu", torch.bfloat16):
                optimizer.step()
        yield from everything(model, optimizer)

    same(script, prove=False)


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
        (model, optfuse.fuse(Tensors(model.parameters()))), (stock, Tensors(stock.parameters()))
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
import threading, time, torch, optfuse
from own_classes import Tensors

class Slow(Tensors):
    def update(self, group, p, state):
        if state and threading.current_thread() is not threading.main_thread():
            running.set()
            time.sleep(0.5)  # gives the GIL away, and wants it back
        super().update(group, p, state)

running = threading.Event()
optfuse.register(Slow)
p = torch.nn.Parameter(torch.ones(3))
optimizer = optfuse.fuse(Slow([p]))
for _ in range(2):
    p.grad = torch.ones(3)
    optimizer.step()
assert optfuse.summary(optimizer).pending == 1
thread = threading.Thread(target=optfuse.flush, args=(optimizer,))
thread.start()
running.wait()
{use}
thread.join()
print("done")
"""
USES = {"index": "p[0]", "detach": "p.detach()", "data": "p.data", "tolist": "p.tolist()",
        "fork": "import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)"}


@pytest.mark.parametrize("use", USES)
def test_who_waits_for_an_update_does_not_hold_the_gil(use):
    assert python_ok(DEADLOCK.format(use=USES[use]), timeout=40).strip() == "done"


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
    assert_same("weights", [snapshot(detach()) for detach in held],
                [p.detach() for p in stock.parameters()])


DYING = """
import torch, optfuse
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


def test_state_that_can_not_be_updated_raises_in_step():
    p = nn.Parameter(torch.ones(3, 4))
    optimizer = optfuse.fuse(Adafactor([p]))
    for _ in range(2):
        p.grad = torch.ones(3, 4)
        optimizer.step()
    entry = optimizer.state[p]
    entry["row_var"] = torch.zeros(()).expand_as(entry["row_var"])
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    p.grad = torch.ones(3, 4)
    with pytest.raises(optfuse.Error, match="single memory location"):
        optimizer.step()


def test_a_step_that_compiles_a_part_of_itself():
    """As many write Muon. Entering compiled code launches what is pending."""
    out = python_ok(
        "import torch, optfuse\n"
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


# Errors


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_class_names_the_parameter(mode):
    model = net()
    optimizer = optfuse.fuse(Flaky(model.parameters()), mode=mode)
    for i in range(2):
        train(model, optimizer, i)
    optimizer.zero_grad()

    def again():
        (loss_of(model, 2) * float("inf")).backward()
        optimizer.step()
        model[0].weight.sum()

    refused(again, "shape (", "ValueError: a gradient is not finite", way_out="checkpoint")
    refused(optimizer.step, way_out="checkpoint")


def test_an_error_inside_step_has_its_cause():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(Flaky([p]))
    p.grad = torch.full((3,), float("nan"))
    with pytest.raises(optfuse.Error) as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("where", ["first use", "step"])
def test_an_interrupt_stays_one(where, monkeypatch):
    p = nn.Parameter(torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(_trial, "STEPS", 2)
        optfuse.register(Interrupted)
        eager = [p] if where == "step" else []
        optimizer = optfuse.fuse(Interrupted([p]), eager=eager)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            p.grad = torch.ones(3)
            optimizer.step()
        assert where == "first use"
        p.sum()
    refused(optimizer.step, "it was interrupted", way_out="checkpoint")


# register()


REFUSED = {
    GlobalNorm: "the parameter differs",
    GroupCounter: "the option 't' of group 0",
    Counter: "the attribute",
    Noisy: "the parameter differs",
    Listed: "its attribute 'all' holds parameters",
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_promise_that_is_not_kept_is_refused(cls):
    words = "attribute 't'" if cls is Counter else REFUSED[cls]
    optfuse.register(cls)
    model = net()
    before = weights(model)
    optimizer = cls(model.parameters())
    random = torch.get_rng_state()
    try:
        refused(lambda: optfuse.fuse(optimizer), words, way_out="as it is")
    finally:
        optfuse.register(cls, per_parameter=False)
    assert type(optimizer) is cls and not optimizer.state
    assert_same("weights", weights(model), before)
    assert torch.equal(torch.get_rng_state(), random), "the trial drew random numbers"


def test_one_parameter_is_no_way_around_the_trial():
    optfuse.register(GlobalNorm)
    try:
        optimizer = GlobalNorm([nn.Parameter(torch.ones(3))])
        refused(lambda: optfuse.fuse(optimizer), "differs", way_out="as it is")
    finally:
        optfuse.register(GlobalNorm, per_parameter=False)


def test_the_trial_takes_over_options_and_state():
    """Fused in the middle of training, from the state that is there."""
    def script(wrap):
        model = net()
        optimizer = Tensors(model.parameters())
        for i in range(3):
            train(model, optimizer, i)
        optimizer = wrap(optimizer)
        for i in range(3, 8):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script)


def test_unknown_classes_are_refused_and_told_of_register():
    class Unknown(Tensors):
        pass

    class Derived(torch.optim.AdamW):
        pass

    for cls in (Unknown, Derived):
        optimizer = cls(net().parameters())
        refused(lambda: optfuse.fuse(optimizer), cls.__name__, way_out="optfuse.register")  # noqa: B023
        optfuse.register(cls)
        optfuse.unfuse(optfuse.fuse(optimizer))
        optfuse.register(cls, per_parameter=False)
        refused(lambda: optfuse.fuse(optimizer), cls.__name__, way_out="optfuse.register")  # noqa: B023


@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_of_a_class_with_kernels_runs_its_own_step(mode):
    class Lucky(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
            return super().step(closure)

    optfuse.register(Lucky)
    same(training(Lucky, steps=6), mode)


def test_what_register_does_not_take():
    refused(lambda: optfuse.register(Searching), "closure", way_out="as it is")
    refused(lambda: optfuse.register(3), "Optimizer", way_out="register()")
    lbfgs = torch.optim.LBFGS(net().parameters())
    refused(lambda: optfuse.fuse(lbfgs), "LBFGS", way_out="as it is")
    sparse = torch.optim.SparseAdam(net().parameters())
    refused(lambda: optfuse.fuse(sparse), "sparse gradients", way_out="as it is")


def test_a_sparse_gradient_is_refused_with_its_parameter():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optfuse.fuse(Tensors(table.parameters()))
    table(torch.tensor([1])).sum().backward()
    refused(optimizer.step, "shape (5, 3)", "sparse", way_out="sparse=False")


def test_adafactor_with_its_default_epsilon_needs_one_dtype_a_group():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    refused(lambda: optfuse.fuse(Adafactor([p, q])), "dtypes differ", way_out="group for each")
    optfuse.fuse(Adafactor([p, q], eps=(1e-8, 1e-3)))
