# SPDX-License-Identifier: BSD-3-Clause
"""Forward mode is transparent: whatever is read after step() is what stock
would show, whichever way it is read while the update is pending."""

import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
from common import adamw, everything, loss_of, net, same, sgd, train
from scripts import trained
from torch import nn

STEPS = 4


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_address(tensor):
    """The elements as C sees them."""
    size = tensor.numel() * tensor.element_size()
    return np.frombuffer(ctypes.string_at(tensor.data_ptr(), size), np.float32).tolist()


def without_grad(t):
    """The very tensor, where DLPack takes it."""
    return t.detach() if t.requires_grad else t


def set_into(tensor):
    with torch.no_grad():
        return torch.empty(0).set_(tensor.data).clone()


READS = {
    "add": lambda t: t + 1,
    "in a sum": lambda t: t.sum(),
    "item": lambda t: t.abs().max().item(),
    "matmul": lambda t: t.T @ t,
    "linear": lambda t: nn.functional.linear(torch.ones(1, t.shape[1]), t),
    "index": lambda t: t[0],
    "boolean mask": lambda t: t[t > 0],
    "iteration": lambda t: list(t),
    "view": lambda t: t.view(-1),
    "transpose": lambda t: t.t().contiguous(),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "cat in a list": lambda t: torch.cat([torch.zeros_like(t), t]),
    "foreach": lambda t: torch._foreach_norm([t, t]),
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t]),
    "out=": lambda t: torch.add(t.detach(), 1, out=torch.empty(t.shape)),
    "to another dtype": lambda t: t.to(torch.float64),
    "tolist": lambda t: t.tolist(),
    "repr": lambda t: repr(t),
    "format": lambda t: f"{t.sum():.9f}",
    "torch.equal": lambda t: torch.equal(t, torch.zeros_like(t)),
    "allclose": lambda t: torch.allclose(t, torch.ones_like(t)),
    "numpy": lambda t: t.detach().numpy().tolist(),
    "numpy(force)": lambda t: t.numpy(force=True).tolist(),
    "np.asarray": lambda t: np.asarray(t.detach()).tolist(),
    "numpy ufunc": lambda t: np.abs(t.detach()).tolist(),
    "DLPack": lambda t: torch.from_dlpack(t.detach()),
    "DLPack to numpy": lambda t: np.from_dlpack(t.detach()).tolist(),
    "DLPack capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(without_grad(t))),
    "DLPack of data": lambda t: torch.utils.dlpack.from_dlpack(t.data.__dlpack__()),
    "data_ptr": through_address,
    "untyped_storage": lambda t: bytes(t.untyped_storage()),
    "storage": lambda t: t.storage().tolist(),
    "set_": set_into,
    "copy_ from": lambda t: torch.zeros(t.shape).copy_(t.detach()),
    "to the host": lambda t: t.cpu(),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "copy": lambda t: copy.copy(t.detach()),
    "torch.save": saved_and_loaded,
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())),
    "as_strided": lambda t: torch.as_strided(t.detach(), (3,), (2,)),
    "as_tensor": lambda t: torch.as_tensor(t.detach()).clone(),
    "under inference_mode": torch.inference_mode()(lambda t: t.sum()),
    "under no_grad": torch.no_grad()(lambda t: t.mul(2)),
    "under vmap": lambda t: torch.vmap(lambda row: row.sum())(t.detach()),
    "under func.grad": lambda t: torch.func.grad(lambda w: w.square().sum())(t.detach()),
    "under autocast": torch.autocast("cpu", torch.bfloat16)(lambda t: t.T @ t),
    "under a dispatch mode": lambda t: dispatched(t),
}


def dispatched(tensor):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return tensor.T @ tensor


def read_while_pending(pick, read):
    """A script that reads, in every iteration, what pick() chooses."""

    def between(model, optimizer, i):
        for tensor in pick(model, optimizer):
            yield "read", read(tensor)

    return trained(between=between)


every_way = pytest.mark.parametrize("way", READS)
WEIGHT = 2  # the index of the layer in net() that is looked at


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@every_way
def test_weights_read_while_pending(way):
    same(read_while_pending(lambda model, _: [model[WEIGHT].weight], READS[way]))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@every_way
def test_gradients_read_while_pending(way):
    same(read_while_pending(lambda model, _: [model[WEIGHT].weight.grad], READS[way]))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@every_way
def test_state_read_while_pending(way):
    def state(model, optimizer):
        return [optimizer.state[model[WEIGHT].weight]["exp_avg_sq"]]

    same(read_while_pending(state, READS[way]))


WHOLE = {
    "state_dict": lambda model, opt: dict(model.state_dict()),
    "parameters as they are": lambda model, opt: list(model.parameters()),
    "state_dict, deepcopied": lambda model, opt: dict(copy.deepcopy(model.state_dict())),
    "model, deepcopied": lambda model, opt: list(copy.deepcopy(model).parameters()),
    "model, saved": lambda model, opt: list(saved_and_loaded(model).parameters()),
    "model, pickled": lambda model, opt: list(pickle.loads(pickle.dumps(model)).parameters()),
    "state_dict, saved": lambda model, opt: dict(saved_and_loaded(model.state_dict())),
    "parameter, saved": lambda model, opt: saved_and_loaded(model[0].weight),
    "gradient, saved": lambda model, opt: saved_and_loaded(model[0].weight.grad),
    "optimizer state": lambda model, opt: opt.state_dict(),
    "optimizer state, saved": lambda model, opt: saved_and_loaded(opt.state_dict()),
    "all together, saved": lambda model, opt: saved_and_loaded(
        {"model": model.state_dict(), "optimizer": opt.state_dict()}
    )["optimizer"],
    "step counters": lambda model, opt: [float(s["step"]) for s in opt.state.values()],
    "per parameter norms": lambda model, opt: [p.norm() for p in model.parameters()],
    "foreach of all": lambda model, opt: torch._foreach_norm(list(model.parameters())),
    "to another dtype": lambda model, opt: list(copy.deepcopy(model).double().parameters()),
}


@pytest.mark.parametrize("what", WHOLE)
def test_the_whole_read_while_pending(what):
    def between(model, optimizer, i):
        yield what, WHOLE[what](model, optimizer)

    same(trained(between=between))


def test_the_step_counter_is_exact_at_every_step():
    def between(model, optimizer, i):
        for state in optimizer.state.values():
            assert state["step"].item() == i + 1, f"step {i + 1} reads {state['step']}"
            yield "step", state["step"]

    same(trained(between=between))


HELD = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.detach().numpy(),
    "view": lambda t: t.detach().view(-1)[3:],
    "slice": lambda t: t.detach()[1],
    "DLPack": lambda t: torch.from_dlpack(t.detach()),
    "storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize("alias", HELD)
@pytest.mark.parametrize("when", ("before fuse", "after fuse", "while pending"))
def test_aliases_held_across_steps_see_every_update(alias, when):
    def script(wrap):
        model = net()
        weight = model[WEIGHT].weight
        held = HELD[alias](weight) if when == "before fuse" else None
        optimizer = wrap(adamw(model.parameters()))
        held = HELD[alias](weight) if when == "after fuse" else held
        for i in range(STEPS):
            train(model, optimizer, i)
            if i == 1 and when == "while pending":
                held = HELD[alias](weight)
            if held is not None:
                yield "alias", bytes(held) if alias == "storage" else held.tolist()

    same(script)


def test_state_dict_references_held_across_steps_see_every_update():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0)
        held = model.state_dict(), optimizer.state_dict()
        for i in range(STEPS):
            train(model, optimizer, i)
            yield "held", [dict(held[0]), held[1]]

    same(script, prove=False)


def test_gradients_held_past_zero_grad_keep_their_values():
    def script(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        held = []
        for i in range(STEPS):
            train(model, optimizer, i)
            held.append([p.grad for p in model.parameters()])
        yield "gradients", held
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("modes", ((torch.no_grad,), (torch.inference_mode,)))
def test_evaluation_between_steps(modes):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            model.train()
            train(model, optimizer, i)
            model.eval()
            wrap.pending()
            with modes[0]():
                yield "loss", loss_of(model, 100 + i).item()

    same(script)


def test_loss_curve_without_looking_at_anything():
    def iteration(model, optimizer, i):
        yield "loss", train(model, optimizer, i).item()

    same(trained(iteration=iteration, steps=50))
