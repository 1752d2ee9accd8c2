# SPDX-License-Identifier: BSD-3-Clause
"""State of optimizers and copies of them, for every class that fuses: a theme of
PyTorch's own test/test_optim.py. A fused optimizer and its stock twin are led
through the same and compared by bits."""

import copy
import io
import pickle

import pytest
import torch
from common import Stock, everything, same, train
from optim_classes import build, matrices, model_for
from optim_scripts import STEPS, begun, both_modes, every_class, go_on, resumed, saved_from

import optfuse


@every_class
@both_modes
def test_state_dict_goes_from_fused_to_stock_and_back(cls, mode):
    def script(wrap):
        model, optimizer = begun(cls, wrap)
        second, stock = resumed(cls, model, saved_from(optimizer), Stock())
        yield from go_on(second, stock)
        stock.zero_grad()
        yield from go_on(*resumed(cls, second, saved_from(stock), wrap), 20)
        yield from go_on(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_state_loaded_by_an_optimizer_with_parameters_in_another_order(cls, mode):
    def script(wrap):
        model, optimizer = begun(cls, wrap)
        saved = saved_from(optimizer)
        n = len(saved["param_groups"][0]["params"])
        saved["state"] = {n - 1 - i: state for i, state in saved["state"].items()}
        yield from go_on(*resumed(cls, model, saved, wrap, reversed))

    same(script, mode)


@every_class
@both_modes
def test_state_dict_by_torch_save_with_weights_only(cls, mode):
    def script(wrap):
        model, optimizer = begun(cls, wrap)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        yield from go_on(*resumed(cls, model, loaded, wrap))

    same(script, mode)


@every_class
@both_modes
def test_state_dict_with_the_names_of_parameters(cls, mode):
    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.named_parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
        yield from everything(model, optimizer)
        yield "names", optimizer.param_groups[0]["param_names"]

    same(script, mode)


@every_class
@both_modes
def test_an_older_state_dict_without_the_newer_options(cls, mode):
    newer = ("foreach", "fused", "maximize", "capturable", "differentiable")

    def script(wrap):
        model, optimizer = begun(cls, wrap)
        saved = saved_from(optimizer)
        for option in newer:
            saved["param_groups"][0].pop(option, None)
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:  # stock's default may be another implementation
            group.update({k: v for k, v in build(cls, matrices()).defaults.items() if k in newer})
        yield from go_on(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_a_loaded_step_that_is_a_number(cls, mode):
    def script(wrap):
        model, optimizer = begun(cls, wrap)
        saved = saved_from(optimizer)
        for state in saved["state"].values():
            if "step" in state:
                state["step"] = state["step"].item()
        optimizer.load_state_dict(saved)
        yield from go_on(model, optimizer)

    same(script, mode)


@every_class
@both_modes
def test_state_begins_when_stock_s_begins(cls, mode):
    """For most classes at a parameter's first gradient; for some at once."""

    def script(wrap):
        model = model_for(cls)
        optimizer = wrap(build(cls, model.parameters()))
        yield "before", [optimizer.state.get(p, {}) for p in model.parameters()]
        yield "length", len(optimizer.state)
        optimizer.step()
        yield "without gradients", [optimizer.state.get(p, {}) for p in model.parameters()]
        train(model, optimizer, 0)
        yield "after", [optimizer.state.get(p, {}) for p in model.parameters()]
        yield "order", [list(optimizer.state.get(p, {})) for p in model.parameters()]
        train(model, optimizer, 1)
        wrap.pending()

    same(script, mode)


# Copies


@every_class
@both_modes
def test_deepcopy(cls, mode):
    def script(wrap):
        model, optimizer = begun(cls, wrap)
        twin, twins = copy.deepcopy((model, optimizer))
        public = {k for k in vars(twins) if not k.startswith("_")}
        yield "public attributes", sorted(public - {"step"})  # which is ours where it is recorded
        yield from go_on(model, optimizer)
        yield from go_on(twin, twins, 50)

    same(script, mode)


@every_class
@both_modes
def test_pickle(cls, mode):
    def script(wrap):
        model, optimizer = begun(cls, wrap)
        twin, twins = pickle.loads(pickle.dumps((model, optimizer)))
        assert type(twins) is cls, f"it came back as {type(twins)}"
        yield from go_on(model, optimizer)
        yield from go_on(twin, wrap(twins), 50)

    same(script, mode)


UNUSUAL = {
    "a flag": ("ran", True),
    "a tensor": ("buffer", torch.ones(3)),
    "a list": ("history", [1, 2]),
    "nothing": (None, None),
    "a dict": (("a", 1), {"step": 5}),
}


@pytest.mark.parametrize("entry", UNUSUAL.values(), ids=UNUSUAL)
@both_modes
def test_entries_of_state_that_are_no_parameters(entry, mode):
    """As hooks leave some: neither their keys nor what they are concerns an update."""

    def script(wrap):
        for cls in (torch.optim.AdamW, torch.optim.Adafactor):
            model, optimizer = begun(cls, wrap)
            optimizer.register_step_post_hook(
                lambda optimizer, *_: optimizer.state.__setitem__(*entry)
            )
            for i in range(4):
                train(model, optimizer, i)
            yield "parameters", dict(model.state_dict())
            yield "state", [optimizer.state[p] for p in model.parameters()]
            yield "entry", optimizer.state[entry[0]]

    same(script, mode)


@both_modes
def test_an_option_that_needs_other_state_leaves_the_state_that_there_is(mode):
    """amsgrad, switched on late, misses a tensor: every step raises, and loses nothing."""

    def script(wrap):
        model, optimizer = begun(torch.optim.AdamW, wrap)
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True
        with pytest.raises((KeyError, optfuse.Error), match="max_exp_avg_sq"):
            train(model, optimizer, 5)
        yield from everything(model, optimizer)

    same(script, mode)
