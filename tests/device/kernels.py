# SPDX-License-Identifier: BSD-3-Clause
"""Calls optfuse's CUDA kernels (kernels/cuda/cuda_kernels.h) directly."""

from __future__ import annotations

import ctypes
import os

import torch

MAX_STATE, MAX_COUNTERS = 8, 2  # of kernels/kernels.h
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_lib = ctypes.CDLL(os.environ["OPTFUSE_CUDA_LIBRARY"])
_lib.of_cuda_error.restype = ctypes.c_char_p


class Entry(ctypes.Structure):
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


def _address(tensor):
    return tensor.data_ptr() if tensor is not None else None


def launch(rule, hyper, tensors, stream, *, lr=None, grad_scale=None, found_inf=None, factor=None):
    """tensors: (param, grad, state, step) each; step: a number or a tensor."""
    entries = (Entry * len(tensors))()
    for entry, (param, grad, state, step) in zip(entries, tensors, strict=True):
        on_device = isinstance(step, torch.Tensor)
        places = (ctypes.c_void_p * MAX_STATE)(*map(_address, state))
        entry.param, entry.grad, entry.state = _address(param), _address(grad), places
        entry.n, entry.step = param.numel(), 0 if on_device else step
        entry.step_at = _address(step) if on_device else None
    first = tensors[0][0]
    update = Update(
        rule.encode(),
        DTYPES.index(first.dtype),
        first.device.index,
        (ctypes.c_double * len(hyper))(*hyper),
        _address(lr),
        _address(grad_scale),
        _address(found_inf),
        _address(factor),
        stream.native_handle,
    )
    status = _lib.of_cuda_launch(ctypes.byref(update), entries, ctypes.c_size_t(len(entries)))
    if status != 0:
        raise RuntimeError(_lib.of_cuda_error().decode())


def advance(steps, stream, less=None):
    """Counts step counters on the device, or takes `less` from them."""
    addresses = (ctypes.c_void_p * len(steps))(*map(_address, steps))
    status = _lib.of_cuda_advance(
        addresses,
        ctypes.c_size_t(len(steps)),
        ctypes.c_void_p(_address(less)),
        steps[0].device.index,
        ctypes.c_void_p(stream.native_handle),
    )
    if status != 0:
        raise RuntimeError(_lib.of_cuda_error().decode())
