# SPDX-License-Identifier: BSD-3-Clause
"""Releases of PyTorch whose bits nobody has compared with ours, and those that are known
to round otherwise: fuse() takes a few steps both ways, and where a bit differs the class's
own step() updates. The list of releases is another one here, so that this one is unknown."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from common import as_of_torch, net, python, same, train
from optim_classes import CLASSES, build, model_for
from torch.optim import SGD, Adam, AdamW, RMSprop

import optfuse
from optfuse import _rules
from optfuse._library import releases
from optfuse._library.bindings import DTYPES
from optfuse._link import link_of
from optfuse._options import is_recorded
from optfuse._trials import stock_trial

RELEASE = releases.release_of(torch.__version__)
MODES = ("forward", "backward")


@pytest.fixture
def unknown(monkeypatch):
    """Each trial is made anew, and quickly."""
    monkeypatch.setattr(releases, "TESTED", ("2.0",))
    monkeypatch.setattr(stock_trial, "known", {})
    monkeypatch.setattr(stock_trial, "SIZES", (1, 7, 64, 1003))


#: PyTorch's fused SGD in 16 bits, which even reads past the end.
BROKEN = [(SGD, dtype) for dtype in DTYPES[2:] if releases.holds("sgd", dtype, RELEASE)]

WITH_KERNELS = [cls for cls in CLASSES if cls in _rules.RULES]


def updates_by(optimizer):
    """Its own step() if the class is recorded, whatever runs the lines."""
    if is_recorded(optimizer) or isinstance(link_of(optimizer).rule, _rules.RecordedRule):
        return {"own step()"}
    return set(optfuse.summary(optimizer).isa.values())


def planted(**options):
    """RMSprop by a rule that takes eps for the weight decay, and the other way round."""
    right = _rules.RULES[RMSprop]
    order = list(right.options)
    i, j = order.index("eps"), order.index("weight_decay")
    order[i], order[j] = order[j], order[i]
    return replace(right, options=tuple(order), **options)


# Facts about the releases that the tests run with


def test_of_a_known_release_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(stock_trial, "known", {})
    for cls in CLASSES:
        if cls in _rules.RULES and not stock_trial.unknown_dtypes(_rules.RULES[cls]):
            optfuse.fuse(build(cls, model_for(cls).parameters()))
    assert not stock_trial.known


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", WITH_KERNELS, ids=lambda cls: cls.__name__)
def test_where_this_release_rounds_otherwise_the_class_steps(cls, dtype, mode):
    """And only there."""

    def script(wrap):
        model = model_for(cls).to(getattr(torch, dtype))
        optimizer = wrap(build(cls, model.parameters()))
        for i in range(3):
            optimizer.zero_grad()
            torch.manual_seed(i)
            model(torch.randn(5, 6, dtype=getattr(torch, dtype))).square().sum().backward()
            optimizer.step()
        yield "parameters", list(model.parameters())

    rule = _rules.RULES[cls]
    if (cls, dtype) not in BROKEN:
        same(script, mode)
    optimizer = build(cls, model_for(cls).to(getattr(torch, dtype)).parameters())
    by_class = updates_by(optfuse.fuse(optimizer, mode)) == {"own step()"}
    assert by_class == (not releases.holds(rule.name, dtype, RELEASE))


@pytest.mark.skipif(RELEASE not in releases.TESTED, reason="not among the tested releases")
@pytest.mark.parametrize("rule, dtype", releases._LAST)
def test_what_is_noted_of_releases_is_so(rule, dtype, monkeypatch):
    """A trial, whatever the list says, finds the difference where it is noted."""
    if rule == "sgd" and releases.holds(rule, dtype, RELEASE):
        pytest.skip("PyTorch's fused SGD in 16 bits is broken in this release")
    monkeypatch.setattr(releases, "_LAST", {(rule, dtype): "2.0"})
    monkeypatch.setattr(stock_trial, "known", {})
    cls = next(cls for cls, one in _rules.RULES.items() if one.name == rule)
    optimizer = optfuse.fuse(build(cls, model_for(cls).to(getattr(torch, dtype)).parameters()))
    monkeypatch.undo()
    assert (updates_by(optimizer) == {"own step()"}) == (not releases.holds(rule, dtype, RELEASE))


# A release that is not in the list


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", WITH_KERNELS, ids=lambda cls: cls.__name__)
def test_kernels_run_where_a_trial_finds_stocks_bits(cls, dtype, unknown, monkeypatch):
    if (cls, dtype) in BROKEN:
        pytest.skip("PyTorch's fused SGD in 16 bits is broken in this release")
    optimizer = build(cls, model_for(cls).to(getattr(torch, dtype)).parameters())
    optfuse.fuse(optimizer)
    assert stock_trial.known, "there was no trial"
    by_class = updates_by(optimizer) == {"own step()"}
    monkeypatch.undo()
    assert by_class == (not releases.holds(_rules.RULES[cls].name, dtype, RELEASE))


@pytest.mark.parametrize("mode", MODES)
def test_an_update_with_other_bits_gives_way_to_the_class(mode, unknown, monkeypatch):
    monkeypatch.setitem(_rules.RULES, RMSprop, planted())

    def script(wrap):
        model = net()
        optimizer = wrap(build(RMSprop, model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
        if wrap.fused:
            assert updates_by(optimizer) == {"own step()"}
            line = "because in a trial the kernels gave other bits"
            assert line in str(optfuse.summary(optimizer))
            assert "(float32 on cpu)" in str(optfuse.summary(optimizer))
        yield "parameters", list(model.parameters())
        yield "state", optimizer.state_dict()

    same(script, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", (SGD, AdamW))
def test_a_class_whose_own_step_is_fused(cls, mode, unknown, monkeypatch):
    """It notes in an attribute that it has looked at its parameters."""
    monkeypatch.setattr(stock_trial, "_compare", lambda *_: "the parameter")

    def script(wrap):
        model = net()
        optimizer = wrap(cls(model.parameters(), lr=0.1, fused=True))
        for i in range(4):
            train(model, optimizer, i)
        if wrap.fused:
            assert updates_by(optimizer) == {"own step()"}
        yield "parameters", list(model.parameters())

    same(script, mode, prove=False)


def test_one_bit_of_one_element_is_enough(unknown, monkeypatch):
    step = AdamW.step

    def with_another_bit(self, closure=None):
        step(self)
        if type(self) is AdamW:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].view(torch.int32)[3] ^= 1

    monkeypatch.setattr(AdamW, "step", as_of_torch(with_another_bit))
    assert updates_by(optfuse.fuse(AdamW([torch.nn.Parameter(torch.ones(9))]))) == {"own step()"}


def test_without_the_trial_other_bits_are_trained_with():
    """The negative control."""
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    code = (
        "import folders, optfuse, test_releases as t\n"
        "t.releases.TESTED = ('2.0',)\n"
        "t._rules.RULES[t.RMSprop] = t.planted()\n"
        "print(t.updates_by(optfuse.fuse(t.RMSprop(t.net().parameters()))))\n"
    )
    with_trial = python(code, OPTFUSE_LIBRARY=library)
    without = python(code, OPTFUSE_LIBRARY=library, OPTFUSE_TEST_GUARDS_OFF="tried")
    assert "own step()" in with_trial.stdout, with_trial.stderr
    assert without.returncode == 0 and "own step()" not in without.stdout, without.stderr


def test_a_trial_that_fails_leaves_the_class_its_step(unknown, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such option any more")

    monkeypatch.setattr(_rules, "_n_lists", fail)
    optimizer = optfuse.fuse(RMSprop(net().parameters()))
    assert updates_by(optimizer) == {"own step()"}
    assert "the trial of the kernels failed: RuntimeError: no such option" in str(
        optfuse.summary(optimizer)
    )


def test_flags_that_select_another_implementation_matter_as_before(unknown):
    """The trial is against the reference, not against what the flags select."""
    optimizer = optfuse.fuse(Adam(net().parameters(), foreach=True))
    assert optfuse.summary(optimizer).reference_differs == (0,)
    for options in ({"foreach": True}, {"capturable": True}):
        with pytest.raises(optfuse.Error, match="strict=True|capturable=True"):
            optfuse.fuse(Adam(net().parameters(), **options), strict=True)


def test_each_kind_is_tried_once(unknown, monkeypatch):
    optimizer = optfuse.fuse(RMSprop(net().parameters(), lr=1.0))
    monkeypatch.setattr(stock_trial, "_compare", lambda *_: pytest.fail("tried again"))
    for other in (optfuse.fuse(RMSprop(net().parameters(), lr=2.0)), copy.deepcopy(optimizer)):
        assert updates_by(other).isdisjoint({"own step()"})


def step_of_doubles(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_was_cast_is_refused_until_it_is_fused_again(mode, unknown):
    """A trial was passed for one dtype."""
    model = net()
    optimizer = optfuse.fuse(RMSprop(model.parameters()), mode=mode)
    model.double()
    with pytest.raises(optfuse.Error, match="is float64 on cpu, but was float32 on cpu when"):
        step_of_doubles(model, optimizer)
    optimizer.zero_grad()
    optimizer = optfuse.fuse(optfuse.unfuse(optimizer), mode=mode)
    step_of_doubles(model, optimizer)
    assert set(optfuse.summary(optimizer).isa) == {"float64"}


def test_of_a_known_release_a_model_may_be_cast():
    model = net()
    optimizer = optfuse.fuse(RMSprop(model.parameters()))
    model.double()
    step_of_doubles(model, optimizer)
    assert set(optfuse.summary(optimizer).isa) == {"float64"}


def test_only_a_cast_to_a_dtype_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(releases, "_LAST", {("rmsprop", "bfloat16"): "2.0"})
    for dtype in (torch.float64, torch.bfloat16):
        model = net()
        optimizer = optfuse.fuse(RMSprop(model.parameters()))
        for p in model.to(dtype).parameters():
            p.grad = torch.ones_like(p)
        if dtype is torch.float64:
            optimizer.step()
            continue
        with pytest.raises(optfuse.Error, match="is bfloat16 on cpu, but was float32 on cpu when"):
            optimizer.step()


def test_a_group_that_has_other_bits_is_not_added(unknown, monkeypatch):
    known = net()
    optimizer = optfuse.fuse(RMSprop(known.parameters()))
    monkeypatch.setitem(_rules.RULES, RMSprop, planted())
    with pytest.raises(optfuse.Error, match="fuse it again with all groups"):
        optimizer.add_param_group({"params": net().double().parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": net().parameters()})


def test_bits_are_those_of_stock_after_a_group_was_added(unknown):
    def script(wrap):
        model, more = net(), net()
        optimizer = wrap(build(AdamW, model.parameters()))
        train(model, optimizer, 0)
        optimizer.add_param_group({"params": list(more.parameters())})
        for i in range(1, 4):
            train(torch.nn.Sequential(model, torch.nn.Linear(3, 6, bias=False), more), optimizer, i)
        yield "parameters", [*model.parameters(), *more.parameters()]

    same(script)
