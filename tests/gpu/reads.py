# SPDX-License-Identifier: BSD-3-Clause
"""A pending update can't be seen: whatever reads or writes a parameter, its
gradient or its state after step() finds what stock would show."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from harness import MODES, On, add, common, scenario
from torch import Tensor, nn

STEPS = 4
Touch = Callable[[Tensor], Any]


class Foreign:
    """A tensor as other libraries hand their memory over."""

    def __init__(self, t: Tensor) -> None:
        self.__cuda_array_interface__ = t.__cuda_array_interface__


def array_of(t: Tensor) -> Tensor:
    """Through the interface by which NumPy, CuPy and Numba see a tensor."""
    if t.device.type == "cpu":
        return torch.from_numpy(t.numpy()).clone()
    return torch.as_tensor(Foreign(t), device=t.device).clone()


def saved(t: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(t, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu")


READS: dict[str, Touch] = {
    "clone": lambda t: t.clone(),
    "to the host": lambda t: t.cpu(),
    "item": lambda t: t.flatten()[0].item(),
    "tolist": lambda t: t.tolist(),
    "sum": lambda t: t.sum(),
    "norm": lambda t: t.norm(),
    "a view": lambda t: t.reshape(-1)[1:].clone(),
    "as_strided": lambda t: torch.as_strided(t, (2,), (1,), 1).clone(),
    "cat": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "foreach": lambda t: torch._foreach_add([t], 1.0)[0],
    "dlpack": lambda t: torch.from_dlpack(t).clone(),
    "an array interface": array_of,
    "torch.save": saved,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).cpu(),
    "deepcopy": copy.deepcopy,
    "storage": lambda t: [t.untyped_storage()[k] for k in range(4)],
    "isnan": lambda t: bool(t.isnan().any()),
}


def moment(optimizer: Any, p: Tensor) -> Tensor:
    return optimizer.state[p]["exp_avg"]


WHOSE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weight": lambda optimizer, p: p.detach(),
    "gradient": lambda optimizer, p: p.grad,  # type: ignore[return-value]
    "state": moment,
}


def reading(on: On, read: Touch, of: Callable[[Any, Tensor], Tensor]) -> None:
    def between(model: Any, optimizer: Any, i: int) -> Any:
        return [read(of(optimizer, p)) for p in model.parameters()]

    on.same(on.trained(between=between))


def half(p: Tensor) -> None:
    p.data = p.data * 0.5


WRITES: dict[str, Touch] = {
    "mul_": lambda p: p.mul_(0.9),
    "data.add_": lambda p: p.data.add_(0.01),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "copy_ from the host": lambda p: p.copy_(torch.full(p.shape, 0.1)),
    "zero_": lambda p: p.zero_(),
    "data =": half,
    "set_": lambda p: p.set_(p.detach() * 0.5),
    "out=": lambda p: torch.mul(p, 0.5, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "one element": lambda p: p.view(-1)[:1].fill_(3.0),
    "nn.init": lambda p: nn.init.constant_(p, 0.1),
    "gradient zero_": lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    "gradient mul_": lambda p: p.grad.mul_(100.0),  # type: ignore[union-attr]
    "gradient = None": lambda p: setattr(p, "grad", None),
    "gradient =": lambda p: setattr(p, "grad", torch.ones_like(p)),
}


def writing(on: On, write: Touch) -> None:
    def between(model: Any, optimizer: Any, i: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                write(p)

    on.same(on.trained(between=between))


def add_all() -> None:
    for whose, of in WHOSE.items():
        for way, read in READS.items():
            # In backward mode the gradient is consumed, which raises, as promised.
            modes = ("forward",) if whose == "gradient" else MODES
            if whose == "weight" or way in ("clone", "to the host", "foreach", "torch.save"):
                body = bound(reading, read, of)
                add(f"{whose} read by {way}", body, modes=modes)
    for way, write in WRITES.items():
        add(f"written: {way}", bound(writing, write), modes=("forward",))


def bound(what: Callable[..., None], *given: Any) -> Callable[[On], None]:
    def body(on: On) -> None:
        what(on, *given)

    return body


@scenario()
def state_dicts_and_copies(on: On) -> None:
    def between(model: Any, optimizer: Any, i: int) -> Any:
        if i % 2:
            yield "model", model.state_dict()
            yield "optimizer", optimizer.state_dict()
        else:
            twin = copy.deepcopy(model)
            yield "copy", twin.state_dict()

    on.same(on.trained(between=between))


@scenario()
def model_and_optimizer_copied_together_train_on(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        on.train(model, optimizer, 0)
        wrap.pending()
        twin, its = copy.deepcopy((model, optimizer))
        for i in range(1, STEPS):
            on.train(model, optimizer, i)
            on.train(twin, its, -i)
        yield from common.everything(model, optimizer)
        yield from common.everything(twin, its)

    on.same(script)


@scenario()
def a_checkpoint_loaded_into_stock_and_back(on: On) -> None:
    """Saved while pending; resumed by a fresh optimizer of each kind."""

    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        for i in range(STEPS):
            on.train(model, optimizer, i)
        wrap.pending()
        kept = common.snapshot(optimizer.state_dict())
        weights = common.snapshot(dict(model.state_dict()))
        again = on.net()
        again.load_state_dict(weights)
        plain = common.adamw(again.parameters())
        plain.load_state_dict(kept)
        for i in range(STEPS):
            on.train(again, plain, i)
        optimizer.load_state_dict(common.snapshot(plain.state_dict()))
        model.load_state_dict(again.state_dict())
        for i in range(STEPS):
            on.train(model, optimizer, i)
        yield from common.everything(model, optimizer)

    on.same(script)


@scenario()
def moving_averages_of_the_weights(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        average = torch.optim.swa_utils.AveragedModel(model)
        by_hand = [p.detach().clone() for p in model.parameters()]
        for i in range(STEPS):
            on.train(model, optimizer, i)
            wrap.pending()
            if i % 2:
                average.update_parameters(model)
            else:
                torch._foreach_lerp_(by_hand, [p.detach() for p in model.parameters()], 0.1)
        yield "averages", dict(average.state_dict())
        yield "by hand", by_hand

    on.same(script)


@scenario(modes=("forward",))
def aliases_held_across_steps(on: On) -> None:
    """Such memory is not private: its updates run inside step()."""

    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        held = model[0].weight.detach()[1:]
        whole = model.state_dict()
        for i in range(STEPS):
            on.train(model, optimizer, i)
            yield "a slice", held
            yield "a state dict", dict(whole)

    on.same(script, prove=False)


@scenario()
def evaluation_between_steps(on: On) -> None:
    def between(model: Any, optimizer: Any, i: int) -> Any:
        guard = torch.inference_mode() if i % 2 else torch.no_grad()
        with guard:
            yield "loss", on.loss(model, 100 + i).clone()

    on.same(on.trained(between=between))


add_all()
