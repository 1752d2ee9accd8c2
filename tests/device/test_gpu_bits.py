# SPDX-License-Identifier: BSD-3-Clause
"""Equal means equal bits, where numbers of an update are the GPU's: recorded gradients against
fused=True. (tests/python/numerics/test_bits.py has the options, and runs on a real GPU, too.)"""

import gpu
import pytest
import torch
from common import assert_same
from gpu import NAME
from legal import legal
from mixed_state import dtypes_of, with_narrow_state
from test_bits import (
    DTYPES,
    OPTIONS,
    Replay,
    deliver,
    normal,
    optimizer_of,
    parameters_of,
    recorded,
    replay,
    unchanged,
    with_nan_and_inf,
)

import optfuse
from optfuse._library.releases import release_of, takes_mixed

SIZES = (1, 3, 4, 16, 1003)
LARGE = (2_000_003, 1 << 20)  # several chunks; the device's own parallelism
STEPS, POWERS_AT_ONCE, POWERS_TO = (200, 4096, 200_000) if gpu.IS_REAL else (12, 64, 200)
modes = pytest.mark.parametrize("mode", ("forward", "backward"))
narrow = pytest.mark.skipif(
    not takes_mixed(release_of(torch.__version__)), reason="this torch takes no such state"
)
on_real = pytest.mark.skipif(not gpu.IS_REAL, reason="it takes a CPU too long")


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Tensors that are made without a device are made there."""
    torch.set_default_device(NAME)
    yield
    torch.set_default_device(None)


def rates(options):
    """Two groups whose lr is a tensor: on the CPU, and on the device."""
    pairs = ((options[-1], "cpu"), (options[1], NAME))
    return [{**option, "lr": torch.tensor(option["lr"], device=where)} for option, where in pairs]


def capturable(options):
    return [{**option, "capturable": True} for option in (rates(options)[1], *options[2:4])]


#: Options of the groups, sizes, gradients, and the optimizer.
WAYS = {
    "every option": (list, SIZES, None, unchanged),
    "some options": (lambda options: options[1::3], SIZES, with_nan_and_inf, unchanged),
    "lr in tensors": (rates, SIZES, None, unchanged),
    "capturable": (capturable, SIZES, None, unchanged),
    "bfloat16 state": (list, SIZES, None, with_narrow_state),
    "bfloat16 state, NaN": (list, SIZES, with_nan_and_inf, with_narrow_state),
    "bfloat16 state, lr in tensors": (rates, SIZES, None, with_narrow_state),
    "bfloat16 state, millions": (lambda options: options[-1:], LARGE, None, with_narrow_state),
}
MARKS = {way: [narrow] if "bfloat16" in way else [] for way in WAYS}
MARKS["bfloat16 state, millions"].append(on_real)
CASES = [
    pytest.param(way, name, dtype, marks=MARKS[way], id=f"{name}-{str(dtype)[6:]}-{way}")
    for way in WAYS
    for name in ("SGD", "Adam", "AdamW")
    for dtype in DTYPES
    if name != "SGD" or way in ("every option", "some options", "lr in tensors")
    if dtype is torch.float32 or not (MARKS[way] or way == "every option")
]


@modes
@pytest.mark.parametrize(("way", "name", "dtype"), CASES)
def test_numbers_of_the_gpu_give_the_bits_of_fused(way, name, dtype, mode):
    choose, sizes, spoil, change = WAYS[way]
    options = choose(OPTIONS[name])
    gradients = recorded(sizes, dtype, len(options), spoil=spoil)
    ours = replay(name, sizes, dtype, options, mode, gradients, STEPS, change=change)
    if change is with_narrow_state:
        assert dtypes_of(ours)["exp_avg"] == {"torch.bfloat16"}, "the state is another one"
        assert not optfuse.summary(ours).gpu_bits_differ


SCALED = [(name, dtype) for name in OPTIONS for dtype in (torch.float32, torch.float16)]
SCALED = [pytest.param(*case, unchanged) for case in SCALED]
SCALED += [
    pytest.param(name, torch.float32, with_narrow_state, marks=narrow) for name in ("Adam", "AdamW")
]


@pytest.mark.parametrize(("name", "dtype", "change"), SCALED)
def test_a_grad_scaler_gives_the_bits_of_fused(name, dtype, change):
    """Its scale grows, meets infinities and shrinks."""
    options = OPTIONS[name]

    def script(wrap):
        gradients = recorded(SIZES, dtype, len(options), spoil=with_nan_and_inf)
        groups = [normal(SIZES, dtype, 1 + i) for i in range(len(options))]
        optimizer = wrap(change(optimizer_of(name, groups, options)))
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**6, growth_interval=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = Replay.apply(gradients(step % 5), *parameters_of(optimizer))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % 20 in (1, 7):
                yield f"step {step}", [p.detach() for p in parameters_of(optimizer)]
                yield "scale", scaler.get_scale()
        yield "state", optimizer.state_dict()

    legal(script)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=narrow)])
@pytest.mark.parametrize("name", ("Adam", "AdamW"))
def test_bias_corrections_of_every_step(name, dtype):
    """1 - beta^step for each step up to POWERS_TO: of one element's first update from empty
    state nothing else depends on the step. As many parameters as are updated at once have a
    counter each; between updates the counters jump to the next steps. dtype: of the state."""
    averages, many = ("exp_avg", "exp_avg_sq"), POWERS_AT_ONCE

    def made():
        params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(many)]
        optimizer = getattr(torch.optim, name)(params, lr=1.0, weight_decay=0, fused=True)
        for i, p in enumerate(params):
            state = {key: torch.zeros_like(p, dtype=dtype) for key in averages}
            optimizer.state[p] = {"step": torch.tensor(float(i)), **state}
        return optimizer

    stock, ours = made(), optfuse.fuse(made())
    for at in range(0, POWERS_TO + many, many):
        for optimizer in stock, ours:
            deliver(optimizer, [torch.ones(1)] * many, "forward")
            optimizer.step()
        mine, theirs = (torch.cat(parameters_of(o)).detach() for o in (ours, stock))
        assert_same(f"{name}, steps from {at + 1}", mine, theirs)
        for optimizer in stock, ours:
            states = [optimizer.state[p] for p in parameters_of(optimizer)]
            torch._foreach_zero_([s[key] for s in states for key in averages])
            torch._foreach_add_([s["step"] for s in states], many - 1)
            with torch.no_grad():
                torch._foreach_zero_(parameters_of(optimizer))


#: Steps after which one bit of ASGD's eta depends on what rcp.approx gives, which no CPU tells
#: (results/ptx-executed.json), with the class's default options.
APPROXIMATE = (
    74604, 104119, 152439, 158596, 170506, 175870, 186051, 188855, 196962, 197668, 199257,
)  # fmt: skip


@modes
def test_asgds_numbers_of_chosen_steps(mode):
    """Also of others; one parameter each."""
    steps = [*APPROXIMATE, *range(1, 200_000, 397 if gpu.IS_REAL else 20011)]

    def script(wrap):
        params = [torch.nn.Parameter(torch.zeros(1)) for _ in steps]
        optimizer = torch.optim.ASGD(params, lr=0.01)
        for p, step in zip(params, steps, strict=True):
            counter, eta, mu = torch.tensor([step - 1.0, 0.01, 1.0]).unbind()
            optimizer.state[p] = {"step": counter, "eta": eta, "mu": mu, "ax": torch.zeros_like(p)}
        optimizer = wrap(optimizer)
        deliver(optimizer, [torch.ones(1)] * len(steps), mode if wrap.fused else "forward")
        optimizer.step()
        for key in ("step", "eta", "mu"):
            yield key, torch.stack([optimizer.state[p][key] for p in params])

    legal(script, mode, prove=False)
