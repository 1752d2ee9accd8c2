# SPDX-License-Identifier: BSD-3-Clause
"""Traced optimizers whose parameters or state become others in the middle of training. Forward
mode leaves such a step to the class; backward mode refuses it."""

import copy

import pytest
import torch
import traced_classes
from common import assert_same, refused, same
from torch import nn

import optfuse
from optfuse._link import link_of
from optfuse._traced.cohorts import kind_of_shape
from optfuse._trials.compare import difference


def convolution():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))


def train(model, optimizer, i):
    torch.manual_seed(i)
    optimizer.zero_grad()
    model(torch.randn(3, 3, 3, 3)).square().sum().backward()
    optimizer.step()


def everything(model, optimizer):
    """With strides of the same order: what they are is no promise."""
    yield "weights", [p.detach().contiguous() for p in model.parameters()]
    entries = [optimizer.state[p] for p in model.parameters()]
    for entry in entries:
        yield "state", {k: v + 0 if torch.is_tensor(v) else v for k, v in entry.items()}


def each_state_tensor(optimizer, change):
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if torch.is_tensor(value) and value.is_floating_point() and value.dim():
                entry[key] = change(value)


def in_channels_last(tensor):
    is_image = tensor.dim() == 4
    return tensor.to(memory_format=torch.channels_last) if is_image else tensor


CHANGES = {
    "another memory format": lambda model, _: model.to(memory_format=torch.channels_last),
    "state of another memory format": lambda _, o: each_state_tensor(o, in_channels_last),
    "state of more precision": lambda _, o: each_state_tensor(o, torch.Tensor.double),
    "state of less precision": lambda _, o: each_state_tensor(o, torch.Tensor.bfloat16),
}
STRIDES = [traced_classes.TrustRatio, traced_classes.Centered, traced_classes.OtherDtypes]
DTYPES = [traced_classes.Replaces]
CASES = [(cls, name) for cls in STRIDES for name in CHANGES if "format" in name]
CASES += [(cls, name) for cls in DTYPES for name in CHANGES if "precision" in name]


def changed(cls, change):
    def script(wrap):
        model = convolution()
        optimizer = wrap(cls(model.parameters()))
        for i in range(6):
            train(model, optimizer, i)
            if i == 1:
                change(model, optimizer)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("cls, name", CASES)
def test_forward_mode_goes_on(cls, name):
    same(changed(cls, CHANGES[name]))


@pytest.mark.parametrize("cls, name", CASES)
def test_backward_mode_refuses_what_it_can_not_follow(cls, name):
    model = convolution()
    optimizer = optfuse.fuse(cls(model.parameters()), mode="backward")
    for i in range(2):
        train(model, optimizer, i)
    CHANGES[name](model, optimizer)
    before = [p.detach().clone() for p in model[0].parameters()]
    with pytest.raises(optfuse.Error, match='nothing was updated|Nothing was updated.*"forward"'):
        for i in range(2):
            train(model, optimizer, 2 + i)
    assert_same("weights", [p.detach() for p in model[0].parameters()], before)


@pytest.mark.parametrize("cls", [traced_classes.AdaBelief, traced_classes.FactoredState])
def test_a_lazy_parameter_is_refused_as_for_classes_with_kernels(cls):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    for make in (cls, torch.optim.AdamW):
        with pytest.raises(optfuse.Error, match="it is not initialized yet; run one forward pass"):
            optfuse.fuse(make(model.parameters()))


@pytest.mark.parametrize("cls", [traced_classes.FactoredState, traced_classes.PointState])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_state_with_shapes_of_its_own_from_before(mode, cls):
    """In fuse(), and in a group that is added."""

    def script(wrap):
        model = convolution()
        first = cls(model.parameters())
        for i in range(2):
            train(model, first, i)
        optimizer = cls(model[0].parameters())
        for p in model[0].parameters():
            optimizer.state[p] = first.state[p]
        optimizer = wrap(optimizer)
        for i in range(2):
            train(model, optimizer, 2 + i)
        optimizer.zero_grad()
        model.zero_grad()
        for p in model[2].parameters():
            optimizer.state[p] = first.state[p]
        optimizer.add_param_group({"params": list(model[2].parameters())})
        for i in range(3):
            train(model, optimizer, 4 + i)
        yield from everything(model, optimizer)

    same(script, mode)


# ---- strides by which PyTorch's operators go another way


class ThroughFlat(traced_classes.Base):
    """Halves what flatten() shows: the update itself, or a copy of it."""

    def update(self, p, grad, state, group):
        update = grad * 1.0
        update.flatten().mul_(0.5)
        p.add_(update, alpha=-group["lr"])


class ThroughContiguous(traced_classes.Base):
    def update(self, p, grad, state, group):
        update = grad * 1.0
        update.contiguous().mul_(0.5)
        update.reshape(-1).add_(0.1)
        made = p.new_ones(p.shape)
        made.flatten().mul_(group["lr"])
        p.sub_(update * made)


class OfHalves(traced_classes.Base):
    """In 16 bits PyTorch rounds once more where strides keep it from its vectors."""

    def update(self, p, grad, state, group):
        if not state:
            state["n"], state["sum"] = 0, torch.zeros_like(p)
        state["n"] += 1
        state["sum"].add_(p, alpha=state["n"])
        p.add_(grad, alpha=-group["lr"])


def transposed(x):
    return x.t().contiguous().t()


def plain(x):
    return x


def with_holes(x):
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def trains_as_stock(cls, layouts, mode, dtype=torch.float32):
    """With parameters of these shapes, each laid out by a function. The fused optimizer."""

    def trained(wrap):
        torch.manual_seed(0)
        params = [nn.Parameter(lay(torch.randn(shape).to(dtype))) for shape, lay in layouts]
        optimizer = wrap(cls(params))
        for _ in range(4):
            optimizer.zero_grad()
            sum(p.square().sum() for p in params).backward()
            optimizer.step()
        return [p.detach() for p in params], [optimizer.state[p] for p in params], optimizer

    ours = trained(lambda optimizer: optfuse.fuse(optimizer, mode=mode))
    stock = trained(plain)
    assert difference("", ours[:2], stock[:2]) is None
    return ours[2]


MIXES = [
    [((8, 8), transposed)],
    [((8, 8), plain), ((8, 8), transposed)],
    [((8, 8), transposed), ((8, 8), plain)],
    [((5, 7), plain), ((4, 3), transposed)],
    [((5,), plain), ((4, 3), transposed)],
    [((5,), plain), ((6, 3), plain), ((4, 3), transposed), ((2, 3, 4, 5), in_channels_last)],
]


def test_kinds_of_shape_are_unlike():
    shapes = torch.ones(()), torch.ones(3), torch.ones(6)[::2], torch.ones(2, 3).T
    assert len(set(map(kind_of_shape, shapes))) == 4


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("layouts", MIXES)
@pytest.mark.parametrize("cls", [ThroughFlat, ThroughContiguous])
def test_views_and_copies_are_those_of_each_parameters_strides(cls, layouts, mode):
    optimizer = trains_as_stock(cls, layouts, mode)
    assert not link_of(optimizer).traced.untraced


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("shape", [(7,), (100,), (1000,), (9, 130)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_holes_each_step_is_the_classes_own(dtype, shape):
    optimizer = trains_as_stock(OfHalves, [(shape, with_holes), (shape, plain)], "forward", dtype)
    assert link_of(optimizer).traced.untraced == 4
    assert "holes" in link_of(optimizer).traced.why_not[1]


def test_backward_mode_refuses_in_fuse_what_it_would_refuse_later():
    optimizer = OfHalves([nn.Parameter(with_holes(torch.randn(5, 4)))])
    with pytest.raises(optfuse.Error, match="holes"):
        optfuse.fuse(optimizer, mode="backward")
    optimizer = optfuse.fuse(OfHalves([nn.Parameter(torch.randn(5, 4))]), mode="backward")
    with pytest.raises(optfuse.Error, match="holes"):
        optimizer.add_param_group({"params": [nn.Parameter(with_holes(torch.randn(5, 4)))]})


def test_holes_that_come_later():
    """`p.data =` of other strides."""

    def script(wrap):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(9, 130).half())
        optimizer = wrap(OfHalves([p]))
        for i in range(6):
            if i == 3:
                p.data = with_holes(p.detach().clone())
            p.grad = torch.randn(9, 130, generator=torch.Generator().manual_seed(i)).half()
            optimizer.step()
            yield "weights", p.detach().clone()
        yield "state", optimizer.state[p]["sum"].clone()

    same(script)


LOOPS = [
    lambda params: torch.optim.RMSprop(params, foreach=False, momentum=0.9),
    lambda params: torch.optim.ASGD(params, foreach=False),
    lambda params: torch.optim.Adadelta(params, foreach=False, weight_decay=0.1),
]


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("make", LOOPS)
def test_classes_with_kernels_too(make, dtype, mode):
    def trained(wrap):
        torch.manual_seed(0)
        p = nn.Parameter(with_holes(torch.randn(9, 130).to(dtype)))
        optimizer = wrap(make([p]))
        for _ in range(5):
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()
        return p.detach().clone(), dict(optimizer.state[p])

    assert difference("", trained(lambda o: optfuse.fuse(o, mode=mode)), trained(plain)) is None


def test_nor_is_a_group_with_holes_added_to_kernels():
    p = nn.Parameter(torch.randn(9, 130).half())
    optimizer = optfuse.fuse(torch.optim.RMSprop([p], foreach=False))
    with pytest.raises(optfuse.Error, match="holes.*fuse it again with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(with_holes(p.detach().clone()))]})


def exchanged(optimizer, what, layout):
    (p,) = optimizer.param_groups[0]["params"]
    if what == "parameter":
        p.data = layout(p.detach().clone())
    elif what == "gradient":
        p.grad = layout(p.grad)
    else:
        optimizer.state[p]["square_avg"] = layout(optimizer.state[p]["square_avg"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["parameter", "gradient", "state"])
@pytest.mark.parametrize("layout", [with_holes, transposed])
def test_strides_that_come_later_are_refused_by_kernels_in_16_bits(layout, what, dtype):
    """PyTorch's operators round there once more; in other dtypes they don't."""

    def script(wrap):
        p = nn.Parameter(torch.linspace(-1, 1, 63).view(7, 9).to(dtype))
        optimizer = wrap(torch.optim.RMSprop([p], foreach=False, momentum=0.9, weight_decay=0.1))
        for i in range(5):
            p.grad = torch.linspace(-1, i, 63).view(7, 9).to(dtype)
            if i == 2 and (dtype == torch.float32 or wrap.fused):
                exchanged(optimizer, what, layout)
            if i == 2 and dtype != torch.float32 and wrap.fused:
                refused(optimizer.step, "holes or other strides", way_out="make them contiguous")
                exchanged(optimizer, what, torch.Tensor.contiguous)
            optimizer.step()
            yield "weights", p.detach().clone()

    same(script, prove=False)


def test_strides_of_one_element_mean_nothing():
    def script(wrap):
        p = nn.Parameter(torch.linspace(-1, 1, 7).view(7, 1).half())
        optimizer = wrap(torch.optim.RMSprop([p], foreach=False, momentum=0.9))
        for i in range(3):
            p.grad = torch.linspace(-1, i, 7).half().as_strided((7, 1), (1, 5))
            optimizer.step()
            yield "weights", p.detach().clone()

    same(script)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("shapes", [((),), ((), (3, 4)), ((5,), ())])
@pytest.mark.parametrize("cls", [traced_classes.AdaBelief, traced_classes.TensorCounter])
def test_parameters_without_dimensions_are_resumed(cls, shapes, mode):
    """Their state looks like counters."""

    def trained(wrap):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = cls(params)
        for i in range(8):
            if i == 4:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = cls(params)
                optimizer.load_state_dict(saved)
                optimizer = wrap(optimizer)
            optimizer.zero_grad()
            sum(p.square().sum() for p in params).backward()
            optimizer.step()
        return [p.detach() for p in params], [optimizer.state[p] for p in params], optimizer

    ours, stock = trained(lambda o: optfuse.fuse(o, mode=mode)), trained(plain)
    assert difference("", ours[:2], stock[:2]) is None
    traced = link_of(ours[2]).traced
    assert not traced.untraced
    assert set(traced.recording.names) >= {"exp_avg"} or "square" in traced.recording.names


class CountsWhereAsked(torch.optim.Optimizer):
    """Changes an option of those groups only that ask for it."""

    def __init__(self, params, counts=False):
        super().__init__(params, {"lr": 0.1, "counts": counts, "seen": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["counts"]:
                group["seen"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (1 + group["seen"]))


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_copy_knows_what_an_added_group_has_shown(mode):
    def train(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.zero_grad()
        sum(p.square().sum() for p in params).backward()
        optimizer.step()
        return [p.detach().clone() for p in params]

    def script(wrap):
        torch.manual_seed(0)
        optimizer = wrap(CountsWhereAsked([nn.Parameter(torch.randn(7))]))
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(5))], "counts": True})
        yield "weights", train(optimizer)
        twin = copy.deepcopy(optimizer)
        for _ in range(3):
            yield "weights of the copy", train(twin)
        yield "options", [group["seen"] for group in twin.param_groups]

    same(script, mode)
