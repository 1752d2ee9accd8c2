# SPDX-License-Identifier: BSD-3-Clause
"""Every optimizer of PyTorch with every input that PyTorch's own tests have for
it: equal to the reference by bits, within a bound, or refused for a reason that
is expected here. At the end they are counted, so that none is left out.

Both get the same gradients for 20 steps, ours through a forward and a backward
pass. What stock computes is computed once for all flags that don't matter."""

import functools
from collections import Counter

import pytest
import torch
from common import INTEGER, assert_same, differing, snapshot
from optim_inputs import INFOS, Input, flagged_inputs, make, plain_inputs, reference, shapes_of
from test_bits import broken, joined, normal, pieces_of

import optfuse
from optfuse._rules import RULES

STEPS = 20
LOOK_AT = (5, 12, STEPS - 1)  # in between, updates stay pending until the next use
MODES = ("forward", "backward")
OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)

#: Without a rule so far. Whoever adds one takes the name out of here.
NOT_YET = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop",
}  # fmt: skip
NO_RULE = "there is no fused rule for it"
NEVER = {"LBFGS": "it evaluates the loss several times a step", "SparseAdam": NO_RULE}
#: Options, and what their refusal says.
REFUSED = {
    "differentiable": "has differentiable=True, which has no fused CPU update",
    "capturable": "has capturable=True, which has no fused CPU update",
}
#: (optimizer, dtype): the most units in the last place after the last step, and why.
BOUNDED = {}
#: float32: equal, bounded, refused once there is a rule, in each mode.
COUNTS = {
    "Adadelta": (19, 0, 9),
    "Adafactor": (15, 0, 0),
    "Adagrad": (28, 0, 7),
    "Adam": (23, 0, 10),
    "Adamax": (19, 0, 10),
    "AdamW": (23, 0, 10),
    "ASGD": (22, 0, 12),
    "LBFGS": (0, 0, 10),
    "Muon": (14, 0, 0),
    "NAdam": (24, 0, 11),
    "RAdam": (19, 0, 10),
    "RMSprop": (25, 0, 11),
    "Rprop": (16, 0, 7),
    "SGD": (36, 0, 9),
    "SparseAdam": (0, 0, 8),
}


def why_refused(one):
    """What the refusal of this input must say; None if it has to work."""
    if one.name in NOT_YET:
        return NO_RULE
    if one.name in NEVER:
        return NEVER[one.name]
    return next((text for option, text in REFUSED.items() if one.kwargs.get(option)), None)


# The two runs


@functools.cache
def tape(name, dtype):
    """Where the parameters start, and the gradients of every step."""
    shapes = shapes_of(name)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    start, *gradients = (
        [flat.reshape(s) for flat, s in zip(normal(sizes, dtype, i), shapes, strict=True)]
        for i in range(1 + STEPS)
    )
    return start, gradients


def parts_of(name, tensor):
    """SGD in 16 bits is broken in stock unless it steps in pieces."""
    return pieces_of(name, tensor.flatten()) if broken(name, tensor.dtype) else [tensor]


def whole(optimizer, parts, like):
    """A parameter and its state, put together from the parts."""
    states = [optimizer.state[part] for part in parts]
    param = joined([p.detach() for p in parts]).reshape(like.shape)
    state = dict(states[0])
    if parts[0].shape != like.shape and state.get("momentum_buffer") is not None:
        buffers = [s["momentum_buffer"] for s in states]
        state["momentum_buffer"] = joined(buffers).reshape(like.shape)
    return snapshot((param, state))


def stock_run(one, dtype):
    """At each look, every parameter and its state by the reference."""
    start, gradients = tape(one.name, dtype)
    parts = [[torch.nn.Parameter(p.clone()) for p in parts_of(one.name, t)] for t in start]
    flat = [p for group in parts for p in group]
    optimizer = reference(one, flat)
    looks = []
    for step in range(STEPS):
        pieces = [piece for g in gradients[step] for piece in parts_of(one.name, g)]
        for p, g in zip(flat, pieces, strict=True):
            p.grad = g.reshape(p.shape).clone()
        optimizer.step()
        if step in LOOK_AT:
            looks.append([whole(optimizer, *both) for both in zip(parts, start, strict=True)])
    return looks


def fused_run(one, dtype, mode, look):
    """The same by optfuse; calls look(optimizer, parameters) at each look."""
    start, gradients = tape(one.name, dtype)
    params = [torch.nn.Parameter(t.clone()) for t in start]
    optimizer = optfuse.fuse(make(one, params), mode=mode)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum((p * g).sum() for p, g in zip(params, gradients[step], strict=True)).backward()
        optimizer.step()
        if step in LOOK_AT:
            look(optimizer, params)
    created = optfuse.summary(optimizer).created
    assert created == STEPS * len(params), f"{created} updates were made"
    return optimizer


# What becomes of an input


def ulps(ours, stock):
    """The largest distance in units in the last place; of NaN from a number, endless."""
    if not differing(ours, stock).any():
        return 0
    a, b = (in_order(t.detach()) for t in (ours, stock))
    odd = ours.isnan() != stock.isnan()
    return float("inf") if odd.any() else int((a - b).abs()[~stock.isnan()].max())


def in_order(t):
    """Floats as integers that count the floats between them."""
    bits = t.contiguous().view(INTEGER[t.element_size()]).long()
    low = -(2 ** (8 * t.element_size() - 1))
    return torch.where(bits < 0, low - bits, bits)


class Looks:
    """Compares ours with what stock held, look by look."""

    def __init__(self, one, dtype, stock):
        self.one, self.stock = one, iter(stock)
        self.bound, _ = BOUNDED.get((one.name, dtype), (0, ""))
        self.worst = 0

    def __call__(self, optimizer, params):
        for param, (stock, state) in zip(params, next(self.stock), strict=True):
            place = f"parameter of shape {tuple(param.shape)}"
            ours = optimizer.state.get(param, {})
            assert list(ours) == list(state), f"{place}: state {list(ours)}, in stock {list(state)}"
            self.tensor(place, param.detach(), stock)
            for key, value in state.items():
                self.tensor(f"{key} of {place}", ours[key], value)

    def tensor(self, place, ours, stock):
        if self.bound and stock is not None and ours.shape == stock.shape:
            self.worst = max(self.worst, ulps(ours, stock))
            assert self.worst <= self.bound, f"{place}: {self.worst} units in the last place"
        else:
            assert_same(place, ours, stock)


def try_out(one, dtype, mode, stock):
    """"equal", "bounded" or "refused"; an AssertionError says what else."""
    reason = why_refused(one)
    if reason is not None:
        params = [torch.nn.Parameter(t.clone()) for t in tape(one.name, dtype)[0]]
        optimizer = make(one, params[:1] if one.name == "LBFGS" else params)
        with pytest.raises(optfuse.Error, match=reason):
            optfuse.fuse(optimizer, mode=mode)
        assert type(optimizer) is INFOS[one.name].optim_cls, "refused, but changed"
        return "refused"
    looks = Looks(one, dtype, stock)
    optimizer = fused_run(one, dtype, mode, looks)
    fresh = make(one, [torch.nn.Parameter(t.clone()) for t in tape(one.name, dtype)[0]])
    saved = optimizer.state_dict()
    assert_same("param_groups", saved["param_groups"], fresh.state_dict()["param_groups"])
    for i, (_, state) in enumerate(stock[-1]):
        if not looks.bound:
            assert_same(f"state_dict, parameter {i}", saved["state"].get(i, {}), state)
    return "bounded" if looks.worst else "equal"


@functools.cache
def outcomes(name, dtype):
    """(mode, input, what became of it) for all of them; an error as its text."""
    every = plain_inputs(name) + (flagged_inputs(name) if dtype == torch.float32 else [])
    runs, found = {}, []
    for one in every:
        if why_refused(one) is None and one.key() not in runs:
            runs[one.key()] = stock_run(one, dtype)
        for mode in MODES:
            try:
                found.append((mode, one, try_out(one, dtype, mode, runs.get(one.key()))))
            except (AssertionError, pytest.fail.Exception, optfuse.Error) as error:
                found.append((mode, one, f"WRONG: {error}"))
    return found


def all_right(name, dtype):
    wrong = [f"{mode}, {one}: {what}" for mode, one, what in outcomes(name, dtype)
             if what.startswith("WRONG")]  # fmt: skip
    assert not wrong, f"{len(wrong)} inputs came out wrong:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", INFOS)
def test_every_input_of_the_database(name, several_threads):
    all_right(name, torch.float32)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", sorted(set(INFOS) - set(NEVER)))
def test_every_input_in_other_dtypes(name, dtype, several_threads):
    all_right(name, dtype)


def test_the_recorded_gradients_leave_most_elements_finite():
    """Where all is NaN, equal says little."""
    for name in sorted(set(INFOS) - set(NEVER)):
        for dtype in (torch.float32, *OTHER_DTYPES):
            last = stock_run(plain_inputs(name)[0], dtype)[-1]
            finite = torch.cat([param.flatten() for param, _ in last]).isfinite().float().mean()
            assert finite > 0.5, f"{name} {dtype}: {finite:.0%} of the elements are finite"


def test_a_difference_is_noticed():
    """In a parameter, and in a state that the parameter does not show yet."""
    one = Input("AdamW", {"lr": 0.01}, "")
    for other in ({"lr": 0.0100001}, {"lr": 0.01, "betas": (0.9, 0.99901)}):
        stock = stock_run(Input("AdamW", other, ""), torch.float32)
        with pytest.raises(AssertionError, match="differ from stock"):
            try_out(one, torch.float32, "forward", stock)
    with pytest.raises(AssertionError, match="state"):
        sgd = Input("SGD", {"lr": 0.01}, "")
        try_out(one, torch.float32, "forward", stock_run(sgd, torch.float32))


@pytest.mark.parametrize("dtype", (torch.float32, *OTHER_DTYPES))
def test_units_in_the_last_place(dtype):
    one = torch.ones(3, dtype=dtype)
    up, down = (torch.nextafter(one, one * to) for to in (2, 0))
    tiny = torch.nextafter(one * 0, one)
    assert ulps(one, one) == 0 and ulps(one, up) == 1 and ulps(up, down) == 2
    assert ulps(tiny, -tiny) == 2 and ulps(-one, -up) == 1
    assert ulps(one, one * float("nan")) == float("inf")
    assert ulps(one * float("nan"), one * float("nan")) == 0


# The count


def test_rules_that_came_are_no_longer_listed_as_missing():
    """A rule that is new has to be taken out of NOT_YET, and so is tested above."""
    fused = {cls.__name__ for cls in RULES if cls.__module__.startswith("torch.optim")}
    assert fused == set(INFOS) - NOT_YET - set(NEVER)


def test_none_is_left_out_and_each_outcome_is_as_counted(several_threads):
    lines, counts = ["optimizer   equal  bounded  refused, in each mode"], {}
    for name in INFOS:
        each = [Counter(what.split(":")[0] for mode, _, what in outcomes(name, torch.float32)
                        if mode == chosen) for chosen in MODES]  # fmt: skip
        assert each[0] == each[1], f"{name}: {each[0]} forward, but {each[1]} backward"
        counts[name] = tuple(each[0][kind] for kind in ("equal", "bounded", "refused"))
        lines.append("{:<10}{:>7}{:>9}{:>9}".format(name, *counts[name]))
    print("\n".join(lines))
    expected = {
        name: (0, 0, sum(count)) if name in NOT_YET else count for name, count in COUNTS.items()
    }
    assert counts == expected


def test_the_database_is_as_large_as_it_was():
    """Each input that PyTorch's helpers know, on the CPU and on a GPU, is tried."""
    for name, info in INFOS.items():
        tried = {str(one) for one in plain_inputs(name) + flagged_inputs(name)}
        for device in ("cpu", "cuda"):
            for one in info.optim_inputs_func(device=device):
                kwargs = ", ".join(f"{key}={value!r}" for key, value in one.kwargs.items())
                assert f"{name}({kwargs})" in tried, f"{name}({kwargs}) is left out"
