# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and Muon in backward mode, without Python: torch's operators in the order of the
class's step(), with its bits. The class makes the state, and updates where something is not
as usual; with which of the two an update was made is seen here as well."""

import copy
import math
import pickle

import pytest
import torch
from common import assert_same, everything, refused, same, snapshot
from torch.optim import Adafactor, Muon

import optfuse

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = {
    Adafactor: (
        (),
        (1,),
        (1000,),
        (40_003,),
        (1, 1),
        (20, 50),
        (257, 131),
        (2, 3, 5, 7),
        (6, 1, 9),
    ),
    Muon: ((1, 1), (20, 50), (50, 20), (257, 131), (1, 9)),
}
OPTIONS = {
    Adafactor: (
        {},
        {"lr": 1},
        {"lr": 0.3, "weight_decay": 0.1, "maximize": True, "eps": (1e-5, 1e-2)},
        {"beta2_decay": -0.3, "d": 2, "eps": [None, 0.5]},
    ),
    Muon: (
        {},
        {"lr": 0.1, "nesterov": False, "ns_steps": 3},
        {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3},
        {"adjust_lr_fn": "original", "momentum": 0.3, "ns_coefficients": (3, -4.5, 2.0)},
    ),
}


CASES = [(cls, i) for cls in OPTIONS for i in range(len(OPTIONS[cls]))]


class Params(torch.nn.Module):
    def __init__(self, shapes, dtype):
        super().__init__()
        self.dtype = dtype
        self.all = torch.nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)

    def gradient(self, i, k):
        generator = torch.Generator().manual_seed(100 * i + k)
        noise = torch.randn(self.all[k].shape, generator=generator)
        return (noise * 10.0 ** (i % 5 - 3)).to(self.dtype)

    def loss(self, i):
        return sum((p * self.gradient(i, k)).sum() for k, p in enumerate(self.all))


def training(cls, shapes=None, dtype=torch.float32, steps=20, **options):
    def script(wrap):
        model = Params(shapes or SHAPES[cls], dtype)
        optimizer = wrap(cls(model.parameters(), **options))
        for i in range(steps):
            optimizer.zero_grad()
            model.loss(i).backward()
            optimizer.step()
            if i % 7 == 4:
                yield from everything(model, optimizer)
        yield from everything(model, optimizer)
        yield (
            "versions",
            [t._version for p in model.parameters() for t in optimizer.state[p].values()],
        )

    return script


@pytest.mark.parametrize("threads", [2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls, i", CASES, ids=lambda v: getattr(v, "__name__", v))
def test_bits_and_versions_are_those_of_the_class(cls, i, dtype, threads, python_updates):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same(training(cls, dtype=dtype, **OPTIONS[cls][i]), "backward")
    finally:
        torch.set_num_threads(before)
    assert sorted(python_updates) == list(range(len(SHAPES[cls]))), "only the first ones"


def test_parameters_with_strides_of_their_own(python_updates):
    def script(cls):
        def run(wrap):
            model = torch.nn.Module()
            wide = torch.randn(12, 40)
            model.holes = torch.nn.Parameter(wide[:, ::2])
            model.turned = torch.nn.Parameter(torch.randn(9, 14).t())
            optimizer = wrap(cls(model.parameters()))
            for i in range(6):
                for k, p in enumerate(model.parameters()):
                    generator = torch.Generator().manual_seed(10 * i + k)
                    (p * torch.randn(p.shape[::-1], generator=generator).t()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            yield from everything(model, optimizer)

        return run

    for cls in OPTIONS:
        same(script(cls), "backward", prove=False)
    assert python_updates == [1, 1], "the first ones; others have the memory of those with holes"


UNUSUAL = {
    "foreach": (Adafactor, {"foreach": True}),
    "a tensor as lr": (Adafactor, {"lr": torch.tensor(0.1)}),
    "a tensor as Muon's lr": (Muon, {"lr": torch.tensor(0.1, dtype=torch.float64)}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_options_are_left_to_the_class(name, python_updates):
    cls, options = UNUSUAL[name]
    same(training(cls, steps=5, **options), "backward")
    assert len(python_updates) == 5 * len(SHAPES[cls])


def one(cls, shape=(4, 6), **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    return p, cls([p], **options)


def step(p, optimizer, i=0):
    (p * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def backward(optimizer):
    return optfuse.fuse(optimizer, "backward")


STRANGE = {
    "no such way to adjust": (Muon, "adjust_lr_fn", "other"),
    "a number as way to adjust": (Muon, "adjust_lr_fn", 1.0),
    "no momentum": (Muon, "momentum", 0),
    "a tensor as momentum": (Muon, "momentum", torch.tensor(0.5)),
    "endless rate": (Adafactor, "lr", math.inf),
    "no number": (Adafactor, "eps", (math.nan, 1e-3)),
    "NumPy's number": (Adafactor, "lr", torch.tensor(0.1).numpy()[()]),
    "growing": (Adafactor, "beta2_decay", 0.3),
}


@pytest.mark.parametrize("name", STRANGE)
def test_options_that_are_set_later_and_that_no_constructor_takes(name):
    cls, key, value = STRANGE[name]
    results = []
    for wrap in (lambda o: o, backward):
        p, optimizer = one(cls)
        optimizer = wrap(optimizer)
        for i in range(6):
            if i == 3:
                optimizer.param_groups[0][key] = value
            step(p, optimizer, i)
        results.append(snapshot((p.detach(), optimizer.state_dict()["state"])))
    assert_same("parameter and state", *results)


ERRORS = {
    "ns_steps": (Muon, "ns_steps", 100, "ValueError: Number of steps"),
    "half a step": (Muon, "ns_steps", 2.5, "TypeError"),
    "coefficients": (Muon, "ns_coefficients", (1.0, 2.0), "ValueError: Coefficients"),
    "no lr": (Adafactor, "lr", None, "TypeError"),
    "three epsilons": (Adafactor, "eps", (None, 1e-3, 1e-3), "ValueError: too many values"),
    "no clipping": (Adafactor, "d", 0.0, "ZeroDivisionError"),
    "overflow": (Adafactor, "beta2_decay", 5e3, "OverflowError"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_class(name):
    cls, key, value, words = ERRORS[name]
    p, optimizer = one(cls)
    optimizer = backward(optimizer)
    for i in range(3):
        step(p, optimizer, i)
    optimizer.param_groups[0][key] = value
    with pytest.raises(Exception, match=words.partition(": ")[2]) as raised:
        step(p, optimizer, 3)
    assert type(raised.value).__name__ == words.partition(":")[0]
    refused(optimizer.step, "step() on parameter 0", words, way_out="checkpoint")


def test_an_empty_parameter_is_an_error_of_the_class():
    p, optimizer = one(Adafactor, (0, 3))
    optimizer = backward(optimizer)
    with pytest.raises(ZeroDivisionError):
        step(p, optimizer)


EDITS = {
    "the order of the keys": lambda e: [e.update({k: e.pop(k)}) for k in ("row_var", "step")],
    "one key more": lambda e: e.update(note=torch.ones(3)),
    "a number more": lambda e: e.update(note=3),
    "a counter in float64": lambda e: e.update(step=e["step"].double()),
    "a counter before the first": lambda e: e.update(step=torch.tensor(-0.5)),
    "a view": lambda e: e.update(row_var=torch.ones(8, 2)[::2, :1]),
    "another one": lambda e: e.update(row_var=torch.ones(4, 1), col_var=torch.ones(1, 6)),
    "a scaled one": lambda e: e["row_var"].mul_(3.0),
}


@pytest.mark.parametrize("name", EDITS)
def test_state_that_was_edited(name):
    results = []
    for wrap in (lambda o: o, backward):
        p, optimizer = one(Adafactor)
        optimizer = wrap(optimizer)
        for i in range(6):
            if i == 3:
                EDITS[name](optimizer.state[p])
            step(p, optimizer, i)
        results.append(snapshot((p.detach(), optimizer.state_dict()["state"])))
    assert_same("parameter and state", *results)


@pytest.mark.parametrize("cls", OPTIONS)
def test_state_that_was_loaded_needs_no_python(cls, python_updates):
    p, stock = one(cls)
    for i in range(3):
        step(p, stock, i)
    again = torch.nn.Parameter(p.detach().clone())
    optimizer = backward(cls([again]))
    optimizer.load_state_dict(pickle.loads(pickle.dumps(stock.state_dict())))
    twin, copied = copy.deepcopy((again, optimizer))
    for i in range(3, 6):
        for pair in ((p, stock), (again, optimizer), (twin, copied)):
            step(*pair, i)
    assert not python_updates
    for param, other in ((again, optimizer), (twin, copied)):
        assert_same("parameter", snapshot(param.detach()), p.detach())
        assert_same("state", snapshot(other.state_dict()), stock.state_dict())


def test_a_group_of_two_dtypes_is_left_to_step(python_updates):
    """The class takes the epsilon of the first one's dtype for all."""

    def script(wrap):
        model = torch.nn.Module()
        model.narrow = torch.nn.Parameter(torch.randn(3).bfloat16())
        model.wide = torch.nn.Parameter(torch.randn(3))
        optimizer = wrap(Adafactor(model.parameters()))
        for i in range(4):
            for p in model.parameters():
                (p * (i - 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield from everything(model, optimizer)

    same(script, "backward", prove=False)
    assert not python_updates


def test_summary_says_what_updates():
    _, optimizer = one(Adafactor)
    fused = backward(optimizer)
    assert optfuse.summary(fused).isa == {"float32": "torch's operators"}
    assert "float32 torch's operators; bits of torch's own step()" in str(optfuse.summary(fused))
