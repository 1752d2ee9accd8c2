# SPDX-License-Identifier: BSD-3-Clause
"""Memory that is given to another library by DLPack's functions in C, and by a tensor's name; the
other ways are deeds (programs/deeds/memory.py)."""

import ctypes

import numpy as np
import pytest
import torch
from common import adamw, net, train

import optfuse


def test_a_tensor_by_its_name_is_refused():
    model = net()
    optfuse.fuse(adamw(model.parameters()))
    with pytest.raises(optfuse.Error, match="by position"):
        torch._C._to_dlpack_versioned(data=model[0].weight.detach())


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
    train(model, optimizer, 0)
    average = optimizer.state[model[0].weight]["exp_avg"]
    with pytest.raises(RuntimeError, match="invalid"):
        managed(average)
    before = average.clone()
    kept = managed(average)
    train(model, optimizer, 1)
    assert torch.equal(kept, before)
    optfuse.flush(optimizer)
    assert torch.equal(kept, average) and not torch.equal(kept, before)
