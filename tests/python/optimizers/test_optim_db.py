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
from common import assert_same, same, snapshot
from optim_entries import OURS
from optim_inputs import INFOS, Input, flagged_inputs, make, plain_inputs, reference, shapes_of
from test_bits import broken, joined, normal, pieces_of

import optfuse
from optfuse._fused.recorded import last_counts
from optfuse._options import is_recorded
from optfuse._rules import NATIVE, RULES
from optfuse.optim import ROUNDING

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
STEPS = 20
LOOK_AT = (5, 12, STEPS - 1)  # in between, updates stay pending until the next use
MODES = ("forward", "backward")
OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)

#: Without kernels for dense gradients that are there before step().
RECORDED = ("LBFGS", "SparseAdam")
#: Options, and what their refusal says.
REFUSED = {
    "differentiable": "has differentiable=True, which has no fused CPU update",
    "capturable": "has capturable=True, which has no fused CPU update",
}
#: Where a learning rate that is a float32 tensor is bounded: the for-loop computes
#: the step size from it in float32, which optfuse does in double, as the for-loop
#: itself with the same learning rate as a number. It equals that by bits, and
#: is this far from the other in 20 steps: see units().
BOUNDED = {
    ("ASGD", torch.float32): 2,
    ("ASGD", torch.float64): 2,
    ("Adamax", torch.float32): 1,
    ("Adamax", torch.float64): 1,
    ("Adamax", torch.float16): 1,
    ("NAdam", torch.float32): 8,
    ("NAdam", torch.float64): 8,
    ("RAdam", torch.float64): 4,
}
#: float32: equal, bounded, refused, in each mode.
COUNTS = {
    "Adadelta": (19, 0, 9),
    "Adafactor": (15, 0, 0),
    "Adagrad": (28, 0, 7),
    "Adam": (23, 0, 10),
    "Adamax": (18, 1, 10),
    "AdamW": (23, 0, 10),
    "ASGD": (21, 1, 12),
    "Muon": (14, 0, 0),
    "NAdam": (23, 1, 11),
    "RAdam": (19, 0, 10),
    "RMSprop": (25, 0, 11),
    "Rprop": (16, 0, 7),
    "SGD": (36, 0, 9),
}
if TORCH >= (2, 14):
    COUNTS |= {"Muon": (18, 0, 0)}
COUNTS |= {name: (2 * (len(ours.options) + 1), 0, 0) for name, ours in OURS.items()}


def why_refused(one):
    """The words of this input's refusal; None if it has to work."""
    return next((text for option, text in REFUSED.items() if one.kwargs.get(option)), None)


# The two runs


@functools.cache
def tape(name, dtype):
    """Where the parameters start, and the gradients of every step."""
    shapes = shapes_of(name, dtype)
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
    if is_recorded(optimizer):
        assert last_counts()["lines"], "no operator was recorded"
    else:
        created = optfuse.summary(optimizer).created
        assert created == STEPS * len(params), f"{created} updates were made"
    return optimizer


# The outcome of an input


def units(ours, stock):
    """The largest distance in units in the last place of the tensor's largest
    element (of float32 for float64); of NaN from a number, endless."""
    both = ours.double(), stock.double()
    if (both[0].isnan() != both[1].isnan()).any():
        return float("inf")
    a, b = (t.nan_to_num(0.0).flatten() for t in both)
    eps = max(torch.finfo(stock.dtype).eps, torch.finfo(torch.float32).eps)
    exponent = torch.frexp(b.abs().max()).exponent - 1
    return ((a - b).abs().max() / torch.ldexp(torch.tensor(eps).double(), exponent)).item()


def farthest(run, other):
    """In units, over the looks of two stock runs."""
    worst = 0.0
    for look, others in zip(run, other, strict=True):
        for (param, state), (param2, state2) in zip(look, others, strict=True):
            for a, b in ((param, param2), *((state[key], state2[key]) for key in state)):
                worst = worst if a is None else max(worst, units(a, b))
    return worst


def compare(optimizer, params, stock):
    """With one look of the reference; raises where a bit differs."""
    for param, (value, state) in zip(params, stock, strict=True):
        place = f"parameter of shape {tuple(param.shape)}"
        ours = optimizer.state.get(param, {})
        assert list(ours) == list(state), f"{place}: state {list(ours)}, in stock {list(state)}"
        assert_same(place, param.detach(), value)
        for key in state:
            assert_same(f"{key} of {place}", ours[key], state[key])


def try_out(one, dtype, mode, stock):
    """The outcome: "equal" or "refused"; an AssertionError says what else."""
    reason = why_refused(one)
    if reason is not None:
        params = [torch.nn.Parameter(t.clone()) for t in tape(one.name, dtype)[0]]
        optimizer = make(one, params)
        with pytest.raises(optfuse.Error, match=reason):
            optfuse.fuse(optimizer, mode=mode)
        assert type(optimizer) is INFOS[one.name].optim_cls, "refused, but changed"
        return "refused"
    looks = iter(stock)
    optimizer = fused_run(one, dtype, mode, lambda o, params: compare(o, params, next(looks)))
    fresh = make(one, [torch.nn.Parameter(t.clone()) for t in tape(one.name, dtype)[0]])
    saved = optimizer.state_dict()
    assert_same("param_groups", saved["param_groups"], fresh.state_dict()["param_groups"])
    for i, (_, state) in enumerate(stock[-1]):
        assert_same(f"state_dict, parameter {i}", saved["state"].get(i, {}), state)
    return "equal"


def try_bounded(one, dtype, mode, stock, bound):
    number = Input(one.name, {**one.kwargs, "lr": float(one.kwargs["lr"])}, one.desc)
    exact = stock_run(number, dtype)
    assert try_out(one, dtype, mode, exact) == "equal"
    far = farthest(exact, stock)
    assert 0 < far <= bound, f"{far:.2f} units in the last place, the bound is {bound}"
    return "bounded"


@functools.cache
def outcomes(name, dtype):
    """(mode, input, what became of it) for all of them; an error as its text."""
    every = plain_inputs(name) + (flagged_inputs(name) if dtype == torch.float32 else [])
    runs, found = {}, []
    for one in every:
        if why_refused(one) is None and one.key() not in runs:
            runs[one.key()] = stock_run(one, dtype)
        bound = BOUNDED.get((name, dtype)) if "lr" in one.kwargs else None
        for mode in MODES:
            stock = runs.get(one.key())
            try:
                if stock and bound and isinstance(one.kwargs["lr"], torch.Tensor):
                    what = try_bounded(one, dtype, mode, stock, bound)
                else:
                    what = try_out(one, dtype, mode, stock)
                found.append((mode, one, what))
            except (AssertionError, pytest.fail.Exception, optfuse.Error) as error:
                found.append((mode, one, f"WRONG: {error}"))
    return found


def all_right(name, dtype):
    wrong = [f"{mode}, {one}: {what}" for mode, one, what in outcomes(name, dtype)
             if what.startswith("WRONG")]  # fmt: skip
    assert not wrong, f"{len(wrong)} inputs came out wrong:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(set(INFOS) - set(RECORDED)))
def test_every_input_of_the_database(name, several_threads):
    all_right(name, torch.float32)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", sorted(set(INFOS) - set(RECORDED)))
def test_every_input_in_other_dtypes(name, dtype, several_threads):
    all_right(name, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECORDED)
def test_every_input_of_what_is_recorded_only(name, mode, several_threads):
    inputs = plain_inputs(name) + flagged_inputs(name)
    assert len(inputs) > 5

    def script(wrap):
        for one in inputs:
            torch.manual_seed(0)
            table, head = torch.nn.Embedding(9, 4, sparse=name == "SparseAdam"), torch.randn(4, 3)
            optimizer = wrap(make(one, [table.weight]))

            def closure(optimizer=optimizer, table=table, head=head):
                optimizer.zero_grad()
                loss = (table(torch.tensor([1, 2, 2, 7])).tanh() @ head - 1).square().sum()
                loss.backward()
                return loss

            for i in range(STEPS):
                yield f"loss {i} of {one}", optimizer.step(closure)
            yield f"parameter by {one}", table.weight.detach()
            yield f"state of {one}", dict(optimizer.state[table.weight])

    same(script, mode, prove=False)


def test_the_recorded_gradients_leave_most_elements_finite():
    """Where all is NaN, equal says little."""
    for name in sorted(set(INFOS) - set(RECORDED)):
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


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_units_in_the_last_place(dtype):
    one = torch.tensor([1.5, 1e-3, 0.0], dtype=dtype)
    step = torch.tensor([0.0, 0.0, torch.finfo(dtype).eps], dtype=dtype)
    assert units(one, one) == 0 and units(one + step, one) == 1 and units(one - step, one) == 1
    assert units(one * 4 + step, one * 4) == 0.25
    nan = one * float("nan")
    assert units(one, nan) == float("inf") and units(nan, one) == float("inf")
    assert units(one.double() + step, one.double()) == torch.finfo(dtype).eps * 2**23


# The count


def test_every_class_has_a_rule_or_is_recorded_only():
    fused = {cls.__name__ for cls in {*RULES, *NATIVE} - {*ROUNDING}}
    assert fused == set(INFOS) - set(RECORDED)


def test_none_is_left_out_and_each_outcome_is_as_counted(several_threads):
    lines, counts = ["optimizer   equal  bounded  refused, in each mode"], {}
    for name in sorted(set(INFOS) - set(RECORDED)):
        each = [Counter(what.split(":")[0] for mode, _, what in outcomes(name, torch.float32)
                        if mode == chosen) for chosen in MODES]  # fmt: skip
        assert each[0] == each[1], f"{name}: {each[0]} forward, but {each[1]} backward"
        counts[name] = tuple(each[0][kind] for kind in ("equal", "bounded", "refused"))
        lines.append("{:<10}{:>7}{:>9}{:>9}".format(name, *counts[name]))
    print("\n".join(lines))
    assert counts == COUNTS


def test_the_database_is_as_large_as_it_was():
    """Each input that PyTorch's helpers know, on the CPU and on a GPU, is tried."""
    for name, info in INFOS.items():
        tried = {str(one) for one in plain_inputs(name) + flagged_inputs(name)}
        for device in ("cpu", "cuda"):
            for one in info.optim_inputs_func(device=device):
                kwargs = ", ".join(f"{key}={value!r}" for key, value in one.kwargs.items())
                assert f"{name}({kwargs})" in tried, f"{name}({kwargs}) is left out"
