# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: looking at weights, gradients and state."""

import copy
import ctypes
import io
import pickle

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from programs.deed import (
    BATCH,
    BEFORE_STEP,
    BOOL,
    DIFFERS,
    EITHER,
    INDEX,
    LAUNCHES,
    LEFT,
    consumed,
    deed,
    elsewhere,
)
from programs.models import MODULES
from programs.optimizers import EVERY

WHAT = ("weight", "weight", "state")


def through_address(t):
    """The elements in the memory behind data_ptr(); of its own layout."""
    if t.numel() == 0:
        return b""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    raw = bytearray(ctypes.string_at(t.data_ptr(), span * t.element_size()))
    return torch.frombuffer(raw, dtype=t.dtype).as_strided(t.shape, t.stride()).clone()


def through_storage(t):
    storage = t.untyped_storage()
    return torch.tensor([], dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())


def saved(value):
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def to_numpy(t):
    t = t.detach()
    return torch.as_tensor((t.float() if t.dtype == torch.bfloat16 else t).numpy())


def of_two(way):
    """For a matrix; of other tensors the reading is plain."""
    return lambda t: way(t.detach() if t.requires_grad else t) if t.dim() == 2 else t


def set_into(t):
    with torch.no_grad():
        return torch.empty(0, dtype=t.dtype).set_(t.data).clone()


def dispatched(t):
    with FlopCounterMode(display=False):
        return t.T @ t


def in_bfloat16(t):
    with torch.autocast("cpu", torch.bfloat16):
        return t.T @ t


def under_cond(t):
    branches = (lambda w: (w.sum(),), lambda w: (w.sum() - 1,))
    return torch.ops.higher_order.cond(torch.tensor(True), *branches, (t,))


READS = {
    "item": lambda t: t.abs().sum().item(),
    "matmul": of_two(lambda t: t.T @ t),
    "linear": of_two(lambda t: nn.functional.linear(t[:1], t)),
    "boolean mask": of_two(lambda t: t[t > 0]),
    "iteration": of_two(list),
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t]),
    "format": lambda t: f"{t.sum():.9f}",
    "torch.equal": lambda t: torch.equal(t, torch.zeros_like(t)),
    "allclose": lambda t: torch.allclose(t, torch.ones_like(t)),
    "ufunc": lambda t: torch.as_tensor(np.abs(t.detach().double())),
    "dlpack to numpy": of_two(lambda t: torch.as_tensor(np.from_dlpack(t))),
    "dlpack capsule": of_two(lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)).clone()),
    "dlpack of data": of_two(lambda t: torch.from_dlpack(t.data.__dlpack__()).clone()),
    "bytes": of_two(lambda t: bytes(t.untyped_storage())),
    "set_": set_into,
    "as_strided": of_two(lambda t: t.as_strided((3,), (2,))),
    "lerp_ of another": lambda t: torch.zeros_like(t).detach().lerp_(t.detach(), 0.1),
    "autocast": of_two(in_bfloat16),
    "dispatch mode": of_two(dispatched),
    "cond": of_two(under_cond),
    "tolist": lambda t: torch.tensor(t.tolist(), dtype=torch.float64),
    "numpy": to_numpy,
    "numpy(force)": lambda t: torch.as_tensor(t.float().numpy(force=True)),
    "asarray": lambda t: torch.as_tensor(np.asarray(t.detach().double())),
    "address": through_address,
    "storage": through_storage,
    "dlpack": lambda t: torch.from_dlpack(t.detach()).clone(),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "slice": lambda t: t[:1] if t.dim() else t,
    "view": lambda t: t.reshape(-1)[::2],
    "transposed": lambda t: t.t() if t.dim() == 2 else t,
    "add": lambda t: t + 1,
    "norm": lambda t: t.norm(),
    "list": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0),
    "double": lambda t: t.double(),
    "to the host": lambda t: t.cpu(),
    "copy_": lambda t: torch.zeros(t.shape, dtype=t.dtype).copy_(t.detach()),
    "out": lambda t: torch.add(t.detach(), 1, out=torch.empty(0, dtype=t.dtype)),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())),
    "save": lambda t: saved(t.detach()),
    "repr": lambda t: repr(t),
    "inference": torch.inference_mode()(lambda t: t * 2),
    "vmap": lambda t: torch.vmap(lambda row: row.sum())(t.detach()) if t.dim() else t,
    "func.grad": lambda t: torch.func.grad(lambda w: w.square().sum())(t.detach()),
}


LATER = range(2, 14)  # a matrix first, of whichever is read


@deed(weight=14, what=WHAT, index=LATER, way=READS, product=True, forward=LAUNCHES)
def read(world, what, index, way):
    tensor = world.tensor(what, index)
    if tensor is not None:
        world.see(what, way(tensor))


# Backward mode: the storage of a consumed gradient is empty, which PyTorch answers
# with an error of its own ("out of bounds").
OF_GRADIENTS = {name: way for name, way in READS.items() if name != "storage"}


@deed(
    "anywhere",
    weight=5,
    index=LATER,
    way=OF_GRADIENTS,
    backward=consumed("already applied"),
    forward=LAUNCHES,
)
def read_a_gradient(world, index, way):
    read(world, "gradient", index, way)


@deed(BEFORE_STEP, weight=0, what=("weight", "state"), backward=DIFFERS, kinds=("AdamW", "RMSprop"))
def read_before_step(world, what):
    """Those that backward() has made."""
    world.see(what, world.tensor(what, 2))


@deed(weight=5, gradients=BOOL, backward=EITHER, every=EVERY)
def look(world, gradients):
    world.look(gradients)


@deed(weight=3, fault=("key", "seal"), forward=LAUNCHES)
def look_at_weights_and_state(world):
    world.look(gradients=False)


def norms(world):
    return [p.norm() for p in world.params()]


def of_lists(world):
    return list(torch._foreach_norm(world.params()))


def state_dict(world):
    return dict(world.model().state_dict())


def state_dict_deepcopied(world):
    return copy.deepcopy(dict(world.model().state_dict()))


def model_deepcopied(world):
    return list(copy.deepcopy(world.model()).double().parameters())


def model_saved(world):
    return list(saved(world.model()).parameters())


def model_pickled(world):
    return list(pickle.loads(pickle.dumps(world.model())).parameters())


def all_saved(world):
    return saved([world.model().state_dict(), world.optimizer().state_dict()])


def parameter_saved(world):
    return saved(world.param())


def counters(world):
    return [
        float(t)
        for o in world.optimizers
        for s in o.state.values()
        for t in s.values()
        if is_number(t)
    ]


def is_number(value):
    return not torch.is_tensor(value) or not value.dim()


@deed(
    weight=1,
    way=(
        norms,
        of_lists,
        state_dict,
        state_dict_deepcopied,
        model_deepcopied,
        model_saved,
        model_pickled,
        all_saved,
        parameter_saved,
        counters,
    ),
    product=True,
    forward=LAUNCHES,
)
def read_the_whole(world, way):
    world.see("it", way(world))


@deed(weight=1, backward=consumed("already applied"), forward=LAUNCHES)
def save_a_gradient(world):
    world.see("gradient", saved(world.grad()))


@deed(weight=0, models=tuple(MODULES), kinds=("AdamW", "SGD", "Elementwise"), forward=LAUNCHES)
def evaluate_a_module(world):
    """Modules of torch.nn, and the fast paths that some have in evaluation."""
    world.model().eval()
    with torch.inference_mode() if world.turn else torch.no_grad():
        world.see("output", world.loss(0, 5))
    world.model().train()


@deed(weight=3, model=INDEX, batch=BATCH, inference=BOOL, train_mode=BOOL, forward=LAUNCHES)
def evaluate(world, model, batch, inference, train_mode):
    chosen = world.model(model)
    chosen.train(train_mode)
    with torch.inference_mode() if inference else torch.no_grad():
        world.see("output", world.loss(model, batch))
    chosen.train()


@deed(model=INDEX, batch=BATCH)
def data_parallel(world, model, batch):
    wrapped = nn.DataParallel(world.model(model))
    world.see("output", world.loss(model, batch, wrapped))


@deed(weight=1, model=INDEX)
def parameters_to_vector(world, model):
    params = list(world.model(model).parameters())
    world.see("vector", nn.utils.parameters_to_vector(params))


@deed(weight=1, model=INDEX, batch=BATCH, forward=LEFT)
def another_thread_infers(world, model, batch):
    world.see("output", elsewhere(torch.no_grad()(world.loss), model, batch))


@deed(weight=1, model=INDEX, forward=LEFT)
def another_thread_reads_state_dict(world, model):
    read_all = world.model(model).state_dict
    world.see("weights", elsewhere(lambda: [v.clone() for v in read_all().values()]))


@deed(model=INDEX, forward=LAUNCHES)
def per_sample_gradients(world, model):
    weights = [p.detach() for p in world.model(model).parameters() if p.dim() == 2]

    def loss(weights, row):
        return sum((w.sum(0)[0] * row).square().sum() for w in weights)

    if weights:
        x = torch.arange(3.0, dtype=weights[0].dtype).view(3, 1)
        world.see("slopes", list(torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)))
