# SPDX-License-Identifier: BSD-3-Clause
"""Equal means equal bits: recorded gradients, 200 steps, against fused=True.

Every combination of options is one parameter group, so that all of them run in
one optimizer, as they would in a script. Sizes lie around what the kernels
split by: vectors, fours, chunks of a block. Some parameters are slices of a
larger tensor and start at an odd element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import BOTH, On, add, common, scenario
from mixed_state import dtypes_of, with_narrow_state
from torch import Tensor

import optfuse
from optfuse._library.releases import release_of, takes_mixed

STEPS = 200
LOOK_EVERY = 20  # in between, updates stay pending until the next step
SIZES = (1, 3, 4, 16, 1003, 8191, 8196)
LARGE = (2_000_003, 1 << 20)  # several chunks; the device's own parallelism
MISALIGNED = 2  # the last so many sizes, again, one element off
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIXTEEN = (torch.bfloat16, torch.float16)
OFF_ON = (False, True)
EVERY = "every option"

SGD = [
    {"momentum": m, "dampening": d, "nesterov": n, "maximize": x, "weight_decay": w, "lr": 0.03}
    for m, d, n in ((0, 0, False), (0.9, 0, False), (0.9, 0.3, False), (0.9, 0, True))
    for x, w in itertools.product(OFF_ON, (0, 0.1))
]
ADAM = [
    {"betas": (b, 0.999), "amsgrad": a, "maximize": x, "weight_decay": w, "lr": 0.01}
    for b, a, x, w in itertools.product((0.0, 0.9), OFF_ON, OFF_ON, (0, 0.1))
]
OPTIONS: dict[str, list[dict[str, Any]]] = {"SGD": SGD, "Adam": ADAM, "AdamW": ADAM}
Gradients = Callable[[int], list[Tensor]]
Change = Callable[[Any], Any]  # of an optimizer before it is fused


def unchanged(optimizer: Any) -> Any:
    return optimizer


class Replay(torch.autograd.Function):
    """A forward whose backward hands out recorded gradients, times the
    gradient of its result (a loss scale, or one)."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.ones((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:  # type: ignore[override]
        return None, *(g * scale.to(g.dtype) for g in ctx.gradients)


def numbers(sizes: tuple[int, ...], on: On, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One tensor a size, over six decades, with zeros of both signs; of every
    second one the magnitude is the dtype's smallest normal, so that it holds
    denormals."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
    flat *= 10.0 ** torch.randint(-4, 2, flat.shape, generator=generator).double()
    flat[::11], flat[5::23] = 0.0, -0.0
    pieces = list(flat.split(sizes))
    if seed % 16 == 3:
        pieces[1::2] = [piece * torch.finfo(dtype).tiny for piece in pieces[1::2]]
    return [piece.to(on.device, dtype) for piece in pieces]


def tape(sizes: tuple[int, ...], on: On, dtype: torch.dtype, groups: int, spoil: bool) -> Gradients:
    """gradients(step), the same for every group, from a short recording."""
    recorded = [numbers(sizes, on, dtype, 1000 + i) for i in range(16)]
    for i in (5, 11) if spoil else ():
        for g in recorded[i]:
            g[i % 3 :: 13], g[4::17] = float("nan"), float("inf")
    return lambda step: [g * (1 + step // 16) for g in recorded[step % 16]] * groups


def parameter(value: Tensor, misaligned: bool) -> torch.nn.Parameter:
    if misaligned:
        room = torch.empty(value.numel() + 1, device=value.device, dtype=value.dtype)
        return torch.nn.Parameter(room[1:].copy_(value))
    return torch.nn.Parameter(value.clone())


def optimizer_of(
    name: str, sizes: tuple[int, ...], options: list[dict[str, Any]], on: On, dtype: torch.dtype
) -> torch.optim.Optimizer:
    groups = []
    for i, option in enumerate(options):
        values = numbers(sizes, on, dtype, i + 1)
        odd = len(sizes) - MISALIGNED
        params = [parameter(v, len(sizes) > 2 and k >= odd) for k, v in enumerate(values)]
        lr = option["lr"]
        groups.append({**option, "params": params, "lr": lr() if callable(lr) else lr})
    return getattr(torch.optim, name)(groups, lr=0.1, fused=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_same_optimizers(what: str, ours: Any, stock: Any, gradients: bool) -> None:
    """Looked at one by one, which waits for the device each time, only if any differ."""
    pairs = list(compared(what, ours, stock, gradients))
    if any_differ([(a, b) for _, a, b in pairs]):
        for place, a, b in pairs:
            common.assert_same(place, a, b)
        raise AssertionError(f"{what}: something differs, and nothing when looked at again")


def compared(what: str, ours: Any, stock: Any, gradients: bool) -> Iterator[tuple[str, Any, Any]]:
    for i, (mine, theirs) in enumerate(zip(ours.param_groups, stock.param_groups, strict=True)):
        for a, b in zip(mine["params"], theirs["params"], strict=True):
            place = f"{what}, {a.numel()} elements, group {i}"
            yield f"{place}, parameter", a, b
            state, wanted = dict(ours.state[a]), dict(stock.state[b])
            yield f"{place}, keys of state", sorted(state), sorted(wanted)
            for key in state.keys() & wanted.keys():
                yield f"{place}, state {key!r}", state[key], wanted[key]
            if gradients:
                yield f"{place}, gradient", a.grad, b.grad


def any_differ(pairs: list[tuple[Any, Any]]) -> bool:
    """Asks each device once."""
    found: dict[torch.device, list[Tensor]] = {}
    for a, b in pairs:
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if type(a) is not type(b) or a != b:
                return True
        elif any(getattr(a, k) != getattr(b, k) for k in KIND):
            return True
        else:
            found.setdefault(a.device, []).append(different(a, b))
    return any(bool(torch.stack(flags).any()) for flags in found.values())


KIND = ("dtype", "shape", "device", "requires_grad")


def different(a: Tensor, b: Tensor) -> Tensor:
    """Whether a bit differs, on the device; NaN is NaN."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    integer = common.INTEGER[a.element_size()]
    mask = a.view(integer) != b.view(integer)
    if a.is_floating_point():
        mask &= ~(a.isnan() & b.isnan())
    return mask.any()


def deliver(optimizer: Any, gradients: list[Tensor], mode: str) -> None:
    if mode == "backward":
        optimizer.zero_grad()
        Replay.apply(gradients, *parameters_of(optimizer)).backward()
    else:
        for p, g in zip(parameters_of(optimizer), gradients, strict=True):
            p.grad = g.clone()


def replay(
    name: str,
    dtype: torch.dtype,
    on: On,
    *,
    sizes: tuple[int, ...] = SIZES + SIZES[-MISALIGNED:],
    options: list[dict[str, Any]] | None = None,
    spoil: bool = False,
    change: Change = unchanged,
) -> Any:
    """Trains twins on recorded gradients and looks at all of both now and then. Returns ours."""
    options = options or OPTIONS[name]
    steps = 20 if on.quick else STEPS
    stock = change(optimizer_of(name, sizes, options, on, dtype))
    ours: Any = change(optimizer_of(name, sizes, options, on, dtype))
    optfuse.fuse(ours, mode=on.mode)
    gradients = tape(sizes, on, dtype, len(options), spoil)
    for step in range(steps):
        grads = gradients(step)
        deliver(stock, grads, "forward")
        deliver(ours, grads, on.mode)
        stock.step()
        ours.step()
        if step < 3 or step % LOOK_EVERY == 7 or step == steps - 1:
            what = f"{name} {dtype}, step {step + 1}"
            assert_same_optimizers(what, ours, stock, gradients=on.mode == "forward")
    made = steps * len(parameters_of(ours))
    created = optfuse.summary(ours).created
    assert created == made, f"{created} updates were made, not {made}"
    return ours


def scaled(name: str, dtype: torch.dtype, on: On, change: Change = unchanged) -> None:
    """Under a GradScaler whose scale grows, meets infinities and shrinks."""
    sizes, options = SIZES[:5], OPTIONS[name]
    gradients = tape(sizes, on, dtype, len(options), spoil=True)

    def script(wrap: Any) -> Any:
        optimizer = wrap(change(optimizer_of(name, sizes, options, on, dtype)))
        scaler = torch.amp.GradScaler(on.device.type, init_scale=2.0**6, growth_interval=4)
        for step in range(16 if on.quick else STEPS):
            optimizer.zero_grad()
            loss = Replay.apply(gradients(step), *parameters_of(optimizer))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % LOOK_EVERY in (1, 7):
                yield f"step {step}", [p.detach() for p in parameters_of(optimizer)]
                yield "scale", scaler.get_scale()
        yield "state", optimizer.state_dict()

    on.same(script)


POWERS_AT_ONCE, POWERS_TO = 4096, 200_000


def add_mixed() -> None:
    """Float32 parameters with bfloat16 state."""
    for name in ("Adam", "AdamW"):
        what = f"{name} float32 with bfloat16 state"
        for label, body in bodies_of_mixed(name).items():
            modes = ("forward",) if label.startswith("GradScaler") else ("forward", "backward")
            body.__module__ = __name__  # type: ignore[attr-defined]
            add(f"{what}, {label}", body, ("cuda",), modes, "millions" in label)


def bodies_of_mixed(name: str) -> dict[str, Callable[[On], None]]:
    def trained(on: On, **more: Any) -> None:
        ours = replay(name, torch.float32, on, change=with_narrow_state, **more)
        assert dtypes_of(ours)["exp_avg"] == {"torch.bfloat16"}, "the state is another one"
        assert not optfuse.summary(ours).gpu_bits_differ

    def large(on: On) -> None:
        trained(on, sizes=LARGE, options=OPTIONS[name][-1:])

    return {
        EVERY: trained,
        "NaN and infinite gradients": lambda on: trained(on, sizes=SIZES[:5], spoil=True),
        "millions of elements": large,
        "lr in tensors": lambda on: trained(on, options=tensor_lr(OPTIONS[name], on)),
        "GradScaler with fused=True": lambda on: scaled(name, torch.float32, on, with_narrow_state),
    }


def powers(name: str, on: On, dtype: torch.dtype = torch.float32) -> None:
    """1 - beta^step for each step up to POWERS_TO: of one element's first update from empty
    state nothing else depends on the step. As many parameters as are updated at once have a
    counter each; between updates the counters jump to the next steps. dtype: of the state."""

    def made() -> torch.optim.Optimizer:
        params = [torch.nn.Parameter(torch.zeros(1, device=on.device)) for _ in range(many)]
        optimizer = getattr(torch.optim, name)(params, lr=1.0, weight_decay=0, fused=True)
        for i, p in enumerate(params):
            counter = torch.tensor(float(i), device=on.device)
            optimizer.state[p] = {"step": counter} | {
                key: torch.zeros_like(p, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")
            }
        return optimizer

    def restart(optimizer: torch.optim.Optimizer) -> None:
        params = parameters_of(optimizer)
        states = [optimizer.state[p] for p in params]
        torch._foreach_zero_([s[key] for s in states for key in ("exp_avg", "exp_avg_sq")])
        torch._foreach_add_([s["step"] for s in states], many - 1)
        with torch.no_grad():
            torch._foreach_zero_(params)

    many = 64 if on.quick else POWERS_AT_ONCE
    stock, ours = made(), optfuse.fuse(made(), mode=on.mode)
    one = torch.ones(1, device=on.device)
    for at in range(0, (4 if on.quick else POWERS_TO // many + 1) * many, many):
        for optimizer, mode in (stock, "forward"), (ours, on.mode):
            deliver(optimizer, [one] * many, mode)
            optimizer.step()
        pairs = zip(parameters_of(ours), parameters_of(stock), strict=True)
        if any_differ(list(pairs)):
            mine, theirs = (torch.cat(parameters_of(o)).detach() for o in (ours, stock))
            common.assert_same(f"{name}, steps from {at + 1}", mine, theirs)
        for optimizer in stock, ours:
            restart(optimizer)


#: Steps after which one bit of ASGD's eta depends on what rcp.approx gives, which no CPU tells
#: (results/ptx-executed.json), with the class's default options.
APPROXIMATE = (
    74604, 104119, 152439, 158596, 170506, 175870, 186051, 188855, 196962, 197668, 199257,
)  # fmt: skip


@scenario(devices=("cuda",))
def asgd_numbers_of_chosen_steps(on: On) -> None:
    """Also of others; one parameter each."""
    steps = [*APPROXIMATE, *range(1, POWERS_TO, 20011 if on.quick else 397)]
    one = torch.ones(1, device=on.device)

    def trained(wrap: Callable[[Any], Any], mode: str) -> list[Tensor]:
        params = [torch.nn.Parameter(torch.zeros(1, device=on.device)) for _ in steps]
        optimizer: Any = torch.optim.ASGD(params, lr=0.01)
        for p, step in zip(params, steps, strict=True):
            counter, eta, mu = torch.tensor([step - 1.0, 0.01, 1.0], device=on.device).unbind()
            optimizer.state[p] = {"step": counter, "eta": eta, "mu": mu, "ax": torch.zeros_like(p)}
        optimizer = wrap(optimizer)
        deliver(optimizer, [one] * len(steps), mode)
        optimizer.step()
        states = [optimizer.state[p] for p in params]
        return [torch.stack([s[key] for s in states]) for key in ("step", "eta", "mu")]

    stock = trained(lambda optimizer: optimizer, "forward")
    ours = trained(partial(optfuse.fuse, mode=on.mode), on.mode)
    for key, a, b in zip(("step", "eta", "mu"), ours, stock, strict=True):
        common.assert_same(f"ASGD, {key} after steps {steps}", a, b)


def tensor_lr(options: list[dict[str, Any]], on: On) -> list[dict[str, Any]]:
    """Two groups of these whose lr is a tensor: on the CPU, and on the device."""
    return [
        {**options[-1], "lr": partial(torch.tensor, options[-1]["lr"])},
        {**options[1], "lr": partial(torch.tensor, options[1]["lr"], device=on.device)},
    ]


def add_all() -> None:
    for name, dtype in itertools.product(OPTIONS, DTYPES):
        # Stock's fused SGD in 16 bits is broken on the CPU (docs/numerics.md).
        devices = ("cuda",) if name == "SGD" and dtype in SIXTEEN else BOTH
        what = f"{name} {str(dtype).removeprefix('torch.')}"
        for label, body in bodies(name, dtype).items():
            only = ("cuda",) if label.startswith("capturable") else devices
            modes = ("forward",) if label.startswith("GradScaler") else ("forward", "backward")
            body.__module__ = __name__  # type: ignore[attr-defined]
            slow = "millions" in label or (label != EVERY and dtype is not torch.float32)
            add(f"{what}, {label}", body, only, modes, slow)


def bodies(name: str, dtype: torch.dtype) -> dict[str, Callable[[On], None]]:
    def every(on: On) -> None:
        replay(name, dtype, on)

    def spoiled(on: On) -> None:
        replay(name, dtype, on, sizes=SIZES[:5], spoil=True)

    def large(on: On) -> None:
        replay(name, dtype, on, sizes=LARGE, options=OPTIONS[name][-1:])

    def lr(on: On) -> None:
        replay(name, dtype, on, options=tensor_lr(OPTIONS[name], on))

    def scaler(on: On) -> None:
        scaled(name, dtype, on)

    def capturable(on: On) -> None:
        two = tensor_lr(OPTIONS[name], on)[1:] + OPTIONS[name][2:4]
        replay(name, dtype, on, options=[{**option, "capturable": True} for option in two])

    found = {
        EVERY: every,
        "NaN and infinite gradients": spoiled,
        "millions of elements": large,
        "lr in tensors": lr,
    }
    if dtype is torch.float32 or dtype is torch.float16:
        found["GradScaler with fused=True"] = scaler
    if name != "SGD":
        found["capturable"] = capturable
    return found


@scenario(devices=("cuda",), modes=("forward",))
def bias_corrections_of_every_step(on: On) -> None:
    for name in "Adam", "AdamW":
        powers(name, on)


def bias_corrections_with_bfloat16_state(on: On) -> None:
    for name in "Adam", "AdamW":
        powers(name, on, torch.bfloat16)


add_all()
if takes_mixed(release_of(torch.__version__)):
    add_mixed()
    add(
        bias_corrections_with_bfloat16_state.__name__,
        bias_corrections_with_bfloat16_state,
        ("cuda",),
        ("forward",),
    )
