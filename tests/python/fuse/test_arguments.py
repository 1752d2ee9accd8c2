# SPDX-License-Identifier: BSD-3-Clause
"""Every wrong argument of a public function is an optfuse.Error that names the function, the
argument and its value, and nothing has changed; every other type of number works."""

import inspect
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from common import adamw, assert_same, loss_of, net, python_ok, snapshot, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse
from optfuse._arguments import check

NAN = math.nan
NO_LIMIT = (None, "1", True, [1.0], 1j, torch.ones(2))
NO_NUMBER = (*NO_LIMIT, NAN, torch.tensor(NAN))
NO_COUNT = (None, "1", True, 2.5, 2.0, [1], torch.ones(2), np.float64(2))
NO_FLAG = (None, "yes", 1, 0.0, [True])


class World:
    """The objects that calls are made with: a model in training with a fused optimizer, and a stock
    one."""

    def __init__(self):
        self.model = net()
        self.fused = optfuse.fuse(adamw(self.model.parameters()))
        for i in range(2):
            train(self.model, self.fused, i)
        loss_of(self.model, 2).backward()
        self.other = net()
        self.stock = adamw(self.other.parameters())

    def looks(self):
        """All that a refused call must leave as it is."""
        hooks = [p._post_accumulate_grad_hooks for p in self.other.parameters()]
        params = [*self.model.parameters(), *self.other.parameters()]
        return {
            "classes": (type(self.fused), type(self.stock)),
            "attributes": (sorted(vars(self.fused)), sorted(vars(self.stock))),
            "hooks": repr(hooks),
            "created": optfuse.summary(self.fused).created,
            "gradients": snapshot([p.grad for p in params if p.grad is not None]),
            "weights": snapshot(params),
            "random": torch.get_rng_state(),
        }


def build(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))

    def iteration():
        train(model, optimizer, 0)

    return iteration


def instance(world):
    return adamw(world.other.parameters())


# The other arguments of the call.
RIGHT = {
    "fuse": lambda world: {"optimizer": world.stock},
    "Forward": lambda world: {},
    "Backward": lambda world: {},
    "DDPModel": lambda world: {"model": DDP.__new__(DDP)},  # only its type is looked at
    "Delay": lambda world: {"steps": {world.other: 1}},
    "unfuse": lambda world: {"optimizer": world.fused},
    "flush": lambda world: {"optimizer": world.fused},
    "drain": lambda world: {"optimizer": world.fused},
    "summary": lambda world: {"optimizer": world.fused},
    "explain": lambda world: {"optimizer": world.fused},
    "accumulate": lambda world: {},
    "clip_grad_norm_": lambda world: {"parameters": world.fused, "max_norm": 1.0},
    "masters": lambda world: {"params": world.other.parameters()},
    "reorder": lambda world: {"model": world.other, "schedule": "stock"},
    "kfac": lambda world: {"model": world.other, "optimizer": instance(world)},
    "register": lambda world: {"cls": torch.optim.AdamW},
    "random_bits": lambda world: BITS,
    "ab": lambda world: {"build_fn": build, "rounds": 1, "iterations": 1, "warmup": 0},
}
BITS = {**dict.fromkeys(("seed", "step", "parameter", "stream"), 1), "shape": (3,)}
BITS |= {"dtype": torch.bfloat16}
NOT_FUSED = (torch.optim.AdamW, net(), 3, "adamw", instance, lambda w: [w.fused])
NO_DDP = (None, 3, "model", net(), [net()])
NO_DELAY = (3, "0", [1], {0: 1}, {"0.weight": 1}, lambda w: {w.other: -1})
NO_DELAY += (lambda w: {w.other: 1.5}, lambda w: {w.other: True}, lambda w: {w.other: None})
NO_DELAY += (lambda w: {w.other: 10**30},)
# Each parameter of each public function, with values that are refused. A function makes the
# value from the World.
WRONG = {
    "fuse": {
        "optimizer": (torch.optim.AdamW, net(), None, 3, lambda w: [w.stock]),
        "mode": (
            None, "sideways", "Forward", "", 0, True, ["forward"], b"forward",
            optfuse.Forward, optfuse.Backward,
        ),
        "eager": (None, True, 3, "0.weight", ["0.weight"], [0], net(), lambda w: w.other[0].weight),
        "strict": NO_FLAG,
        "bucket_bytes": (*NO_COUNT, -1, 1.5, 2**70),
        "products": ("on", "force", True, 1, ["auto"]),
        "recorded": (1, "yes", [True]),
    },
    "Forward": {
        "max_grad_norm": (*NO_NUMBER[1:], -1, -0.5, -math.inf, "inf"),
        "fold": NO_FLAG,
        "ddp": NO_DDP[1:],
        "delay": NO_DELAY,
    },
    "Backward": {
        "accumulate": (*NO_COUNT, 0, -1),
        "side_stream": NO_FLAG,
        "final": NO_FLAG,
        "ddp": NO_DDP[1:],
    },
    "DDPModel": {
        "model": NO_DDP,
        "comm_hook": (3, "hook", print, (print,), (None, None), (None, 3), (1, 2, print)),
    },
    "Delay": {
        "steps": (None, *NO_DELAY),
        "weights": (None, "newest", "Stash", 3, ["stash"]),
    },
    "unfuse": {"optimizer": (None, *NOT_FUSED)},
    "flush": {"optimizer": NOT_FUSED},
    "keep_memory": {},
    "masters": {
        "params": (None, 3, "0.weight", net(), ["0.weight"], lambda w: [w.model.parameters()]),
        "dtype": (None, "float32", torch.int32, float),
    },
    "drain": {"optimizer": (None, *NOT_FUSED)},
    "summary": {"optimizer": (None, *NOT_FUSED)},
    "explain": {"optimizer": (None, *NOT_FUSED)},
    "accumulate": {"optimizers": (torch.optim.AdamW, net(), None, 3, lambda w: [w.stock])},
    "clip_grad_norm_": {
        "parameters": (
            None, 3, "0.weight", net(), ["0.weight"], [None], nn.ModuleList([net()]),
            torch.optim.AdamW, lambda w: w.model.named_parameters(),
            lambda w: [w.model.parameters()], lambda w: dict(w.model.named_parameters()),
        ),
        "max_norm": (*NO_LIMIT, -1, -0.5, -math.inf, "inf"),
        "norm_type": (*NO_NUMBER, "2", "fro"),
        "error_if_nonfinite": NO_FLAG,
        "foreach": NO_FLAG[1:],
    },
    "register": {
        "cls": (instance, None, 3, "AdamW", nn.Linear, torch.optim.Optimizer),
        "per_parameter": NO_FLAG,
        "random": (3, True, "philox", b"counter", ["counter"]),
    },
    "random_bits": {
        "seed": (*NO_COUNT, -1, 2**53),
        "step": (*NO_COUNT, -1, 2**32),
        "parameter": (*NO_COUNT, -1, 2**24),
        "stream": (*NO_COUNT, -1, 256),
        "shape": (None, 3, "3", (-1,), (2.5,)),
        "dtype": (None, "bfloat16", torch.float32),
        "first": (*NO_COUNT, -1),
    },
    "reorder": {
        "model": (None, 3, "model", instance, nn.Linear, lambda w: [w.other]),
        "schedule": (None, 3, "Last", "sideways", b"last", [3], [["0"]]),
        "k": (*NO_COUNT[1:], -1),
        "memory": (*NO_COUNT[1:], -1),
        "network": (3, "fast", (1.0,), (1.0, 2.0, 3.0), (1.0, -1.0), (math.inf, 1.0), (None, 1.0)),
        "await_reduction": (3, True, "backward", ["first_use"]),
        "skip": (None, 3, "0", b"0", [0], [None]),
        "side_stream": (None, 3, 1, "0", b"0", [0], [None]),
    },
    "kfac": {
        "model": (None, 3, "model", instance, nn.Linear, lambda w: [w.other]),
        "optimizer": (torch.optim.AdamW, net(), None, 3, lambda w: [w.stock]),
        "damping": (*NO_NUMBER, 0, -1, math.inf),
        "decay": (*NO_NUMBER, 1, -0.1, 2),
        "kl_clip": (*NO_NUMBER[1:], 0, -1, math.inf),
        "factors_every": (*NO_COUNT, 0, -1, 1.5),
        "inverses_every": (*NO_COUNT, 0, -1, 1.5),
        "process_group": (3, "world", [0, 1]),
        "fusion": (*NO_COUNT, "some", "Planned", 0, -1, ["all"]),
        "placement": (None, "here", "Balanced", 3),
        "skip": (None, 3, "0", b"0", [0], [None]),
        "split": ("half", 3, True),
        "missing": (None, "ignore", 3),
        "rows": (3, "rows", [], [0], [-1], [None], [math.inf]),
        "network": (3, "fast", (1.0,), 4 * (1.0,), (1.0, -1.0), (math.inf, 1.0), (None, 1.0)),
    },
    "ab": {
        "build_fn": (None, 3, "build", net(), instance, lambda w: lambda: None),
        "variants": (3, {}, [], ["default"], {"default": None}, {0: lambda o: o}),
        "baseline": (None, 3, "nobody", ["default"]),
        "rounds": (*NO_COUNT, 0, -1),
        "iterations": (*NO_COUNT, 0, -1),
        "warmup": (*NO_COUNT, -1),
        "seconds": (*NO_NUMBER[1:], -1),
        "seed": (*NO_COUNT, 2**64),
        "progress": (True, 3, "stderr"),
    },
}  # fmt: skip


def made(value, world):
    from_world = inspect.isfunction(value) and value is not build
    return value(world) if from_world else value


ROWS = [
    pytest.param(function, argument, value, id=f"{function}-{argument}-{i}")
    for function, arguments in WRONG.items()
    for argument, values in arguments.items()
    for i, value in enumerate(values)
]


@pytest.mark.parametrize("function, argument, value", ROWS)
def test_a_wrong_argument_is_named_and_changes_nothing(function, argument, value):
    world = World()
    given = {**RIGHT[function](world), argument: made(value, world)}
    before = world.looks()
    with pytest.raises(optfuse.Error) as caught:
        if argument == "optimizers":
            optfuse.accumulate(*given.values())
        else:
            getattr(optfuse, function)(**given)
    message = str(caught.value)
    assert message.startswith(f"optfuse: {function}() got {argument}="), message
    assert f"; {argument} must be " in message and len(message) < 300, message
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert_same("the world", world.looks(), before)


MADE_BY_USERS = ("Backward", "DDPModel", "Delay", "Forward")


def public():
    """The parameters of each function."""
    names = [name for name in optfuse.__all__ if inspect.isroutine(getattr(optfuse, name))]
    found = {n: inspect.signature(getattr(optfuse, n)).parameters for n in names}
    found |= {n: inspect.signature(getattr(optfuse, n)).parameters for n in MADE_BY_USERS}
    return found


def test_every_public_parameter_is_in_the_table():
    assert {f: set(parameters) for f, parameters in public().items()} == {
        f: set(arguments) for f, arguments in WRONG.items()
    }


def test_a_parameter_without_a_kind_is_noticed_when_the_function_is_made():
    with pytest.raises(TypeError, match="strict"):

        @check.checked(optimizer=check.OPTIMIZER)
        def fuse(optimizer, strict=False):
            pass


def test_arguments_are_looked_at_in_every_place():
    """By position, by name and among a variable number; what Python refuses, it refuses."""
    world = World()
    stock = world.stock
    for call in (
        lambda: optfuse.fuse(stock, "sideways"),
        lambda: optfuse.fuse(stock, "forward", (), 3),
        lambda: optfuse.clip_grad_norm_(stock, -1),
        lambda: optfuse.accumulate(world.fused, stock, world.model),
    ):
        with pytest.raises(optfuse.Error, match=" must be "):
            call()
    for call in (
        lambda: optfuse.fuse(),
        lambda: optfuse.fuse(stock, modes="forward"),
        lambda: optfuse.flush(world.fused, world.fused),
        lambda: optfuse.ab(build, None),
    ):
        with pytest.raises(TypeError, match="argument"):
            call()


def test_errors_have_the_name_that_users_catch():
    assert f"{optfuse.Error.__module__}.{optfuse.Error.__qualname__}" == "optfuse.Error"


HINTS = {
    "an optimizer's class": (lambda w: optfuse.fuse(torch.optim.AdamW), "AdamW(model.param"),
    "a model": (lambda w: optfuse.fuse(w.model), "optimizer of this model"),
    "several": (lambda w: optfuse.fuse([w.stock]), "one optimizer at a time"),
    "not fused": (lambda w: optfuse.flush(w.stock), "not fused"),
    "one tensor": (lambda w: optfuse.fuse(w.stock, eager=w.other[0].bias), "list with this"),
    "names": (lambda w: optfuse.fuse(w.stock, eager=["weight"]), "is a str"),
    "an instance": (lambda w: optfuse.register(w.stock), "register(AdamW)"),
    "a model to clip": (lambda w: optfuse.clip_grad_norm_(w.model, 1.0), "model.parameters()"),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_frequent_mistake_is_told_the_way_out(name):
    call, words = HINTS[name]
    with pytest.raises(optfuse.Error, match="must be") as caught:
        call(World())
    assert words in str(caught.value)


def test_an_error_of_the_users_own_iterator_is_not_taken_for_a_wrong_argument():
    def broken():
        yield nn.Parameter(torch.ones(1))
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        optfuse.fuse(adamw(net().parameters()), eager=broken())


COUNTS = (3, np.int64(3), np.uint8(3), torch.tensor(3))
NUMBERS = (0.25, np.float32(0.25), np.float64(0.25), Fraction(1, 4), Decimal("0.25"))
NUMBERS += (torch.tensor(0.25), torch.tensor([0.25]), np.array(0.25))


@pytest.mark.parametrize("number", (*COUNTS, *NUMBERS), ids=lambda n: f"{type(n).__name__} {n}")
def test_numbers_of_every_type_are_taken(number):
    """Bits of norms: programs/deeds/clipping.py."""
    if any(number is one for one in COUNTS):
        mode = optfuse.Backward(accumulate=number)
        model, optimizer = net(), None
        optimizer = optfuse.fuse(adamw(model.parameters()), mode, bucket_bytes=number)
        for i in range(3):
            assert optfuse.summary(optimizer).created == 0
            loss_of(model, i).backward()
        assert optfuse.summary(optimizer).created == 6
    else:
        assert optfuse.Forward(max_grad_norm=number).max_grad_norm == 0.25


@pytest.mark.parametrize("of", (list, tuple, iter, dict.fromkeys, nn.ParameterList))
def test_parameters_come_in_every_iterable(of):
    model = net()
    optfuse.fuse(adamw(model.parameters()), eager=of(model[0].parameters()))
    loss_of(model, 0).backward()
    norm = optfuse.clip_grad_norm_(of(model.parameters()), 1e-3, foreach=False)
    assert norm > 1e-3 > nn.utils.get_total_norm([p.grad for p in model.parameters()]) / 2


def test_numpys_truth_values_are_flags():
    forward = optfuse.Forward(fold=np.False_)
    optimizer = optfuse.fuse(adamw(net().parameters()), forward, strict=np.True_)
    assert optfuse.summary(optimizer).mode == "forward"


def test_a_script_runs_as_it_is_where_optfuse_is_disabled():
    """All but what would train differently: nobody else clips."""
    python_ok(
        "import torch, optfuse\n"
        "from common import adamw, net, train\n"
        "model = net(); stock = adamw(model.parameters())\n"
        "optimizer = optfuse.fuse(stock, optfuse.Backward(accumulate=2))\n"
        "train(model, optimizer, 0)\n"
        "optfuse.flush(optimizer)\n"
        "with optfuse.accumulate(optimizer): pass\n"
        "assert 'disabled' in str(optfuse.summary(optimizer))\n"
        "assert optfuse.unfuse(optimizer) is stock and type(stock) is torch.optim.AdamW\n"
        "for wrong in (lambda: optfuse.fuse(stock, optfuse.Forward(max_grad_norm=1.0)),\n"
        "              lambda: optfuse.fuse(stock, mode='sideways'),\n"
        "              lambda: optfuse.flush(model)):\n"
        "    try: wrong()\n"
        "    except optfuse.Error: continue\n"
        "    raise SystemExit('not refused')\n",
        OPTFUSE_DISABLE="1",
    )
