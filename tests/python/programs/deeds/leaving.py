# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: each way by which a gradient leaves its tensor, as to a file, to another process or to
another library. Pending or promised ones have stock's numbers; a used one raises."""

import copy
import ctypes
import io
import pickle
import tempfile
from multiprocessing.reduction import ForkingPickler

import torch
from torch import multiprocessing, nn
from torch.multiprocessing import reductions

from programs.deed import BEFORE_STEP, LAUNCHES, deed, raises


def rebuilt(reduced):
    """As unpickling does."""
    function, arguments = reduced
    return function(*arguments)


def numbers(storage, like):
    """Those of an untyped storage."""
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())


def of_bytes(values, like):
    return torch.frombuffer(bytearray(values), dtype=like.dtype).view(like.shape)


def of_list(values, like):
    return torch.tensor(values, dtype=like.dtype).view(like.shape)


def through_queue(make):
    def through(g):
        queue = make()
        queue.put(g)
        return queue.get()

    return through


def through_pipe(g):
    """As a queue's own thread does."""
    there, here = multiprocessing.Pipe()
    here.send_bytes(ForkingPickler.dumps([g]))
    return pickle.loads(there.recv_bytes())[0]


def by_file_names(way):
    def shared(g):
        before = multiprocessing.get_sharing_strategy()
        multiprocessing.set_sharing_strategy("file_system")
        try:
            return way(g)
        finally:
            multiprocessing.set_sharing_strategy(before)

    return shared


def saved(save, load):
    def through(g):
        file = io.BytesIO()
        save(g, file)
        file.seek(0)
        return load(file)

    return through


def written(g):
    with tempfile.TemporaryFile(buffering=0) as file:
        g.untyped_storage()._write_file(file, True, False, 1)
        file.seek(0)
        return of_bytes(file.read(), g)


def swapped_bytes(g):
    storage = g.untyped_storage()
    storage.byteswap(torch.float32)
    seen = numbers(storage, g).clone()
    storage.byteswap(torch.float32)
    return seen


def after(do):
    """The tensor, with which something was done."""
    return lambda g: (do(g), g)[1]


SEND = {
    "ForkingPickler": lambda g: pickle.loads(ForkingPickler.dumps(g)),
    "a pipe": through_pipe,
    "SimpleQueue": through_queue(multiprocessing.SimpleQueue),
    "reduce_tensor": lambda g: rebuilt(reductions.reduce_tensor(g)),
    "reduce_storage": lambda g: numbers(rebuilt(reductions.reduce_storage(g.untyped_storage())), g),
    "reduce_typed_storage": lambda g: of_list(
        rebuilt(reductions.reduce_typed_storage(g.storage())).tolist(), g
    ),
    "_share_fd_cpu_": after(lambda g: g.untyped_storage()._share_fd_cpu_()),
    "_share_filename_cpu_": after(lambda g: g.untyped_storage()._share_filename_cpu_()),
    "share_memory_": lambda g: g.share_memory_(),
    "share_memory_ of storage": after(lambda g: g.untyped_storage().share_memory_()),
    "share_memory_ of typed storage": after(lambda g: g.storage().share_memory_()),
    "is_shared": after(lambda g: g.is_shared()),
}
SEND |= {
    f"{name} by file names": by_file_names(SEND[name]) for name in ("ForkingPickler", "a pipe")
}

STORAGE = {
    "tolist": lambda g: of_list(g.storage().tolist(), g),
    "list": lambda g: of_list(list(g.storage()), g),
    "[i]": lambda g: of_list([g.storage()[i] for i in range(g.numel())], g),
    "bytes": lambda g: of_bytes(bytes(g.untyped_storage()), g),
    "untyped tolist": lambda g: of_bytes(g.untyped_storage().tolist(), g),
    "untyped [:]": lambda g: of_bytes(list(g.untyped_storage()[:]), g),
    "clone": lambda g: numbers(g.untyped_storage().clone(), g),
    "cpu": lambda g: numbers(g.untyped_storage().cpu(), g),
    "to": lambda g: numbers(g.untyped_storage().to(device="cpu"), g),
    "copy_": lambda g: numbers(torch.UntypedStorage(g.numel() * 4).copy_(g.untyped_storage()), g),
    "typed copy_": lambda g: of_list(torch.FloatStorage(g.numel()).copy_(g.storage()).tolist(), g),
    "double": lambda g: of_list(g.storage().double().tolist(), g),
    "half": lambda g: of_list(g.storage().half().tolist(), g),
    "untyped": lambda g: numbers(g.storage().untyped(), g),
    "set_": lambda g: numbers(g.untyped_storage(), g),
    "set_ of typed": lambda g: torch.empty(0).set_(g.storage(), 0, g.shape, g.stride()),
    "byteswap": swapped_bytes,
    "_write_file": written,
    "pickle": lambda g: of_list(pickle.loads(pickle.dumps(g.storage())).tolist(), g),
    "deepcopy": lambda g: numbers(copy.deepcopy(g.untyped_storage()), g),
    "copy": lambda g: numbers(copy.copy(g.untyped_storage()), g),
    "torch.save": saved(lambda g, f: torch.save(g.storage(), f), lambda f: of_saved(f)),
    "data_ptr": lambda g: of_bytes(
        ctypes.string_at(g.untyped_storage().data_ptr(), g.numel() * 4), g
    ),
    "nbytes": lambda g: torch.tensor(g.untyped_storage().nbytes()),
    "resize_": after(lambda g: g.untyped_storage().resize_(g.numel() * 4)),
    "fill_": after(lambda g: g.untyped_storage().fill_(0)),
    "[i] =": after(lambda g: g.untyped_storage().__setitem__(0, 1)),
}


def of_saved(file):
    return torch.tensor(torch.load(file, weights_only=False).tolist())


TENSOR = {
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "pickle, protocol 5": lambda g: pickle.loads(pickle.dumps([g], 5))[0],
    "__reduce_ex__": lambda g: rebuilt(g.__reduce_ex__(2)[:2]),
    "deepcopy": copy.deepcopy,
    "copy": lambda g: copy.copy(g).clone(),
    "torch.save": saved(torch.save, torch.load),
    "torch.save, old format": saved(
        lambda g, f: torch.save(g, f, _use_new_zipfile_serialization=False), torch.load
    ),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "__array__": lambda g: torch.from_numpy(g.__array__().copy()),
    "memoryview": lambda g: of_bytes(memoryview(g.numpy()).tobytes(), g),
    "dlpack": lambda g: torch.from_dlpack(g).clone(),
    "to_dlpack": lambda g: torch.from_dlpack(torch.utils.dlpack.to_dlpack(g)).clone(),
    "data_ptr": lambda g: of_bytes(ctypes.string_at(g.data_ptr(), g.numel() * 4), g),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "to, a copy": lambda g: g.to("cpu", copy=True).clone(),
    "double": lambda g: g.double().clone(),
    "an alias": lambda g: pickle.loads(ForkingPickler.dumps(g.detach())),
    "data": lambda g: of_bytes(bytes(g.data.untyped_storage()), g),
    "a Parameter of it": lambda g: of_bytes(bytes(nn.Parameter(g).untyped_storage()), g),
    "in a state_dict": lambda g: pickle.loads(ForkingPickler.dumps({"g": {"of": [g]}}))["g"]["of"][
        0
    ],
}
WAYS = {
    f"{kind}: {name}": way
    for kind, ways in (("send", SEND), ("storage", STORAGE), ("tensor", TENSOR))
    for name, way in ways.items()
}


LEAVES = {"kinds": ("AdamW",), "weight": 0, "backward": raises("already applied"), "every": True}
#: DTensors can do no more.
OF_WRAPPERS = {
    name: WAYS[name]
    for name in (
        *("send: ForkingPickler", "send: a pipe", "send: SimpleQueue", "tensor: pickle"),
        *("tensor: deepcopy", "tensor: torch.save", "storage: nbytes"),
    )
}


def local(gradient):
    return getattr(gradient, "_local_tensor", gradient)


@deed(way=WAYS, models=("mlp", "replicated"), **LEAVES, forward=LAUNCHES)
def gradient_leaves(world, way):
    world.see("there", way(local(world.grad())))


@deed(BEFORE_STEP, way=WAYS, models=("mlp", "replicated"), **LEAVES)
def gradient_leaves_before_step(world, way):
    world.see("there", way(local(world.grad())))


@deed(way=OF_WRAPPERS, models=("replicated",), **LEAVES, forward=LAUNCHES)
def dtensor_leaves(world, way):
    world.see("there", way(world.grad()))


@deed(BEFORE_STEP, way=OF_WRAPPERS, models=("replicated",), **LEAVES)
def dtensor_leaves_before_step(world, way):
    world.see("there", way(world.grad()))
