# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests: bits, scripts, and the small things to train.

A *script* is a generator function that takes `wrap`, trains something with
`wrap(optimizer)` and yields (name, value) pairs. same() runs it twice, with
stock optimizers and with fused ones, and compares every value bit by bit. A
value is copied at the moment it is yielded, so a script decides when a weight
is looked at, and leaves updates pending until then.
"""

import collections
import contextlib
import gc
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from pathlib import Path

import cheap_seeds  # noqa: F401 - for all who seed
import folders  # noqa: F401 - tests import modules of other folders
import forked_python
import torch
import torch.distributed as dist
from torch import nn

import optfuse
from optfuse._options import is_recorded

HERE = Path(__file__).parent
FUSE = ("eager", "strict", "bucket_bytes", "recorded")  # options of fuse() in both modes
NONE = torch.zeros((), dtype=torch.bool)
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Inductor's C++ includes it.
HAS_PYTHON_H = Path(sysconfig.get_path("include"), "Python.h").is_file()


# Bits


def plain(tensor):
    """As it is in memory; of a DTensor this process's part, since torch 2.11 can't compare whole
    ones."""
    tensor = tensor.detach()
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.resolve_conj().resolve_neg().contiguous()


def differing(ours, stock):
    """Mask of the elements whose bits differ, NONE mostly; NaN equals NaN, -0 is not +0."""
    ours, stock = plain(ours), plain(stock)
    integer = INTEGER[stock.element_size()]
    if torch.equal(ours.view(integer), stock.view(integer)):
        return NONE
    mask = ours.view(integer) != stock.view(integer)
    if stock.is_floating_point():
        mask &= ~(ours.isnan() & stock.isnan())
    return mask


def assert_same_tensor(name, ours, stock):
    for what in ("dtype", "shape", "requires_grad"):
        a, b = getattr(ours, what), getattr(stock, what)
        assert a == b, f"{name}: {what} is {a}, in stock {b}"
    mask = differing(ours, stock)
    if mask.any():
        where = tuple(mask.nonzero()[0].tolist())
        a, b = (t.detach()[where].item() for t in (ours, stock))
        raise AssertionError(
            f"{name}: {int(mask.sum())} of {mask.numel()} elements differ from stock; "
            f"first at {where}: {a!r}, in stock {b!r}"
        )


def assert_same(name, ours, stock):
    """Equal values, all the way down; tensors by their bits."""
    assert type(ours) is type(stock), f"{name}: a {type(ours)}, in stock a {type(stock)}"
    if isinstance(stock, torch.Tensor):
        assert_same_tensor(name, ours, stock)
    elif isinstance(stock, dict):
        assert list(ours) == list(stock), f"{name}: keys {list(ours)}, in stock {list(stock)}"
        for key in stock:
            assert_same(f"{name}[{key!r}]", ours[key], stock[key])
    elif isinstance(stock, list | tuple | collections.deque):
        assert len(ours) == len(stock), f"{name}: length {len(ours)}, in stock {len(stock)}"
        for i, pair in enumerate(zip(ours, stock, strict=True)):
            assert_same(f"{name}[{i}]", *pair)
    else:
        assert ours == stock, f"{name}: {ours!r}, in stock {stock!r}"


def snapshot(value):
    """A copy that later training can't change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple | collections.deque):
        return type(value)(snapshot(item) for item in value)
    return value


# Scripts


class Stock:
    """wrap() for the run that others are compared with."""

    fused = False

    def __call__(self, optimizer, **options):
        return optimizer

    def pending(self, *optimizers):
        pass


def fuse_with(optimizer, mode, **options):
    """fuse(), with the options of a mode in the mode's object."""
    own = {name: options.pop(name) for name in FUSE if name in options}
    if options:
        mode = {"forward": optfuse.Forward, "backward": optfuse.Backward}[mode](**options)
    return optfuse.fuse(optimizer, mode, **own)


class Fused(Stock):
    """wrap() for the run under test."""

    fused = True

    def __init__(self, mode, **options):
        self.options = {"mode": mode, **options}
        if mode == "forward" and not {"OPTFUSE_TEST_ON", "OPTFUSE_TEST_DEVICE"} & set(os.environ):
            # The first use of one parameter must not do for that of its neighbours.
            self.options.setdefault("bucket_bytes", 1)
        self.optimizers = []

    def __call__(self, optimizer, **options):
        optimizer = fuse_with(optimizer, **{**self.options, **options})
        self.optimizers.append(optimizer)
        return optimizer

    def leaves_pending(self, optimizer):
        """Whether step() does; of parameters on a GPU it launches all."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        is_forward = self.options["mode"] == "forward"
        return is_forward and not is_recorded(optimizer) and any(p.is_cpu for p in params)

    def pending(self, *optimizers):
        """Where a script relies on an update not having been launched yet."""
        for optimizer in optimizers or self.optimizers:
            if self.leaves_pending(optimizer):
                n = optfuse.summary(optimizer).pending
                assert n > 0, "no update is pending here: the test would prove nothing"

    def prove(self):
        """That the updates took our way at all."""
        recorded = [o for o in self.optimizers if is_recorded(o)]
        for optimizer in recorded:
            said = optfuse.explain(optimizer)
            assert " 0 operators ran" not in said or " 0 at once" not in said, "no step yet"
        summaries = [optfuse.summary(o) for o in self.optimizers if o not in recorded]
        if recorded and not summaries:
            return
        made = sum(s.created for s in summaries)
        late = made - sum(s.at_once for s in summaries)
        assert made > 0, "optfuse made no update: the test would prove nothing"
        if any(map(self.leaves_pending, self.optimizers)):
            assert late > 0, f"none of {made} updates was deferred: the test would prove nothing"


def run(script, wrap):
    torch.manual_seed(0)
    seen = []
    for item in script(wrap):
        seen.append((item[0], snapshot(item[1])))
        del item  # an alias kept alive would end the deferring
    return seen


def same(script, mode="forward", prove=True, **options):
    """Runs the script with stock and with fused optimizers; every yield agrees."""
    same_as(run(script, Stock()), script, mode, prove, **options)


def same_as(stock, script, mode, prove=True, **options):
    """The same, with what run() has seen with stock."""
    wrap = Fused(mode, **options)
    ours = run(script, wrap)
    assert stock, "the script yielded nothing"
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a, b)
    if prove:
        wrap.prove()


# Small things to train


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def adamw(parameters, **options):
    options = {"lr": 1e-2, "weight_decay": 1e-1, "fused": True, **options}
    return torch.optim.AdamW(parameters, **options)


def sgd(parameters, **options):
    options = {"lr": 1e-2, "momentum": 0.9, "fused": True, **options}
    return torch.optim.SGD(parameters, **options)


def batch(i, n=5, inputs=6, outputs=3):
    """The i-th batch; the same in every run, whatever else draws numbers."""
    generator = torch.Generator("cpu").manual_seed(i)
    x, y = (torch.randn(n, k, generator=generator, device="cpu") for k in (inputs, outputs))
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def loss_of(model, i):
    x, y = batch(i)
    return nn.functional.mse_loss(model(x), y)


def train(model, optimizer, i, set_to_none=True):
    """One iteration; in forward mode its updates are pending afterwards."""
    optimizer.zero_grad(set_to_none)
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    return loss


def everything(model, optimizer):
    """All that stock shows after a step, gradients excepted."""
    yield "parameters", dict(model.state_dict())
    yield "optimizer state", optimizer.state_dict()


def weights(model):
    return snapshot(dict(model.state_dict()))


# Backward mode


def fused_backward(make=adamw, model=None):
    """A model and its optimizer in backward mode."""
    torch.manual_seed(0)
    model = model or net()
    return model, optfuse.fuse(make(model.parameters()), mode="backward")


def refused(call, *words, way_out='mode="forward"'):
    """Calls it, which must raise optfuse.Error with the way out; its message."""
    try:
        call()
    except optfuse.Error as error:
        message = str(error)
    else:
        raise AssertionError("no optfuse.Error was raised")
    for word in (way_out, *words):
        assert word in message, f"{word!r} is not in the message: {message}"
    return message


def as_of_torch(function):
    """The same function as if PyTorch had defined it: in the place of a class's step() fuse()
    refuses any other."""
    scope = {**function.__globals__, "__name__": "torch"}
    name, defaults = function.__name__, function.__defaults__
    return types.FunctionType(function.__code__, scope, name, defaults, function.__closure__)


def copied(value):
    """The result of state_dict(), detached from further training."""
    return snapshot(value)


# Other processes


@contextlib.contextmanager
def one_process():
    """A process group over gloo that has this process only."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            gc.collect()  # models that know the group must not outlive it
            dist.destroy_process_group()


def python(code, timeout=600, fresh=False, **env):
    """Runs code in another interpreter beside the tests; its CompletedProcess.
    fresh: one that has imported nothing yet, not even torch."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    if not fresh:
        return forked_python.run(forked_python.coded(code, HERE, env), timeout)
    # From Python 3.12 on of one that forks.
    env.setdefault("PYTHONWARNINGS", "ignore:This process:DeprecationWarning")
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def python_ok(code, timeout=600, fresh=False, **env):
    """The same, and it must succeed without a word on stderr; its stdout."""
    done = python(code, timeout, fresh, **env)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert not done.stderr.strip(), f"it exited well but said\n{done.stderr}"
    return done.stdout
