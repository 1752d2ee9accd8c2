# SPDX-License-Identifier: BSD-3-Clause
"""Each way by which a gradient leaves its tensor, as to a file, to another process or to another
library: in forward mode it finds stock's numbers, pending or promised ones too; in backward mode,
where the gradient is used up by then, it raises. And what step() says to a used gradient that is in
the place of another one."""

import copy
import ctypes
import io
import pickle
import tempfile
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from common import adamw, everything, loss_of, net, refused, same
from test_overwritten import replicated
from torch import multiprocessing, nn
from torch.multiprocessing import reductions

import optfuse


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


def first(model):
    return model[0].weight.grad


def wide():
    return nn.Sequential(nn.Linear(48, 56), nn.Tanh(), nn.Linear(56, 3))


def loss_of_wide(model, i):
    return model(torch.linspace(-1, i + 1, 96).view(2, 48)).square().mean()


#: The model, its loss, the gradient that is looked at, and the option products.
KINDS = {
    "plain": (wide, loss_of_wide, first, "off"),
    "promised": (wide, loss_of_wide, first, "force"),
    "DTensor": (replicated, loss_of, lambda model: first(model)._local_tensor, "off"),
    "wrapper": (replicated, loss_of, first, "off"),
}
#: DTensors can do no more.
FOR_WRAPPERS = {
    *("send: ForkingPickler", "send: a pipe", "send: SimpleQueue", "tensor: pickle"),
    *("tensor: deepcopy", "tensor: torch.save", "storage: nbytes"),
}


def cases():
    for kind in KINDS:
        for name in WAYS:
            if kind != "wrapper" or name in FOR_WRAPPERS:
                yield pytest.param(kind, WAYS[name], id=f"{kind}, {name}")


def looking(kind, way, mode, when):
    """A script that trains, and lets a gradient of its third iteration leave."""
    build, loss, pick, _ = KINDS[kind]

    def look(wrap, model):
        if mode == "forward":
            yield "there", way(pick(model))
        elif wrap.fused:
            refused(lambda: way(pick(model)), "already applied")

    def script(wrap):
        model = build()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(4):
            optimizer.zero_grad()
            loss(model, i).backward()
            if i == 2 and when == "before step":
                yield from look(wrap, model)
            optimizer.step()
            if i == 2 and when == "after step":
                yield from look(wrap, model)
        yield from everything(model, optimizer)
        if wrap.fused and kind == "promised":
            assert any(layer.promised for layer in optfuse.summary(optimizer).promised)

    return script


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("when", ("before step", "after step"))
@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize(("kind", "way"), list(cases()))
def test_a_gradient_leaves_with_its_numbers_or_an_error(kind, way, mode, when, gloo, monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", KINDS[kind][-1])
    same(looking(kind, way, mode, when), mode)


def give_each(change):
    """Puts change(parameter) into each .grad."""

    def give(model, kept):
        for p in model.parameters():
            p.grad = change(p)

    return give


def of_earlier_step(model, kept):
    for p, grad in zip(model.parameters(), kept["before"], strict=True):
        p.grad = grad


def exchanged(model, kept):
    a, b = model[0].bias, model[2].bias
    a.grad, b.grad = b.grad, a.grad


def data_of_another(model, kept):
    model[0].bias.grad.data = model[2].bias.grad.data


def exchanged_before_a_rebuild(model, kept):
    exchanged(model, kept)
    kept["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


#: Stock's step() uses other numbers than backward() has made for this parameter.
OTHERS = {
    "of the step before": of_earlier_step,
    "exchanged": exchanged,
    "data of another parameter": data_of_another,
    "exchanged, then a new group": exchanged_before_a_rebuild,
    "of another model": lambda model, kept: setattr(
        model[0].bias, "grad", kept["other"][0].bias.grad
    ),
    "of another parameter, aliased": lambda model, kept: setattr(
        model[0].bias, "grad", model[2].bias.grad.detach()
    ),
    "rounded": give_each(lambda p: p.grad.half().float()),
    "data rounded": lambda model, kept: setattr(
        model[0].bias.grad, "data", model[0].bias.grad.bfloat16().float()
    ),
    "model in double": lambda model, kept: model.double(),
}


def dropped_and_back(model, kept):
    for p in model.parameters():
        grad, p.grad = p.grad, None
        p.grad = grad


def exchanged_twice(model, kept):
    exchanged(model, kept)
    exchanged(model, kept)


def aliased_before_a_rebuild(model, kept):
    give_each(lambda p: p.grad.detach())(model, kept)
    kept["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


#: It uses the same.
ITS_OWN = {
    "dropped and put back": dropped_and_back,
    "exchanged twice": exchanged_twice,
    "detach()": give_each(lambda p: p.grad.detach()),
    "data": give_each(lambda p: p.grad.data),
    "its own data": lambda model, kept: [
        setattr(p.grad, "data", p.grad.data) for p in model.parameters()
    ],
    "through double": give_each(lambda p: p.grad.double().float()),
    "an alias, then a new group": aliased_before_a_rebuild,
}
FOR_DTENSORS = ("of the step before", "exchanged", "of another model", "dropped and put back")
#: The model and its optimizer. DTensors have no aliases.
BUILDS = {"tensors": (net, torch.optim.SGD), "DTensors": (replicated, adamw)}


def put_back(build, make, put, is_own):
    def script(wrap):
        model, other = build(), build()
        optimizer, of_other = (wrap(make(m.parameters())) for m in (model, other))
        kept = {"other": other, "optimizer": optimizer}
        for i in range(4):
            for m, o in ((other, of_other), (model, optimizer)):
                o.zero_grad()
                loss_of(m, i).backward()
            of_other.step()
            if i == 3:
                put(model, kept)
            if i == 3 and wrap.fused and not is_own:
                refused(optimizer.step, "discarded, zeroed or replaced")
                return
            optimizer.step()
            kept["before"] = [p.grad for p in model.parameters()]
            if is_own or i < 3:
                yield from everything(model, optimizer)

    return script


PUT = [(way, "tensors") for way in (*OTHERS, *ITS_OWN)]
PUT += [(way, "DTensors") for way in FOR_DTENSORS]


@pytest.mark.parametrize(("way", "build"), PUT)
def test_a_used_gradient_in_the_place_of_another_one_is_refused_by_step(way, build, gloo):
    put = OTHERS.get(way) or ITS_OWN[way]
    same(put_back(*BUILDS[build], put, way in ITS_OWN), mode="backward")
