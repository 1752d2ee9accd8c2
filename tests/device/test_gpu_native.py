# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and Muon on a GPU that the CPU plays: torch's operators, called from C++
on the update's stream, with the bits of the class's own step() there. What is not as
usual the class does, and everything where a trial shows another bit."""

import fakecuda
import pytest
import torch
from common import Fused, Stock, as_of_torch, assert_same, everything
from fakecuda import NAME
from legal import host_waits, legal, net, races_without, train
from torch.optim import Adafactor, Muon

import optfuse
from optfuse import _rules
from optfuse._process import drain_all
from optfuse._trials import stock_trial

MODES = ("forward", "backward")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = {
    Adafactor: ((), (1,), (1003,), (1, 1), (20, 50), (131, 57), (2, 3, 5)),
    Muon: ((1, 1), (20, 50), (50, 20), (131, 57)),
}
OPTIONS = {
    Adafactor: ({}, {"lr": 0.3, "weight_decay": 0.1, "maximize": True, "eps": (1e-5, 1e-2)},
                {"beta2_decay": -0.3, "d": 2}),
    Muon: ({}, {"lr": 0.1, "nesterov": False, "ns_steps": 3},
           {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3}),
}  # fmt: skip
CASES = [(cls, options) for cls, some in OPTIONS.items() for options in some]
OPERATORS = {"float32": "torch's operators"}
OWN = {"float32": "own step()"}


@pytest.fixture(autouse=True)
def small_trials(monkeypatch):
    """Trials of these tests' own, and quick."""
    monkeypatch.setattr(stock_trial, "known", {})
    monkeypatch.setattr(stock_trial, "STEPS", 3)


def parameters(cls, dtype=torch.float32, shapes=None):
    torch.manual_seed(1)
    some = shapes or SHAPES[cls]
    return [torch.randn(shape).to(NAME, dtype).requires_grad_() for shape in some]


def steps(optimizer, params, n, seed=0):
    for step in range(n):
        torch.manual_seed(100 * seed + step)
        for p in params:
            p.grad = (torch.randn(p.shape) * 10.0 ** (step % 5 - 3)).to(p.device, p.dtype)
        optimizer.step()


def state_of(optimizer, params):
    return [dict(optimizer.state[p]) for p in params]


def isa(optimizer):
    return optfuse.summary(optimizer).isa


def made(cls, model):
    """For what the class takes of a model."""
    return cls([p for p in model.parameters() if cls is not Muon or p.dim() == 2])


@pytest.mark.parametrize("cls, options", CASES, ids=str)
def test_they_pass_the_trial_and_have_the_bits_of_the_class(cls, options, python_updates):
    for dtype in DTYPES:
        ours, theirs = parameters(cls, dtype), parameters(cls, dtype)
        fused = optfuse.fuse(cls(ours, **options), strict=True)
        stock = cls(theirs, **options)
        python_updates.clear()
        steps(fused, ours, 10)
        steps(stock, theirs, 10)
        name = str(dtype).removeprefix("torch.")
        found = optfuse.summary(fused)
        assert found.isa == {name: "torch's operators"} and not found.own_step_because, str(found)
        assert_same(f"{name} parameters", ours, theirs)
        assert_same(f"{name} state", state_of(fused, ours), state_of(stock, theirs))
        assert sorted(python_updates) == list(range(len(ours))), "only the first ones"


def training(cls):
    def script(wrap):
        model = net()
        optimizer = wrap(made(cls, model))
        assert not wrap.fused or isa(optimizer) == OPERATORS
        for i in range(4):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_order_and_bits_are_those_of_the_class(cls, mode):
    legal(training(cls), mode)


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_on_a_stream_beside_backward_too(cls):
    legal(training(cls), "backward", side_stream=True)


def waited_for_before_the_launch(wrap):
    model = net()
    optimizer = wrap(made(Muon, model))
    for i in range(3):
        train(model, optimizer, i)
    a, b = fakecuda.stream(), fakecuda.stream()
    a.wait_stream(fakecuda.current())
    with a:
        train(model, optimizer, 3)
        optimizer.zero_grad()
        event = a.record_event()
    wrap.pending()
    b.wait_event(event)
    with b:
        for p in model.parameters():
            yield "weight", p
    fakecuda.synchronize()


def test_another_stream_that_waited_for_step_sees_the_update():
    legal(waited_for_before_the_launch)


def test_without_our_wait_it_would_not(monkeypatch):
    races_without("streams", waited_for_before_the_launch, monkeypatch)


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_the_host_waits_for_the_device_no_more_often_than_with_stock(cls):
    def waits(wrap):
        params = parameters(cls)
        optimizer = wrap(cls(params))
        steps(optimizer, params, 2)
        return host_waits(optimizer, params, "aten::linalg_vector_norm")

    stock, ours = waits(Stock()), waits(Fused("forward"))
    assert ours <= stock
    # Stock's Adafactor also asks the step counter, which is on the CPU.
    assert ours == (6 * len(SHAPES[cls]) if cls is Adafactor else 0)


# Work that the class does itself


def last_bit_flipped(cls, monkeypatch):
    """A step() that is the class's but for the last bit of one element."""
    step = cls.step

    def with_another_bit(self, closure=None):
        step(self)
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.view(torch.int32).view(-1)[0] ^= 1

    monkeypatch.setattr(cls, "step", as_of_torch(with_another_bit))


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_one_bit_of_one_element_sends_all_back_to_the_class(cls, monkeypatch):
    last_bit_flipped(cls, monkeypatch)
    optimizer = optfuse.fuse(cls(parameters(cls)))
    assert isa(optimizer) == OWN
    assert "because in a trial torch's operators gave other bits" in str(optfuse.summary(optimizer))


def test_without_the_trial_other_bits_are_trained_with(monkeypatch):
    """The negative control: the comparison sees what the trial keeps away."""
    last_bit_flipped(Muon, monkeypatch)
    ours, theirs = (parameters(Muon, shapes=((7, 3),)) for _ in range(2))
    stock = Muon(theirs)
    steps(stock, theirs, 3)
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "tried")
    optimizer = optfuse.fuse(Muon(ours))
    assert isa(optimizer) == OPERATORS
    steps(optimizer, ours, 3)
    with pytest.raises(AssertionError):
        assert_same("parameters", ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_the_trial_ends_with_numbers(cls, dtype, monkeypatch):
    """NaN equals NaN: of an overflow nothing could be seen."""
    monkeypatch.setattr(stock_trial, "STEPS", 8)
    ends = []
    made = stock_trial._made

    def and_kept(stock, options, params):
        ends.append(params)
        return made(stock, options, params)

    monkeypatch.setattr(stock_trial, "_made", and_kept)
    optfuse.fuse(cls(parameters(cls, dtype)))
    assert len(ends) >= 6, "three variations, both ways"
    for param in (param for params in ends for param in params):
        assert param.isfinite().all(), f"{tuple(param.shape)}: {param}"


def test_a_group_whose_trial_fails_is_refused(monkeypatch):
    optimizer = optfuse.fuse(Muon(parameters(Muon)))
    monkeypatch.setattr(stock_trial, "_compare", lambda *_: "the parameter")
    with pytest.raises(optfuse.Error, match="by torch's operators, but .* fuse it again with all"):
        optimizer.add_param_group({"params": parameters(Muon), "weight_decay": 0.3})
    assert len(optimizer.param_groups) == 1


UNUSUAL = {
    "foreach": (Adafactor, {"foreach": True}),
    "a tensor as lr": (Adafactor, {"lr": torch.tensor(0.1)}),
    "one on the device": (Muon, {"lr": torch.tensor(0.1, device=NAME)}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_options_are_left_to_the_class(name, python_updates):
    cls, options = UNUSUAL[name]
    ours, theirs = parameters(cls), parameters(cls)
    fused, stock = optfuse.fuse(cls(ours, **options)), cls(theirs, **options)
    assert isa(fused) == OWN
    python_updates.clear()
    steps(fused, ours, 3)
    steps(stock, theirs, 3)
    assert_same("parameters", ours, theirs)
    assert len(python_updates) == 3 * len(ours)


def test_a_step_counter_on_the_device_is_left_to_the_class(python_updates):
    """torch.set_default_device() puts it there; only the device may read it."""
    results = []
    for wrap in (lambda o: o, optfuse.fuse):
        params = parameters(Adafactor)
        optimizer = wrap(Adafactor(params))
        steps(optimizer, params, 1)
        for p in params:
            optimizer.state[p]["step"] = optimizer.state[p]["step"].to(NAME)
        python_updates.clear()
        steps(optimizer, params, 3, seed=1)
        results.append((params, state_of(optimizer, params)))
    assert_same("parameters and state", *reversed(results))
    assert len(python_updates) == 3 * len(SHAPES[Adafactor])


def test_what_a_graph_captures_is_the_step_of_the_class(python_updates):
    params = parameters(Muon)
    optimizer = optfuse.fuse(Muon(params))
    steps(optimizer, params, 2)
    drain_all()  # as torch.cuda.CUDAGraph.capture_begin does
    fakecuda.synchronize()
    python_updates.clear()
    stream = fakecuda.stream()
    fakecuda.capture(stream, 7)
    try:
        with stream:
            steps(optimizer, params, 1, seed=1)
    finally:
        fakecuda.capture(stream, 0)
    fakecuda.synchronize()
    assert len(python_updates) == len(params)


def test_parameters_on_cpu_and_gpu_are_both_updated_so(python_updates):
    def final(wrap):
        params = parameters(Muon, shapes=((7, 3),))
        params.append(torch.ones(3, 4, device="cpu", requires_grad=True))
        optimizer = wrap(Muon(params))
        python_updates.clear()
        steps(optimizer, params, 4)
        assert wrap is not optfuse.fuse or isa(optimizer) == OPERATORS
        return params

    theirs, ours = final(lambda optimizer: optimizer), final(optfuse.fuse)
    assert_same("parameters", ours, theirs)
    assert len(python_updates) == 2, "only the first ones"


def test_the_trial_leaves_nothing_behind():
    optimizer = Muon(parameters(Muon))
    before = torch.ops.fakecuda.bytes_in_use(0)
    optfuse.fuse(optimizer)
    fakecuda.synchronize()
    assert torch.ops.fakecuda.bytes_in_use(0) == before


def test_each_such_rule_has_shapes_that_its_class_takes():
    for cls, rule in _rules.RULES.items():
        if rule.external and rule.tried:
            assert rule.shapes
            cls([torch.ones(shape, requires_grad=True) for shape in rule.shapes])
