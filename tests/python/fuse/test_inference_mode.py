# SPDX-License-Identifier: BSD-3-Clause
"""State that a step() under torch.inference_mode() has made can't be updated in place
outside of it. Stock raises at the next step() there, with counters ahead of the rest;
ours raises before anything has changed, and goes on with clones."""

import pytest
import torch
from common import assert_same, same, snapshot
from optim_classes import CLASSES, OPTIONS, build, matrices, set_gradients
from own_classes import NewTensors, Tensors

import optfuse
from optfuse._rules import RULES

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def stepped_under_inference_mode(cls, wrap, make=build):
    params = matrices()
    optimizer = wrap(make(cls, params))
    set_gradients(params, 0)
    with torch.inference_mode():
        optimizer.step()
    set_gradients(params, 1)
    return params, optimizer


def all_of(params, optimizer):
    versions = [p._version for p in params]
    return snapshot([list(params), optimizer.state_dict()["state"], versions])


def put_clones_into_state(optimizer):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                entry[key] = value.clone()


def by_default(cls, params):
    """Stock's fused SGD goes on, unlike its default."""
    return cls(params, **OPTIONS.get(cls.__name__, {}))


@every_class
def test_a_step_outside_is_refused_before_anything_changes(cls):
    if cls is torch.optim.Adagrad:
        pytest.skip("it makes its state when it is made itself")
    if cls not in RULES:
        pytest.skip("its own step() raises")
    _, stock = stepped_under_inference_mode(cls, lambda optimizer: optimizer, by_default)
    with pytest.raises(RuntimeError, match="InferenceMode"):
        stock.step()
    params, optimizer = stepped_under_inference_mode(cls, optfuse.fuse)
    before = all_of(params, optimizer)
    for _ in range(2):
        with pytest.raises(optfuse.Error, match=r"of parameter 0 .* clone\(\)") as raised:
            optimizer.step()
        assert isinstance(raised.value, RuntimeError)
        assert_same("after the refusal", all_of(params, optimizer), before)


@every_class
def test_with_clones_it_goes_on(cls):
    def script(wrap):
        params, optimizer = stepped_under_inference_mode(cls, wrap)
        put_clones_into_state(optimizer)
        for step in range(2, 5):
            optimizer.step()
            wrap.pending()
            yield "parameters", list(params)
            yield "state", optimizer.state_dict()
            set_gradients(params, step)

    same(script)


@every_class
def test_every_step_under_inference_mode(cls):
    def script(wrap):
        params, optimizer = stepped_under_inference_mode(cls, wrap)
        for step in range(2, 5):
            with torch.inference_mode():
                optimizer.step()
            yield "parameters", [p.detach() for p in params]
            set_gradients(params, step)

    same(script, prove=False)


def test_a_class_that_replaces_its_state_goes_on_outside():
    optfuse.register(NewTensors, per_parameter=True)

    def script(wrap):
        params, optimizer = stepped_under_inference_mode(NewTensors, wrap)
        for step in range(2, 5):
            optimizer.step()
            yield "parameters", list(params)
            set_gradients(params, step)

    same(script, prove=False)


def test_a_class_that_updates_its_state_raises_in_step():
    optfuse.register(Tensors, per_parameter=True)
    _, optimizer = stepped_under_inference_mode(Tensors, optfuse.fuse)
    with pytest.raises(RuntimeError, match="InferenceMode"):
        optimizer.step()
