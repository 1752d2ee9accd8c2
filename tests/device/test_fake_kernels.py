# SPDX-License-Identifier: BSD-3-Clause
"""On the fake GPU each kernel tells what it reads and writes: those of torch.optim with fused=True,
and optfuse's CUDA kernels, whose own source runs behind the C ABI."""

import ctypes
import os

import gpu
import pytest
import torch
from gpu import NAME

MAX_STATE, MAX_COUNTERS = 8, 2  # of kernels/kernels.h
_lib = ctypes.CDLL(os.environ.get("OPTFUSE_CUDA_LIBRARY"))
_lib.of_cuda_error.restype = ctypes.c_char_p


class Entry(ctypes.Structure):  # kernels/gpu_update.h has both
    _fields_ = [
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("state", ctypes.c_void_p * MAX_STATE),
        ("n", ctypes.c_size_t),
        ("step_at", ctypes.c_void_p),
        ("step", ctypes.c_double),
        ("numbers_at", ctypes.c_void_p * MAX_COUNTERS),
    ]


class Update(ctypes.Structure):
    _fields_ = [
        ("rule", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int),
        ("hyper", ctypes.POINTER(ctypes.c_double)),
        ("lr_at", ctypes.c_void_p),
        ("grad_scale_at", ctypes.c_void_p),
        ("found_inf_at", ctypes.c_void_p),
        ("factor_at", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("chunk", ctypes.c_uint32),
        ("program", ctypes.c_void_p),
    ]


def check(status):
    if status != 0:
        raise RuntimeError(_lib.of_cuda_error().decode())


def launch_sgd(p, grad, stream=None):
    """Launches the kernel of float32."""
    entry = Entry(param=p.data_ptr(), grad=grad.data_ptr(), n=p.numel(), step=1.0)
    hyper, stream = (ctypes.c_double * 6)(0.1), stream or gpu.current()
    update = Update(b"sgd", 0, p.device.index, hyper, stream=stream.native_handle)
    check(_lib.of_cuda_launch(ctypes.byref(update), ctypes.byref(entry), ctypes.c_size_t(1)))


def count(step):
    """A step counter on the device."""
    address, stream = ctypes.c_void_p(step.data_ptr()), gpu.current().native_handle
    one, index = ctypes.c_size_t(1), step.device.index
    check(_lib.of_cuda_advance(ctypes.byref(address), one, None, index, ctypes.c_void_p(stream)))


def stepped():
    """An optimizer after its first step."""
    params = [torch.ones(n, device=NAME, requires_grad=True) for n in (3, 1003)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()
    gpu.synchronize()
    return params, optimizer


def two_steps(step):
    """One on each of two streams."""
    for stream in (gpu.stream(), gpu.stream()):
        with stream:
            step()


def expect_race(*words):
    found = gpu.races()
    assert found, "a race was expected"
    for word in words:
        assert any(word in text for text in found), f"{word!r} is in none of {found}"
    gpu.clear()


def test_stock_on_two_streams_is_seen():
    _, optimizer = stepped()
    two_steps(optimizer.step)
    expect_race("aten::_fused_adamw_", "aten::_foreach_add_")  # which counts the steps


def test_our_kernels_on_two_streams_are_seen():
    params, optimizer = stepped()

    def step():
        count(optimizer.state[params[0]]["step"])
        launch_sgd(params[0], params[0].grad)

    two_steps(step)
    expect_race("of_cuda_sgd_float32", "of_cuda_advance_steps")


def test_memory_of_the_host_is_seen():
    p, grad = torch.ones(4, device=NAME), torch.ones(4)
    launch_sgd(p, grad)
    expect_race("not the device's")


def test_free_memory_is_seen():
    p, grad = torch.ones(4, device=NAME), torch.ones(4, device=NAME)
    address = grad.data_ptr()

    class Gone:
        def data_ptr(self):
            return address

    del grad
    launch_sgd(p, Gone())
    expect_race("that is free")


def test_a_default_stream_is_that_of_the_current_device():
    """As on a real GPU: its handle does not say which device is meant."""
    other = torch.device(NAME, 1)
    p, grad = torch.ones(4, device=other), torch.ones(4, device=other)
    with pytest.raises(RuntimeError, match="is another GPU's: make GPU 1 current"):
        launch_sgd(p, grad, gpu.current(1))
    torch.accelerator.set_device_index(1)
    try:
        launch_sgd(p, grad, gpu.current(1))
    finally:
        torch.accelerator.set_device_index(0)
