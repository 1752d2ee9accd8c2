# SPDX-License-Identifier: BSD-3-Clause
"""Memory that was given to another library by DLPack, and is kept across steps: it shows every
update at once, and what is written there counts, as in stock."""

import ctypes

import numpy as np
import pytest
import torch
from common import adamw, batch, everything, net, same, sgd
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.dlpack import to_dlpack

import optfuse
from optfuse._library.bindings import lib

EXPORTS = {
    "from_dlpack": torch.from_dlpack,
    "NumPy": lambda t: torch.from_numpy(np.from_dlpack(t)),
    "to_dlpack": lambda t: torch.from_dlpack(to_dlpack(t)),
    "a capsule": lambda t: torch.from_dlpack(t.__dlpack__()),
    "versioned": lambda t: torch.from_dlpack(torch._C._to_dlpack_versioned(t)),
}
exports = pytest.mark.parametrize("export", EXPORTS)
makers = pytest.mark.parametrize("make", (adamw, sgd))


@pytest.fixture
def small_gradients_wait_too():
    usual = lib.of_shim_wait_from(0)
    yield
    lib.of_shim_wait_from(usual)


def backward(model, optimizer, i):
    optimizer.zero_grad()
    model(batch(i)[0]).square().mean().backward()


@exports
@makers
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_optimizer_state(export, make, mode):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        kept = []
        for i in range(5):
            backward(model, optimizer, i)
            optimizer.step()
            last = [list(entry.values())[-1] for entry in optimizer.state.values()]
            kept = kept or [*map(EXPORTS[export], last)]
            del last
            yield "state", kept
            if i == 2:
                kept[0].mul_(0.5)
        yield from everything(model, optimizer)

    same(script, mode, prove=False)


@exports
@makers
def test_gradients_that_are_written_after_step(export, make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(4):
            backward(model, optimizer, i)
            kept = [EXPORTS[export](p.grad) for p in model.parameters()]
            optimizer.step()
            for tensor in kept:
                tensor.fill_(5)
            del kept, tensor
        yield from everything(model, optimizer)

    same(script, prove=False)


@exports
def test_gradients_that_are_clipped(export, small_gradients_wait_too):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            backward(model, optimizer, i)
            kept = [EXPORTS[export](p.grad) for p in model.parameters()]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            yield "clipped", kept
            optimizer.step()
            del kept
        yield from everything(model, optimizer)

    same(script, prove=False)


@exports
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_parameters_that_need_no_gradient(export, mode):
    """Their gradients come from elsewhere, as in evolution strategies."""

    def script(wrap):
        params = [Parameter(torch.randn(n, 3), requires_grad=False) for n in (4, 9)]
        optimizer = wrap(adamw(params))
        kept = [EXPORTS[export](p) for p in params]
        for i in range(4):
            for p in params:
                p.grad = batch(i, len(p), 3)[0]
            optimizer.step()
            yield "parameters", kept
            kept[1].mul_(0.9)
        yield "state", optimizer.state_dict()

    same(script, mode, prove=False)


class Named(Parameter):
    pass


@pytest.mark.parametrize("kind", (Parameter, Named))
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_parameters_by_a_capsule(mode, kind):
    """PyTorch's older function does not ask whether a tensor needs a gradient."""

    def script(wrap):
        model = net()
        for layer in (model[0], model[2]):
            layer.weight = kind(layer.weight.detach())
        optimizer = wrap(adamw(model.parameters()))
        kept = [torch.from_dlpack(to_dlpack(p)) for p in model.parameters()]
        for i in range(4):
            backward(model, optimizer, i)
            optimizer.step()
            yield "parameters", kept
            kept[0].mul_(0.9)
        yield from everything(model, optimizer)

    same(script, mode, prove=False)


def test_a_tensor_by_its_name_is_refused():
    model = net()
    optfuse.fuse(adamw(model.parameters()))
    with pytest.raises(optfuse.Error, match="by position"):
        torch._C._to_dlpack_versioned(data=model[0].weight.detach())


@exports
def test_averages(export):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        averaged.requires_grad_(False)
        kept = []
        for i in range(4):
            backward(model, optimizer, i)
            optimizer.step()
            averaged.update_parameters(model)
            kept = kept or [EXPORTS[export](p) for p in averaged.parameters()]
            yield "averages", kept
        yield from everything(model, optimizer)

    same(script, prove=False)


@exports
def test_memory_that_nobody_keeps_waits_again(export):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            backward(model, optimizer, i)
            yield "gradients", [EXPORTS[export](p.grad) for p in model.parameters()]
            optimizer.step()
            wrap.pending()
            yield "state", [EXPORTS[export](s["exp_avg"]) for s in optimizer.state.values()]

    same(script)


def managed(tensor):
    """As a library in C does that asks the class for DLPack's functions: it holds the tensor
    itself, and here for ever."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if api is None:
        pytest.skip("this release has no such functions")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    functions = ctypes.cast(
        pointer(api, b"dlpack_exchange_api") + 16, ctypes.POINTER(ctypes.c_void_p)
    )
    export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(functions[1])
    made = ctypes.c_void_p()
    export(tensor, ctypes.addressof(made))
    data = ctypes.cast(made.value + 32, ctypes.POINTER(ctypes.c_void_p))[0]
    floats = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(floats, tuple(tensor.shape)))


def test_functions_of_dlpack_in_c_read_raw_memory():
    """docs/hazards.md names them: they raise while an update is pending, and what they gave away
    shows it after flush()."""
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    backward(model, optimizer, 0)
    optimizer.step()
    average = optimizer.state[model[0].weight]["exp_avg"]
    with pytest.raises(RuntimeError, match="invalid"):
        managed(average)
    before = average.clone()
    kept = managed(average)
    backward(model, optimizer, 1)
    optimizer.step()
    assert torch.equal(kept, before)
    optfuse.flush(optimizer)
    assert torch.equal(kept, average) and not torch.equal(kept, before)
