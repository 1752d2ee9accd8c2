# SPDX-License-Identifier: BSD-3-Clause
"""The reference of the K-FAC tests against what it may be derived from: explicit inverses of
whole blocks, and factors made of one sample at a time."""

import pytest
import torch
from common import batch, net
from kfac_reference import Reference
from torch import nn

F64 = torch.float64
NOW = {"factors_every": 1, "inverses_every": 1, "decay": 0.0}  # the factors are this batch's
CONVS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": (2, 1)},
    "dilation": {"dilation": (1, 2), "padding": 1},
    "all": {"stride": (2, 1), "padding": (1, 2), "dilation": 2, "bias": False},
    "circular": {"padding": 1, "padding_mode": "circular"},
}
LINEARS = {"bias": {}, "no bias": {"bias": False}}


def relative(found, expected):
    return float((found - expected).detach().norm() / expected.detach().norm())


class Quiet(torch.optim.Optimizer):
    """Leaves the gradients for us to look at."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        pass


def reference_of(model, **options):
    model = model.double()
    return Reference(model, Quiet(model.parameters()), **{**NOW, **options})


def images(n=3, channels=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, channels, 6, 5, generator=generator, dtype=F64)


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=F64)


def layer_and_x(kind, case):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Linear(4, 3, **LINEARS[case]).double(), rows(7, 4)
    return nn.Conv2d(2, 3, (3, 2), **CONVS[case]).double(), images()


CASES = [("linear", case) for case in LINEARS] + [("conv", case) for case in CONVS]


def loss_of(y):
    """A mean over samples of something with gradients that differ."""
    return (y.flatten(1).sin() * (1 + y.flatten(1))).sum(1).mean()


def matrix_of_gradient(layer):
    parts = [layer.weight.grad.view(len(layer.weight), -1)]
    if layer.bias is not None:
        parts.append(layer.bias.grad[:, None])
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("kind", "case"), CASES)
@pytest.mark.parametrize("split", (None, "pi"))
def test_the_solve_is_the_explicit_inverse_of_the_whole_block(kind, case, split):
    layer, x = layer_and_x(kind, case)
    # As large a damping as keeps the explicit inverse exact to 1e-13.
    reference = reference_of(layer, kl_clip=None, damping=0.1, split=split)
    loss_of(layer(x)).backward()
    before = matrix_of_gradient(layer).clone()
    reference.step()
    a, g = reference.factors("")
    of_a = of_g = 0.1
    if split == "pi":
        mean_a, mean_g = a.diagonal().mean(), g.diagonal().mean()
        of_a, of_g = (0.1 * mean_a / mean_g).sqrt(), (0.1 * mean_g / mean_a).sqrt()
    a, g = a + of_a * torch.eye(len(a), dtype=F64), g + of_g * torch.eye(len(g), dtype=F64)
    block = torch.kron(a, g)  # of vec(dW) by columns
    solved = torch.linalg.inv(block) @ before.T.reshape(-1)
    assert relative(matrix_of_gradient(layer).T.reshape(-1), solved) < 1e-13


def per_sample(layer, x, n):
    """The contribution of each sample to the mean loss: the gradient of its y."""
    for i in range(n):
        y = layer(x[i : i + 1])
        (g,) = torch.autograd.grad(loss_of(y) / n, y)
        yield x[i], g[0].detach()


@pytest.mark.parametrize("case", LINEARS)
def test_factors_of_a_linear_are_sums_of_outer_products(case):
    layer, x = layer_and_x("linear", case)
    reference = reference_of(layer)
    loss_of(layer(x)).backward()
    reference.step()
    n = len(x)
    a, g = 0.0, 0.0
    for one, gradient in per_sample(layer, x, n):
        one = torch.cat([one, torch.ones(1, dtype=F64)]) if layer.bias is not None else one
        a += torch.outer(one, one) / n
        g += torch.outer(gradient, gradient) * n
    assert relative(reference.factors("")[0], a) < 1e-13
    assert relative(reference.factors("")[1], g) < 1e-13


def patch_at(conv, image, row, column):
    """By indices, in the order of weight.view(outputs, -1); zero where there is no pixel."""
    values = []
    for channel in range(conv.in_channels):
        for i in range(conv.kernel_size[0]):
            for j in range(conv.kernel_size[1]):
                at = [
                    start * stride + k * dilation - padding
                    for start, stride, k, dilation, padding in zip(
                        (row, column),
                        conv.stride,
                        (i, j),
                        conv.dilation,
                        conv.padding,
                        strict=True,
                    )
                ]
                if conv.padding_mode == "circular":
                    at = [k % size for k, size in zip(at, image.shape[1:], strict=True)]
                inside = all(0 <= k < size for k, size in zip(at, image.shape[1:], strict=True))
                values.append(float(image[channel, at[0], at[1]]) if inside else 0.0)
    values += [1.0] if conv.bias is not None else []
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("case", CONVS)
def test_factors_of_a_conv_are_sums_over_patches(case):
    conv, x = layer_and_x("conv", case)
    reference = reference_of(conv)
    loss_of(conv(x)).backward()
    reference.step()
    n = len(x)
    a, g = 0.0, 0.0
    for image, gradient in per_sample(conv, x, n):
        dw, height, width = 0.0, *gradient.shape[1:]
        for row in range(height):
            for column in range(width):
                patch = patch_at(conv, image, row, column)
                one = gradient[:, row, column]
                a += torch.outer(patch, patch) / n
                g += torch.outer(one, one) * n / (height * width)
                dw += torch.outer(one, patch)
        # The patches are those of this convolution: autograd has the same gradient of weights.
        conv.zero_grad()
        (loss_of(conv(image[None])) / n).backward()
        assert relative(dw, matrix_of_gradient(conv)) < 1e-13
        reference.discard()
    assert relative(reference.factors("")[0], a) < 1e-13
    assert relative(reference.factors("")[1], g) < 1e-13


@pytest.mark.parametrize("parts", ([7], [3, 4], [1, 1, 5]))
def test_micro_batches_of_any_sizes_are_one_batch(parts):
    layer, x = layer_and_x("linear", "bias")
    whole, cut = reference_of(layer), reference_of(layer)
    loss_of(layer(x)).backward()
    whole.step()
    cut.discard()  # both watch this layer
    for some in x.split(parts):
        (loss_of(layer(some)) * len(some) / len(x)).backward()
    cut.step()
    for a, b in zip(cut.factors(""), whole.factors(""), strict=True):
        assert relative(a, b) < 1e-13


def test_rows_of_every_use_count():
    """A layer that is used twice has 2 N rows, and one of three dimensions B T of them."""
    layer, x = layer_and_x("linear", "no bias")
    reference = reference_of(layer)
    other = x.flip(0) * 2
    one, two = layer(x), layer(other)
    one.retain_grad(), two.retain_grad()
    loss_of(one * two).backward()
    reference.step()
    both_x, both_g = torch.cat([x, other]), torch.cat([one.grad, two.grad])
    a, g = reference.factors("")
    assert relative(a, both_x.T @ both_x / 14) < 1e-13
    assert relative(g, both_g.T @ both_g * 14) < 1e-13

    layer, x = layer_and_x("linear", "no bias")
    reference = reference_of(layer)
    x = rows(2, 5, 4)
    y = layer(x)
    y.retain_grad()
    loss_of(y).backward()
    reference.step()
    a, g = reference.factors("")
    assert relative(a, sum(r.T @ r for r in x) / 10) < 1e-13
    assert relative(g, sum(r.T @ r for r in y.grad) * 10) < 1e-13


def test_the_running_average_starts_at_identity_and_has_no_damping():
    layer, x = layer_and_x("linear", "bias")
    reference = reference_of(layer, decay=0.75, damping=10.0, factors_every=2)
    expected = torch.eye(5, dtype=F64)
    for t in range(5):
        layer.zero_grad()
        loss_of(layer(x + t)).backward()
        reference.step()
        if t % 2 == 0:
            with_ones = torch.cat([x + t, torch.ones(7, 1, dtype=F64)], 1)
            expected = 0.75 * expected + 0.25 * with_ones.T @ with_ones / 7
        assert relative(reference.factors("")[0], expected) < 1e-13


def test_the_kl_clip_bounds_the_step():
    def of(kl_clip):
        layer, x = layer_and_x("linear", "bias")
        optimizer = Quiet([{"params": [layer.weight], "lr": 0.5}, {"params": [layer.bias]}])
        reference = Reference(layer, optimizer, kl_clip=kl_clip, **NOW)
        loss_of(layer(x)).backward()
        before = matrix_of_gradient(layer).clone()
        reference.step()
        return before, matrix_of_gradient(layer)

    dw, v = of(None)
    lr = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.1], dtype=F64)  # of the weight's columns, the bias
    total = float((lr**2 * v * dw).sum())
    assert total > 0
    _, clipped = of(total / 4)
    assert relative(clipped, v / 2) < 1e-13
    _, unclipped = of(total * 4)
    assert torch.equal(unclipped, v)


def test_inputs_may_be_changed_in_place_afterwards():
    def of(inplace):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace), nn.Flatten(), nn.Linear(60, 2))
        reference = reference_of(model)
        loss_of(model(images())).backward()
        reference.step()
        return [*reference.factors("0"), *reference.factors("3")]

    for a, b in zip(of(True), of(False), strict=True):
        assert torch.equal(a, b)


def test_self_attention_is_that_of_torch():
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ours.load_state_dict(stock.state_dict())
    reference = reference_of(ours, kl_clip=None)
    x = rows(3, 5, 8)
    for model in (stock, ours):
        y, _ = model(x, x, x, need_weights=False)
        loss_of(y).backward()
        assert relative(y, stock(x, x, x, need_weights=False)[0]) < 1e-13
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        assert relative(p.grad, q.grad) < 1e-12
    reference.step()
    with_ones = torch.cat([x.reshape(-1, 8), torch.ones(15, 1, dtype=F64)], 1)
    a, g = reference.factors("in_proj_weight")
    assert relative(a, with_ones.T @ with_ones / 15) < 1e-13 and g.shape == (24, 24)
    a, g = reference.factors("out_proj")
    rows_of_y = stock(x, x, x, need_weights=False)[0].detach().reshape(15, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(rows_of_y.view(3, 5, 8)), rows_of_y)
    assert relative(g, gradient.T @ gradient * 15) < 1e-12 and a.shape == (9, 9)


class Tokens(nn.Module):
    """Logits of each token, with the classes in the second dimension as cross entropy has them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x).movedim(-1, 1)


def conv_net():
    first = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(20, 3))


CURVLINOPS = {  # a model, its x, and S, which they have in G where ours has it in A
    "mlp": (net, rows(5, 6), {}),
    "tokens": (Tokens, rows(5, 7, 4), {}),
    "conv": (conv_net, images(5), {"0": 18, "2": 10}),
}


@pytest.mark.parametrize("model", CURVLINOPS)
def test_the_factors_are_those_of_curvlinops(model):
    """Where that package is installed: KFAC-expand of the empirical Fisher matrix. A conv's
    factors have other scales there, with the same product."""
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    build, x, positions = CURVLINOPS[model]
    model = build().double()
    with torch.no_grad():
        y = model(x).argmax(1).roll(1)
    theirs = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs.compute_kronecker_factors()
    reference = reference_of(model)
    nn.functional.cross_entropy(model(x), y).backward()
    reference.step()
    assert set(reference.names) == set(theirs._input_covariances)
    for name in reference.names:
        a, g = reference.factors(name)
        s = positions.get(name, 1)
        assert relative(a, theirs._input_covariances[name] * s) < 1e-13, name
        assert relative(g, theirs._gradient_covariances[name] / s) < 1e-13, name


def test_it_trains():
    torch.manual_seed(0)
    model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reference = Reference(model, optimizer, damping=1e-2, factors_every=1, inverses_every=2)
    losses = []
    for i in range(60):
        optimizer.zero_grad()
        x, y = batch(i % 3)
        loss = nn.functional.mse_loss(model(x.double()), y.double())
        loss.backward()
        reference.step()
        losses.append(float(loss))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
