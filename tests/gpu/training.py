# SPDX-License-Identifier: BSD-3-Clause
"""Ways to train: models, precision, clipping, checkpointing, compilers, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from harness import On, add, common, scenario
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import optfuse
from optfuse._library.bindings import lib

STEPS = 6


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, groups=4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.head(self.second(y).mean((2, 3)))


class Language(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(x)))


def images(on: On, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(4, 3, 8, 8, generator=generator).to(on.device)


def words(on: On, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randint(11, (4, 7), generator=generator).to(on.device)


Inputs = Callable[[On, int], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "convolutions": (Convolutional, images),
    "transformer with tied weights": (Language, words),
    "recurrent": (lambda: nn.LSTM(6, 5, 2), lambda on, i: on.batch(i)[0].unsqueeze(1)),
}
MAKERS = {
    "AdamW": common.adamw,
    "SGD": common.sgd,
    "Adam with amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, fused=True),
}


def first(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def model_trains(on: On, kind: str, make: Callable[..., Any], amp: bool) -> None:
    build, inputs = MODELS[kind]

    def iteration(model: Any, optimizer: Any, i: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast(on.device.type, torch.bfloat16) if amp else nullcontext():
            loss = first(model(inputs(on, i))).float().square().mean()
        loss.backward()
        optimizer.step()
        yield "loss", loss

    # cuDNN keeps a recurrent network's weights in one piece, so that they are shared.
    on.same(
        on.trained(make, lambda: build().to(on.device), iteration=iteration),
        prove=not (kind == "recurrent" and on.is_cuda),
    )


def add_models() -> None:
    for kind in MODELS:
        for maker, make in MAKERS.items():
            for amp in (False, True):
                name = f"{kind}, {maker}" + (", autocast" if amp else "")
                add(name, bound(model_trains, kind, make, amp), slow=amp)


def bound(what: Callable[..., None], *given: Any) -> Callable[[On], None]:
    def body(on: On) -> None:
        what(on, *given)

    return body


@scenario(modes=("forward",))
def clipping_and_accumulation(on: On) -> None:
    def iteration(model: Any, optimizer: Any, i: int) -> Any:
        on.loss(model, 2 * i).backward()
        on.loss(model, 2 * i + 1).backward()
        yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)

    on.same(on.trained(iteration=iteration))


@contextmanager
def without_waiting(on: On) -> Iterator[None]:
    """Raises if the host waits for the GPU."""
    if on.is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on.is_cuda:
            torch.cuda.set_sync_debug_mode("default")


def clipped_training(on: On, make: Any, dtype: torch.dtype = torch.float32) -> None:
    """Now and then somebody looks at gradients, before step() or after it."""
    lib.of_shim_wait_from(0)  # as small as they are

    def iteration(model: Any, optimizer: Any, i: int) -> Any:
        optimizer.zero_grad()
        x, y = (t.to(dtype) for t in on.batch(i))
        nn.functional.mse_loss(model(x), y).backward()
        with without_waiting(on):
            norm = optfuse.clip_grad_norm_(optimizer, 0.05)
            if i % 4 == 1:
                model[0].weight.grad.add_(0.25)
            if i:  # the first one makes the state
                optimizer.step()
        if not i:
            optimizer.step()
        yield "norm", norm
        if i % 4 == 2:
            yield "gradients", [p.grad for p in model.parameters()]

    on.same(on.trained(make, lambda: on.net().to(dtype), iteration=iteration, steps=2 * STEPS))


@scenario(modes=("forward",))
def clipping_left_to_the_update(on: On) -> None:
    clipped_training(on, common.adamw)


@scenario(modes=("forward",))
def clipping_left_to_updates_by_SGD(on: On) -> None:
    clipped_training(on, common.sgd)


@scenario(modes=("forward",))
def clipping_of_bfloat16_left_to_the_update(on: On) -> None:
    clipped_training(on, common.adamw, torch.bfloat16)


@scenario(modes=("forward",))
def clipping_of_float64_left_to_the_update(on: On) -> None:
    clipped_training(on, common.adamw, torch.float64)


@scenario(modes=("forward",))
def clipping_of_mixed_dtypes(on: On) -> None:
    """The factor is of the widest dtype, and the gradients of others are multiplied
    at once."""

    def script(wrap: Any) -> Any:
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        params = [nn.Parameter(on.batch(i, 300)[0].to(t)) for i, t in enumerate(dtypes)]
        optimizer = wrap(common.adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = on.batch(10 + i, 300)[0].to(p.dtype)
            yield "norm", optfuse.clip_grad_norm_(optimizer, 0.1)
            if i == 2:
                yield "gradients", [p.grad for p in params]
            optimizer.step()
        yield "parameters", params

    on.same(script)


def amp_training(on: On, unscale: bool, clip: Any = nn.utils.clip_grad_norm_) -> None:
    """Half precision with a loss scale that overflows now and then."""

    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        scaler = torch.amp.GradScaler(on.device.type, init_scale=2.0**14, growth_interval=2)
        for i in range(2 * STEPS):
            optimizer.zero_grad()
            with torch.autocast(on.device.type, torch.bfloat16):
                loss = on.loss(model, i) * (float("inf") if i == 4 else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                yield "norm", clip(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            yield "scale", scaler.get_scale()
        yield from common.everything(model, optimizer)

    on.same(script)


@scenario(modes=("forward",))
def autocast_and_grad_scaler(on: On) -> None:
    amp_training(on, unscale=False)


@scenario(modes=("forward",))
def autocast_and_grad_scaler_with_unscale_and_clip(on: On) -> None:
    amp_training(on, unscale=True)


@scenario(modes=("forward",))
def autocast_and_grad_scaler_with_our_clipping(on: On) -> None:
    amp_training(on, unscale=True, clip=optfuse.clip_grad_norm_)


@scenario(modes=("backward",))
def a_scaled_loss_is_refused_before_any_update(on: On) -> None:
    model = on.net()
    optimizer = optfuse.fuse(common.adamw(model.parameters()), mode="backward")
    before = common.weights(model)
    scaler = torch.amp.GradScaler(on.device.type)
    loss = scaler.scale(on.loss(model, 0))
    common.refused(loss.backward)
    common.assert_same("weights", common.weights(model), before)
    assert optfuse.summary(optimizer).created == 0


@scenario()
def both_forms_of_checkpointing(on: On) -> None:
    def iteration(model: Any, optimizer: Any, i: int) -> Any:
        optimizer.zero_grad()
        x, y = on.batch(i)
        x.requires_grad_()
        middle = checkpoint(model[:3], x, use_reentrant=i % 2 == 1)
        nn.functional.mse_loss(model[3:](middle), y).backward()
        optimizer.step()

    on.same(on.trained(iteration=iteration))


@scenario()
def schedulers_and_groups(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-3},
        ]
        optimizer = wrap(torch.optim.AdamW(groups, lr=1e-2, fused=True))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1)
        for i in range(STEPS):
            yield "loss", on.train(model, optimizer, i)
            scheduler.step()
        yield from common.everything(model, optimizer)

    on.same(script)


@scenario()
def an_lr_tensor_changed_while_pending(on: On) -> None:
    """The update uses the value at step(), not what it became later."""

    def script(wrap: Any) -> Any:
        model = on.net()
        lr = torch.tensor(1e-2, device=on.device)
        optimizer = wrap(common.adamw(model.parameters(), lr=lr))
        for i in range(STEPS):
            on.train(model, optimizer, i)
            wrap.pending()
            lr.mul_(0.5)
        yield "weights", dict(model.state_dict())

    on.same(script)


def gradients_by_transform(on: On, model: nn.Module, i: int) -> dict[str, Tensor]:
    x, y = on.batch(i)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(model, values, (x,)), y)

    return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


@scenario()
def functional_calls_and_transforms(on: On) -> None:
    def between(model: Any, optimizer: Any, i: int) -> Any:
        if i % 2:
            yield "gradients", gradients_by_transform(on, model, 50 + i)
        else:
            weights, x = dict(model.named_parameters()), on.batch(50 + i)[0]
            yield "output", torch.func.functional_call(model, weights, (x,))

    on.same(on.trained(between=between))


@scenario(modes=("forward",))
def two_optimizers_on_one_model(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        one = wrap(common.adamw(model.parameters()))
        two = wrap(common.sgd(model.parameters()))
        for i in range(STEPS):
            on.train(model, one, i)
            on.train(model, two, i)
        yield from common.everything(model, one)
        yield from common.everything(model, two)

    on.same(script)


@scenario()
def unfused_in_the_middle_and_fused_again(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        for i in range(STEPS):
            on.train(model, optimizer, i)
            if i == 2 and wrap.fused:
                optimizer = optfuse.unfuse(optimizer)
            if i == 4 and wrap.fused:
                optimizer = optfuse.fuse(optimizer, mode=on.mode)
        yield from common.everything(model, optimizer)

    on.same(script, prove=False)


@scenario()
def other_threads_infer_between_steps(on: On) -> None:
    def script(wrap: Any) -> Any:
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        seen: list[Tensor] = []

        def infer(i: int) -> None:
            with torch.no_grad():
                seen.append(model(on.batch(i)[0]))
            on.api.synchronize()

        for i in range(STEPS):
            on.train(model, optimizer, i)
            thread = threading.Thread(target=infer, args=(i,))
            thread.start()
            thread.join()
            yield "output", seen[-1]
        yield from common.everything(model, optimizer)

    on.same(script)


@scenario()
def two_models_train_in_two_threads(on: On) -> None:
    def script(wrap: Any) -> Any:
        models = [on.net(), on.net()]
        optimizers = [wrap(common.adamw(model.parameters())) for model in models]

        streams = [on.api.Stream() for _ in range(2)]
        for stream in streams:
            stream.wait_stream(on.api.current_stream())

        def work(k: int) -> None:
            with on.api.stream(streams[k]):
                for i in range(4 * STEPS):
                    on.train(models[k], optimizers[k], i + 10 * k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stream in streams:
            on.api.current_stream().wait_stream(stream)
        for model, optimizer in zip(models, optimizers, strict=True):
            yield from common.everything(model, optimizer)
        for stream in streams:
            stream.wait_stream(on.api.current_stream())

    on.same(script)


def compiled_training(on: On, **how: Any) -> None:
    """The model is compiled; weights are read in between, too."""

    def script(wrap: Any) -> Any:
        torch._dynamo.reset()
        model = on.net()
        optimizer = wrap(common.adamw(model.parameters()))
        fast = torch.compile(model, **how)
        for i in range(STEPS):
            yield "loss", on.train(fast, optimizer, i)
            if i % 3 == 1:
                yield "weight", model[0].weight.detach()
        yield from common.everything(model, optimizer)

    on.same(script, prove=False)


@scenario()
def a_model_traced_by_the_compiler(on: On) -> None:
    compiled_training(on, backend="aot_eager")


@scenario(slow=True)
def a_compiled_model(on: On) -> None:
    compiled_training(on)


@scenario(devices=("cuda",))
def a_compiled_model_with_reduced_overhead(on: On) -> None:
    """The compiler records CUDA graphs of its own."""
    compiled_training(on, mode="reduce-overhead")


add_models()
