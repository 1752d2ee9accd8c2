# SPDX-License-Identifier: BSD-3-Clause
"""An update finds most of its inputs as its last one has left them. What has changed in between is
seen: the bits are those of a plan that was made just then, and knows nothing."""

import pytest
import torch
from common import Fused, adamw, assert_same, everything, net, run, same, sgd, train

import optfuse
from optfuse._options import is_fused

STEPS = 6


def square(model):
    return model[2].weight


def transpose(t):
    t.data = t.data.t()


def with_holes(t):
    wide = torch.full((t.shape[0], 2 * t.shape[1]), 9.0)
    wide[..., ::2] = t.detach()
    t.data = wide[..., ::2]


def other_memory(t):
    t.data = t.detach().clone()


def more_memory(t):
    storage = t.untyped_storage()
    storage.resize_(storage.nbytes() * 2)


def foreign_memory(t):
    t.data = torch.frombuffer(bytearray(t.detach().numpy().tobytes()), dtype=t.dtype).view(t.shape)


def into_one_buffer(p, optimizer):
    state = optimizer.state[p]
    both = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    state["exp_avg"].data, state["exp_avg_sq"].data = both.unbind()


def wide_counter(p, optimizer):
    optimizer.state[p]["step"].data = optimizer.state[p]["step"].double()


def on(name, change):
    return lambda p, optimizer: change(p if name == "p" else optimizer.state[p][name])


CHANGES = {
    "parameter transposed": on("p", transpose),
    "parameter with holes": on("p", with_holes),
    "parameter in other memory": on("p", other_memory),
    "parameter in foreign memory": on("p", foreign_memory),
    "parameter in shared memory": on("p", torch.Tensor.share_memory_),
    "state transposed": on("exp_avg", transpose),
    "state with holes": on("exp_avg_sq", with_holes),
    "state in other memory": on("exp_avg", other_memory),
    "state in foreign memory": on("exp_avg", foreign_memory),
    "storage of the state resized": on("exp_avg_sq", more_memory),
    "state in one buffer": into_one_buffer,
    "step counter in float64": wide_counter,
}


def changed_after(change, knows_nothing=False):
    """Trains, changes something half-way, and goes on, as a new plan or not."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i)
            if i == STEPS // 2:
                optfuse.flush(optimizer)
                change(square(model), optimizer)
            if i == STEPS // 2 and knows_nothing:
                optfuse.unfuse(optimizer)
                wrap(optimizer)
        yield from everything(model, optimizer)

    return script


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_seen(change, mode):
    new = run(changed_after(CHANGES[change], knows_nothing=True), Fused(mode))
    old = run(changed_after(CHANGES[change]), Fused(mode))
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a, b)


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_momentum_that_comes_and_goes(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        for i in range(STEPS):
            optimizer.param_groups[0]["momentum"] = 0.0 if i % 3 == 0 else 0.9
            yield "loss", train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_parameter_of_another_size_or_dtype(dtype):
    def script(wrap):
        p = torch.nn.Parameter(torch.ones(4))
        optimizer = wrap(adamw([p]))
        for i in range(STEPS):
            if i == STEPS // 2:
                p.grad = None
                p.data = torch.full((9,), 0.5, dtype=dtype)
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][name].data = torch.full((9,), 0.1, dtype=dtype)
            p.grad = torch.full_like(p, i + 1)
            optimizer.step()
        yield "parameter", p
        yield "state", dict(optimizer.state[p])

    same(script)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_a_counter_that_was_refused(mode, dtype):
    """The next update looks at everything: nothing was found out about its parameter yet."""

    def script(wrap):
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = wrap(adamw([p]))
        for i in range(STEPS):
            if i == STEPS // 2:
                optfuse.flush()
                for tensor in (p, *optimizer.state[p].values()):
                    tensor.data = tensor.detach().to(tensor.dtype if tensor.dim() == 0 else dtype)
                refuse_counter(p, optimizer)
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()
        yield "weights", p
        yield "state", dict(optimizer.state[p])

    def refuse_counter(p, optimizer):
        if not is_fused(optimizer):
            return
        counter = optimizer.state[p]["step"]
        before = counter.clone()
        for number in (-3.0, float("nan")):
            counter.fill_(number)
            optimizer.zero_grad()
            with pytest.raises(optfuse.Error, match="bad inputs of an update"):
                p.square().sum().backward()
                optimizer.step()
        counter.copy_(before)

    same(script, mode)
